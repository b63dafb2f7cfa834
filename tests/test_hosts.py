"""Several ranks a host: they sum among themselves, and one of them speaks for the host.

Hosts are network namespaces, so these tests need root or user namespaces.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
import seccomp
import test_after_failure
import test_ddp
import test_ddp_modules
import test_ddp_steps
import test_ddp_together
from ddp_jobs import batch, fingerprint, gradients, local_gradients, model, train, wrap
from gradwire.core.plan import TransferPlan
from gradwire.policies import PlanContext, Reliable
from gradwire.transport import engines
from host_ranks import Builder, HostRanks
from own_state import own_state
from ranks import Gone

pytestmark = pytest.mark.usefixtures("namespaces")

ports = itertools.count(28_000)
PAIRS = (0, 0, 1, 1)
UNEQUAL = (0, 0, 1, 0)


def cable(network: Builder) -> None:
    network.cable(0, 1, "eth0")
    for host in (0, 1):
        network.address(host, "eth0", f"10.0.0.{host + 1}", 24)


def hosts(places: tuple[int, ...]) -> HostRanks:
    names = [f"host{place}" for place in places]
    return HostRanks(
        cable,
        places=places,
        names=names,
        GRADWIRE_PEER_TIMEOUT="10",
        GRADWIRE_RENDEZVOUS_TIMEOUT="20",
        GLOO_SOCKET_IFNAME="eth0",
    )


@pytest.fixture(scope="module")
def pairs() -> Iterator[HostRanks]:
    """Ranks 0 and 1 on one host, ranks 2 and 3 on another."""
    with hosts(PAIRS) as ranks:
        ranks.run(join_group, port=next(ports))
        yield ranks


@pytest.fixture(scope="module")
def unequal() -> Iterator[HostRanks]:
    """Ranks 0, 1 and 3 on one host, rank 2 on another."""
    with hosts(UNEQUAL) as ranks:
        ranks.run(join_group, port=next(ports))
        yield ranks


def join_group(rank: int, world: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://10.0.0.1:{port}", rank=rank, world_size=world
    )


def by_host(local: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """The mean over ranks, summed in rank order within each host and then over hosts."""
    everybody = [torch.empty_like(local) for _ in places]
    dist.all_gather(everybody, local)
    order = list(dict.fromkeys(places))
    share = torch.tensor(len(order) / len(places), dtype=torch.float32)
    sums = []
    for host in order:
        own = [values for values, place in zip(everybody, places, strict=True) if place == host]
        total = own[0].clone()
        for values in own[1:]:
            total += values
        sums.append(total * share)
    mean = sums[0].clone()
    for total in sums[1:]:
        mean += total
    return mean * torch.tensor(1.0 / len(order), dtype=torch.float32)


def exact_steps(
    rank: int, world: int, places: tuple[int, ...], steps: int, **options: bool
) -> dict[str, Any]:
    net, twin = model(), model()
    ddp = wrap(net, **options)
    attachment = gradwire.attach(ddp, "reliable")
    equal = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        equal.append(
            torch.equal(gradients(ddp), by_host(local_gradients(twin, batch(rank, step)), places))
        )
    report, counters = attachment.report(), attachment.counters()
    attachment.detach()
    return {"equal": equal, "rank": report.rank, "step": report.step, "counters": counters}


@pytest.mark.parametrize(("name", "places"), [("pairs", PAIRS), ("unequal", UNEQUAL)])
def test_an_exact_mean_is_that_of_a_sum_within_hosts_and_then_over_hosts(
    request: pytest.FixtureRequest, name: str, places: tuple[int, ...]
) -> None:
    ranks = request.getfixturevalue(name)
    outcomes = ranks.run(exact_steps, places=places, steps=4)
    for rank, outcome in enumerate(outcomes):
        assert outcome["equal"] == [True] * 4
        assert (outcome["rank"], outcome["step"]) == (rank, 3)
        speaks = places.index(places[rank]) == rank
        assert bool(outcome["counters"]) == speaks


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
def test_a_mean_reaches_gradients_wherever_ddp_has_them(pairs: HostRanks, option: str) -> None:
    for outcome in pairs.run(exact_steps, places=PAIRS, steps=3, **{option: True}):
        assert outcome["equal"] == [True] * 3


# ---------------------------------------------------------------------------- what DDP does


@pytest.mark.parametrize(
    "job",
    [
        test_ddp.no_sync,
        test_ddp.unused,
        test_ddp_steps.overflows,
        test_ddp_steps.scaled,
        test_ddp_steps.shares,
        test_ddp_together.branches,
    ],
    ids=lambda job: job.__name__,
)
def test_jobs_run_as_with_a_rank_a_host(pairs: HostRanks, job: Callable[..., None]) -> None:
    pairs.run(job)


def test_uneven_inputs(pairs: HostRanks) -> None:
    """Leaders and followers join at different steps, beside a scaler whose scale grows."""
    assert len(set(pairs.run(test_ddp_modules.uneven_scaled, steps=(2, 7, 4, 5)))) == 1


def test_a_vote_of_a_follower_rules_all(pairs: HostRanks) -> None:
    outcomes = pairs.run(test_ddp_steps.votes)
    assert (
        outcomes == [["critical"] * 2 + ["tolerant"] * 3 + ["critical"] * 2 + ["tolerant"] * 2] * 4
    )


def lossy(rank: int, world: int, steps: int) -> dict[str, Any]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "dblp", every=3, eta=0.01, loss_rise=0.5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    if attachment.counters():
        attachment.communicator.set_drop(0.03, 4.0, rank)
    for step in range(steps):
        optimizer.zero_grad()
        attachment.epoch(step + rank)
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
        attachment.loss(float(rank))
    report, state = attachment.report(), own_state(attachment.state_dict())
    attachment.detach()
    return {
        "print": fingerprint(ddp),
        "report": report,
        "phases": state["phases"],
    }


def test_replicas_and_decisions_are_the_same_on_all_ranks_under_loss(pairs: HostRanks) -> None:
    outcomes = pairs.run(lossy, steps=25)
    assert len({outcome["print"] for outcome in outcomes}) == 1
    assert len({repr(outcome["phases"]) for outcome in outcomes}) == 1
    reports = [outcome["report"] for outcome in outcomes]
    assert [report.rank for report in reports] == [0, 1, 2, 3]
    assert {report.agreed.loss for report in reports} == {1.5}  # the mean over ranks
    assert {report.agreed.epoch for report in reports} == {24 + 3}
    assert len({report.phase for report in reports}) == 1
    assert reports[0].delivered == reports[1].delivered  # of their host
    assert reports[2].delivered == reports[3].delivered


def test_the_mean_loss_is_that_of_ranks_where_hosts_are_unequal(unequal: HostRanks) -> None:
    reports = [outcome["report"] for outcome in unequal.run(lossy, steps=3)]
    assert {report.agreed.loss for report in reports} == {1.5}


def differ(rank: int, world: int) -> str:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    attachment.grad_scale = 8.0 if rank == 1 else 1.0
    with pytest.raises(RuntimeError) as failed:
        ddp(batch(rank, 0)).square().mean().backward()
    attachment.detach()
    return str(failed.value)


def test_a_scale_of_a_follower_that_differs_is_named_on_all_ranks(pairs: HostRanks) -> None:
    for text in pairs.run(differ):
        assert "ranks 0, 2, 3 multiply their gradients by 1, rank 1 by 8" in text


# ---------------------------------------------------------------------------- bytes and states


def sent(rank: int, world: int, **options: Any) -> tuple[int, float]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable", **options)
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
    counters = attachment.counters()
    attachment.detach()
    return 4 * sum(p.numel() for p in ddp.parameters()), counters.get("bytes_sent", 0.0)


def test_a_host_sends_the_gradient_once_whatever_its_ranks(pairs: HostRanks) -> None:
    outcomes = pairs.run(sent)
    for rank in (0, 2):
        gradient, bytes_sent = outcomes[rank]
        assert bytes_sent < 1.15 * 3 * gradient  # half of it pushed, and half of it as results
    assert [outcomes[rank][1] for rank in (1, 3)] == [0.0, 0.0]


def test_every_rank_speaks_for_itself_where_that_is_set(pairs: HostRanks) -> None:
    assert all(bytes_sent > 0.0 for _, bytes_sent in pairs.run(sent, hosts=False))


def sums_itself(rank: int, world: int) -> str:
    attachment = gradwire.attach(wrap(model()), "reliable")
    values = torch.full((1000,), float(rank + 1))
    try:
        attachment.communicator.all_reduce(values).wait()
        return str(values.unique().tolist())
    except gradwire.GradwireError as error:
        return str(error)
    finally:
        attachment.detach()


def test_a_follower_cannot_start_a_transfer_of_its_own(pairs: HostRanks) -> None:
    outcomes = pairs.run(sums_itself)
    assert outcomes[0] == outcomes[2] == "[4.0]"  # over the leaders
    assert "rank 0 leads its host and speaks for it" in outcomes[1]
    assert "rank 2 leads its host and speaks for it" in outcomes[3]


def owed(state: dict[str, Any]) -> bool:
    return any(bool(values.any()) for values in state["residuals"].values())


def resumes(rank: int, world: int) -> tuple[bool, bytes, bytes]:
    """An interrupted run and one that is not, under a policy that loses the same in both."""
    options = {"p": 0.3, "error_feedback": True}
    prints, owes = [], False
    for stops in (False, True):
        ddp = wrap(model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        attachment = gradwire.attach(ddp, "mlt", **options)
        for step in range(8):
            if step == 4 and stops:
                state = own_state(attachment.state_dict())
                owes = owed(state)
                attachment.detach()
                attachment = gradwire.attach(ddp, "mlt", **options)
                attachment.load_state_dict(state)
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()
        attachment.detach()
        prints.append(fingerprint(ddp))
    return owes, prints[0], prints[1]


def test_a_run_goes_on_from_the_residuals_of_the_ranks_that_speak(pairs: HostRanks) -> None:
    outcomes = pairs.run(resumes)
    assert [owes for owes, _, _ in outcomes] == [True, False, True, False]
    assert len({one for _, *both in outcomes for one in both}) == 1


def regroups(rank: int, world: int, flushes: bool) -> str:
    """Saves with a rank a host and goes on with several."""
    ddp = wrap(model())
    options: dict[str, Any] = {"p": 0.3, "error_feedback": True}
    attachment = gradwire.attach(ddp, "mlt", hosts=False, **options)
    for step in range(3):
        if step == 1 and flushes and rank == world - 1:
            attachment.flush()
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
    state = own_state(attachment.state_dict())
    attachment.detach()
    attachment = gradwire.attach(ddp, "mlt", **options)
    try:
        attachment.load_state_dict(state)
        return ""
    except gradwire.ConfigError as error:
        return error.setting
    finally:
        attachment.detach()


@pytest.mark.parametrize(("flushes", "setting"), [(False, "state['speaks_for']"), (True, "")])
def test_residuals_of_other_places_are_refused(
    pairs: HostRanks, flushes: bool, setting: str
) -> None:
    assert pairs.run(regroups, flushes=flushes) == [setting] * 4


def moves(rank: int, world: int) -> dict[str, Any]:
    """A run whose flushed checkpoint goes on with each rank for itself."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "dblp", every=4, detector="layers")
    for step in range(3):
        if step == 1 and rank == world - 1:  # which follows on its host
            attachment.flush()
        train(ddp, rank, range(step, step + 1))
    state = own_state(attachment.state_dict())
    attachment.detach()
    attachment = gradwire.attach(ddp, "dblp", every=4, detector="layers", hosts=False)
    attachment.load_state_dict(state)
    train(ddp, rank, range(3, 12))
    phases = own_state(attachment.state_dict())["phases"]
    attachment.detach()
    return {"print": fingerprint(ddp), "phases": repr(phases), "steps": state["layer_steps"]}


def test_a_flushed_checkpoint_moves_to_ranks_that_speak_for_themselves(pairs: HostRanks) -> None:
    outcomes = pairs.run(moves)
    assert len({outcome["print"] for outcome in outcomes}) == 1
    assert len({outcome["phases"] for outcome in outcomes}) == 1
    assert {outcome["steps"] for outcome in outcomes} == {3}


def misses(rank: int, world: int) -> object:
    """Two steps of which too little is delivered; how many of them the state counts."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.4, floor=0.9)
    train(ddp, rank, range(2))
    state = own_state(attachment.state_dict())
    attachment.detach()
    return state["guarded"]


def test_every_rank_saves_the_guard_s_count(pairs: HostRanks) -> None:
    assert pairs.run(misses) == [2] * 4


# ---------------------------------------------------------------------------- failures


def disagree(rank: int, world: int) -> tuple[str, str]:
    ddp = wrap(model())
    with pytest.raises(gradwire.RendezvousError) as refused:
        gradwire.attach(ddp, "reliable", hosts=False if rank == 1 else "auto")
    return type(refused.value).__name__, str(refused.value)


def test_ranks_that_set_hosts_differently_are_named_on_all_ranks(pairs: HostRanks) -> None:
    for _, text in pairs.run(disagree):
        assert "rank 1" in text
        assert "hosts" in text


def in_another_order(rank: int, world: int) -> tuple[list[str], str]:
    """Rank 1, whose host rank 0 leads, waits in another module than all others."""
    logged: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(watch)
    engines.FIRST_WARNING_S = 0.5
    modules = [wrap(torch.nn.Linear(8, 8)), wrap(torch.nn.Bilinear(8, 8, 8))]
    inputs = [(torch.ones(2, 8),), (torch.ones(2, 8), torch.ones(2, 8))]
    for module, given in zip(modules, inputs, strict=True):
        gradwire.attach(module, "reliable", timeout=3.0)
        module(*given).sum().backward()
    first = 1 if rank == 1 else 0
    with pytest.raises(RuntimeError) as raised:
        modules[first](*inputs[first]).sum().backward()
    return logged, str(raised.value)


def test_a_leader_names_the_modules_that_its_host_steps_in_another_order() -> None:
    with hosts(PAIRS) as ranks:
        ranks.run(join_group, port=next(ports))
        outcomes = ranks.run(in_another_order)
    expected = "waits in module Linear, number 0, rank 1 in module Bilinear, number 1"
    assert any(expected in line for line in outcomes[0][0])
    assert any(expected in error for _, error in outcomes)


def refused_memory(rank: int, world: int) -> None:
    if rank == 2:
        seccomp.refuse("memfd_create")


def refused_sockets(rank: int, world: int) -> None:
    if rank == 3:
        seccomp.refuse("socket", socket.AF_UNIX)


@contextlib.contextmanager
def refusing_sockets(rank: int) -> Iterator[None]:
    """Rank 3 can make no connection within its host, as under SELinux."""

    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_UNIX:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(socket.socket, "connect", refuse)
        yield


def demands_hosts(rank: int, world: int) -> tuple[tuple[int, ...], str, float]:
    """What all get with hosts=True where that is refused, and after how long."""
    ddp = wrap(model())
    dist.barrier()
    began = time.monotonic()
    with refusing_sockets(rank), pytest.raises(gradwire.RendezvousError) as refused:
        gradwire.attach(ddp, "reliable", hosts=True, rendezvous_timeout=60.0)
    return refused.value.ranks, str(refused.value), time.monotonic() - began


def goes_without(rank: int, world: int, sockets: bool) -> tuple[bool, bool, list[str], float]:
    """What hosts="auto" comes to where sharing is refused."""
    net, twin = model(), model()
    ddp = wrap(net)
    dist.barrier()
    began, lines = time.monotonic(), Lines()
    logging.getLogger("gradwire").addHandler(lines)
    with refusing_sockets(rank) if sockets else contextlib.nullcontext():
        attachment = gradwire.attach(ddp, "reliable", rendezvous_timeout=60.0)
    logging.getLogger("gradwire").removeHandler(lines)
    took = time.monotonic() - began
    ddp(batch(rank, 0)).square().mean().backward()
    everybody = [torch.empty_like(gradients(ddp)) for _ in range(world)]
    dist.all_gather(everybody, local_gradients(twin, batch(rank, 0)))
    expected = sum(everybody[1:], everybody[0].clone()) * torch.tensor(1.0 / world)
    right = torch.equal(gradients(ddp), expected)
    speaks = bool(attachment.counters())
    attachment.detach()
    return right, speaks, lines.found, took


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def check_without(outcomes: list[tuple[bool, bool, list[str], float]], who: str) -> None:
    for right, speaks, _, took in outcomes:
        assert right
        assert speaks  # each rank for itself
        assert took < 45.0  # nobody has waited for rendezvous_timeout
    (line,) = [line for _, _, lines, _ in outcomes for line in lines]  # of one rank
    assert who in line


def check_demand(outcomes: list[tuple[tuple[int, ...], str, float]], who: int) -> None:
    for ranks, text, took in outcomes:
        assert ranks == (who,)
        assert os.strerror(errno.EACCES) in text
        assert took < 45.0


def test_ranks_that_may_not_connect_within_their_host_go_without(pairs: HostRanks) -> None:
    check_demand(pairs.run(demands_hosts), 3)
    check_without(pairs.run(goes_without, sockets=True), "rank 3")
    outcomes = pairs.run(exact_steps, places=PAIRS, steps=1)  # where nothing is refused again
    assert [bool(outcome["counters"]) for outcome in outcomes] == [True, False, True, False]


@pytest.mark.skipif(not seccomp.CALLS, reason="system calls of this machine are not known")
@pytest.mark.parametrize(
    ("refuse", "who"), [(refused_memory, "rank 2"), (refused_sockets, "rank 3")]
)
def test_ranks_whose_kernel_refuses_memory_or_sockets_go_without(
    refuse: Callable[..., None], who: str
) -> None:
    with hosts(PAIRS) as ranks:
        ranks.run(join_group, port=next(ports))
        ranks.run(refuse)
        check_without(ranks.run(goes_without, sockets=False), who)


@pytest.mark.parametrize("value", [0, 1, 2, "host", None])
def test_a_value_of_hosts_that_is_not_possible_is_refused(value: object) -> None:
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.Settings.build({"hosts": value}, environment={})
    assert refused.value.setting == "hosts"


def fails(rank: int, world: int, who: int, how: str, steps: int = 1) -> str:
    """One rank fails in the middle of the step after so many; what the others get."""
    ddp = wrap(model())
    limits: dict[str, dict[str, object]] = {
        "freezes": {"timeout": 60.0, "peer_timeout": 2.0},
        "waits": {"timeout": 2.0},
    }
    attachment = gradwire.attach(ddp, "reliable", **limits.get(how, {}))
    processes: list[Any] = [None] * world
    dist.all_gather_object(processes, os.getpid())
    for step in range(steps):
        ddp(batch(rank, step)).square().mean().backward()
    loss = ddp(batch(rank, steps)).square().mean()
    dist.barrier()  # otherwise it may fail while others wait for the end of the step before
    if rank == who:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "raises":
            next(ddp.parameters()).register_hook(_raise)
        if how == "waits":
            dist.barrier()
    began = time.monotonic()
    with pytest.raises((RuntimeError, ArithmeticError)) as failed:
        loss.backward()
    assert time.monotonic() - began < 20.0
    if how == "freezes" and rank == who ^ 1:
        os.kill(processes[who], signal.SIGCONT)
    if how == "waits" and rank != who:
        dist.barrier()
    attachment.detach()
    return str(failed.value)


def _raise(gradient: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("mine")


def leaves_first(rank: int, world: int) -> str:
    """The followers detach after a step; what the leaders get in that step, and in the next one."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):  # in the second one DDP makes its buckets anew, together
        ddp(batch(rank, step)).square().mean().backward()
    if rank in (1, 3):
        attachment.detach()
        dist.barrier()
        return ""
    dist.barrier()
    while any(thread.name == "gradwire-host-1" for thread in threading.enumerate()):
        time.sleep(0.01)  # it ends once it has noted that the follower is gone
    optimizer.step()
    loss = ddp(batch(rank, 2)).square().mean()
    with pytest.raises(RuntimeError) as failed:
        loss.backward()
    attachment.detach()
    return str(failed.value)


def test_a_rank_that_detaches_first_spoils_no_step_that_is_done(pairs: HostRanks) -> None:
    outcomes = pairs.run(leaves_first)
    assert "rank 1 of this host has ended or detached" in outcomes[0] + outcomes[2]
    assert outcomes[0]
    assert outcomes[2]


class OddError(gradwire.GradwireError):
    """An error of a policy that cannot be unpickled, since its arguments are not its text."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} has no plan: {why}")


class Odd(Reliable):
    """A policy of which rank 0 writes no plan in step 1."""

    def plan(self, context: PlanContext) -> TransferPlan:
        if context.step == 1 and dist.get_rank() == 0:
            raise OddError(0, "it is odd")
        return super().plan(context)


def odd(rank: int, world: int) -> str:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, Odd())
    ddp(batch(rank, 0)).square().mean().backward()
    dist.barrier()  # otherwise rank 0 may fail while others wait for the end of this step
    with pytest.raises(RuntimeError) as failed:
        ddp(batch(rank, 1)).square().mean().backward()
    attachment.detach()
    return str(failed.value)


def test_an_error_that_cannot_be_unpickled_reaches_all_hosts(pairs: HostRanks) -> None:
    for text in pairs.run(odd):
        assert "rank 0 has no plan: it is odd" in text


def leaves(rank: int, world: int, who: int) -> None:
    """The first or the second rank of each host detaches as soon as its gradients are there."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attachment = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(2))  # until DDP exchanges nothing of its own
    before = fingerprint(ddp)
    optimizer.zero_grad()
    ddp(batch(rank, 2)).square().mean().backward()
    if rank % 2 == who:
        attachment.detach()
    for _ in range(20):  # meanwhile the other rank notices
        dist.barrier()
    optimizer.step()
    assert fingerprint(ddp) != before
    if rank % 2 != who:
        with pytest.raises(RuntimeError, match="has ended or detached the module") as raised:
            ddp(batch(rank, 3)).square().mean().backward()
        assert f"rank {rank - rank % 2 + who}" in str(raised.value)
        attachment.detach()
    dist.barrier()


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves_its_host_spoils_no_step_that_is_done(
    pairs: HostRanks, who: int
) -> None:
    pairs.run(leaves, who=who)


@pytest.mark.parametrize(("who", "text"), [(1, "rank 1 of this host"), (2, "rank 2")])
def test_a_rank_that_dies_is_named_to_its_host(who: int, text: str) -> None:
    with hosts(PAIRS) as ranks:
        ranks.run(join_group, port=next(ports))
        outcomes = ranks.outcomes(fails, who=who, how="dies")
    assert isinstance(outcomes[who], Gone)
    neighbour = {1: 0, 2: 3}[who]
    assert text in outcomes[neighbour]
    assert re.search(r"\bstep \d+", outcomes[neighbour])
    assert all(isinstance(outcome, str) for rank, outcome in enumerate(outcomes) if rank != who)


NO_ANSWER = "no answer of rank 0, which leads this host, came (timeout=2 s, as given)"


@pytest.mark.parametrize(
    ("who", "how", "steps", "text"),
    [
        (1, "raises", 1, "rank 1 of this host has ended or detached the module"),
        (0, "raises", 1, "rank 0, which leads this host, has ended or detached the module"),
        (1, "waits", 1, "no gradient of rank 1 came (timeout=2 s, as given)"),
        (0, "waits", 2, NO_ANSWER),
        (1, "freezes", 1, "rank 1 of this host has been stopped"),
        # Until it answers the request for memory, since DDP has new buckets; then the gradient.
        (0, "freezes", 1, "rank 0, which leads this host, has been stopped"),
        (0, "freezes", 2, "rank 0, which leads this host, has been stopped"),
    ],
)
def test_a_rank_that_does_not_go_on_is_named_to_its_host(
    pairs: HostRanks, who: int, how: str, steps: int, text: str
) -> None:
    outcomes = pairs.run(fails, who=who, how=how, steps=steps)
    assert text in outcomes[who ^ 1]
    if who == 1 and how != "waits":  # the leader of its host goes on, and tells the others
        assert all(text in outcomes[rank] for rank in (2, 3))
    assert all(outcomes)


def composed(rank: int, world: int, how: str) -> list[bool]:
    """The bare hook inside another one, which halves the average or reads the bucket."""
    net, twin = model(), model()
    ddp = wrap(net)

    hooks: dict[str, tuple[float, Callable[[Any, Any], Any]]] = {
        "halves": (
            0.5,
            lambda state, bucket: gradwire.comm_hook(state, bucket).then(
                lambda done: done.value().div_(2.0)
            ),
        ),
        "reads": (
            1.0,
            lambda state, bucket: gradwire.comm_hook(state, bucket).then(
                lambda done: (done.value(), bucket.buffer())[1]
            ),
        ),
    }
    factor, hook = hooks[how]
    state = gradwire.HookState("reliable", model=net)
    ddp.register_comm_hook(state, hook)
    equal = []
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        expected = by_host(local_gradients(twin, batch(rank, step)), PAIRS) * factor
        equal.append(torch.equal(gradients(ddp), expected))
    state.deactivate()
    return equal


@pytest.mark.parametrize("how", ["halves", "reads"])
def test_the_bare_hook_can_be_composed(pairs: HostRanks, how: str) -> None:
    assert pairs.run(composed, how=how) == [[True] * 3] * 4


def out_of_files(rank: int, world: int) -> str:
    """Rank 1 may open no file any more when the leader sends it the memory of a bucket."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    loss = ddp(batch(rank, 0)).square().mean()
    dist.barrier()  # has all its connections from here on
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
    try:
        dist.barrier()
        with pytest.raises(RuntimeError) as failed:
            loss.backward()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    attachment.detach()
    return str(failed.value)


def test_a_rank_without_a_free_file_descriptor_is_named_to_its_host(pairs: HostRanks) -> None:
    for text in pairs.run(out_of_files)[:2]:
        assert "rank 1, step 0: the memory of bucket 0 came without its file descriptor" in text


def typed(rank: int, world: int) -> bool:
    """Buckets of another type are summed as float32 and rounded once."""
    ddp, twin = wrap(model(torch.bfloat16)), model(torch.bfloat16)
    attachment = gradwire.attach(ddp, "reliable")
    x = batch(rank, 0, torch.bfloat16)
    ddp(x).square().mean().backward()
    expected = by_host(local_gradients(twin, x).float(), PAIRS).to(torch.bfloat16)
    attachment.detach()
    return torch.equal(gradients(ddp), expected)


def test_bfloat16_is_rounded_once(pairs: HostRanks) -> None:
    assert all(pairs.run(typed))


def test_all_attach_again_after_a_follower_was_late(pairs: HostRanks, tmp_path: Path) -> None:
    outcomes = pairs.run(
        test_after_failure.goes_on, kind="timeout", same=True, folder=str(tmp_path)
    )
    assert len({print_ for _, print_ in outcomes}) == 1


# ---------------------------------------------------------------------------- groups and parts


def in_a_part(rank: int, world: int) -> tuple[bool, int]:
    """A module on ranks 0, 1 and 3: two of them on one host."""
    group = dist.new_group([0, 1, 3])
    if rank == 2:
        return False, 0
    ddp = wrap(model(), process_group=group)
    attachment = gradwire.attach(ddp, "reliable")
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
    alike: list[Any] = [None] * 3
    dist.all_gather_object(alike, gradients(ddp).numpy().tobytes(), group)
    speaks = bool(attachment.counters())
    attachment.detach()
    dist.destroy_process_group(group)
    return speaks, len(set(alike))


def test_a_module_on_a_part_of_the_ranks(pairs: HostRanks) -> None:
    assert pairs.run(in_a_part) == [(True, 1), (False, 1), (False, 0), (True, 1)]


def reports(rank: int, world: int, folder: str) -> None:
    ddp = wrap(model(), static_graph=True)
    attachment = gradwire.attach(ddp, "reliable", report=str(Path(folder, "{rank}.jsonl")))
    train(ddp, rank, range(3))
    attachment.detach()


def test_every_rank_writes_the_report_of_its_host(pairs: HostRanks, tmp_path: Path) -> None:
    pairs.run(reports, folder=str(tmp_path))
    for rank in range(4):
        lines = [
            json.loads(line) for line in Path(tmp_path, f"{rank}.jsonl").read_text().splitlines()
        ]
        assert [(line["step"], line["rank"]) for line in lines] == [(s, rank) for s in range(3)]
