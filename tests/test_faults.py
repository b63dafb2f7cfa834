"""Faults in real jobs: each is a clear error on every rank that is left, in time, and no hang."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.transport import engines
from ranks import Failed, Gone, Ranks

PEER_TIMEOUT = 2.0
ENVIRONMENT = {
    "GRADWIRE_PEER_TIMEOUT": str(PEER_TIMEOUT),
    "GRADWIRE_RENDEZVOUS_TIMEOUT": "20",
}


def module() -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 64))
    return DistributedDataParallel(net, bucket_cap_mb=0.1)


def backward(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(4, 64)).square().mean().backward()


def warm_up(ddp: DistributedDataParallel, steps: int = 2) -> None:
    """Past what DDP does over gloo: it rebuilds its buckets before the second forward pass, and
    synchronises buffers before each. From here on a step asks gradwire alone."""
    for _ in range(steps):
        backward(ddp)
    ddp.require_forward_param_sync = False


def dies(rank: int, world: int, how: str, policy: str) -> dict[str, Any]:
    """Rank 2 dies or freezes before its fourth step; the others find out in backward()."""
    ddp = module()
    gradwire.attach(ddp, policy)
    warm_up(ddp, 3)
    dist.barrier()  # rank 2 may still owe the others a result of the third step
    if rank == 2:
        if how == "killed":
            os.kill(os.getpid(), 9)
        os.kill(os.getpid(), 19)
    with pytest.raises(RuntimeError) as raised:
        backward(ddp)
    with pytest.raises(RuntimeError) as again:
        backward(ddp)
    return {"message": str(raised.value), "again": str(again.value)}


@pytest.mark.parametrize(
    ("how", "policy"), [("killed", "dblp"), ("frozen", "dblp"), ("killed", "reliable")]
)
def test_a_peer_that_dies_in_mid_training_is_named_in_time(how: str, policy: str) -> None:
    with Ranks(3, **ENVIRONMENT) as ranks:
        try:
            ranks.start(dies, how=how, policy=policy)
            outcomes = ranks.collect(ranks=(0, 1))  # long before a transfer times out
        finally:
            ranks.kill(2)
    for outcome in outcomes:
        assert isinstance(outcome, dict), outcome
        assert "rank 2" in outcome["message"]
        assert "step 3" in outcome["message"]
        assert "rank 2" in outcome["again"]


def validates(rank: int, world: int) -> float:
    ddp = module()
    attachment = gradwire.attach(ddp, "dblp")
    warm_up(ddp)
    started = time.monotonic()
    dist.barrier()  # from here on rank 1 waits, however late it came
    if rank == 0:
        time.sleep(2 * PEER_TIMEOUT)
    backward(ddp)
    backward(ddp)
    attachment.detach()
    return time.monotonic() - started


def test_a_live_peer_may_compute_for_longer_than_the_peer_timeout() -> None:
    with Ranks(2, **ENVIRONMENT) as ranks:
        elapsed = ranks.run(validates)
    assert elapsed[1] >= 2 * PEER_TIMEOUT


def never_comes(rank: int, world: int) -> str:
    ddp = module()
    if rank == 1:
        return ""
    with pytest.raises(gradwire.RendezvousError) as raised:
        gradwire.attach(ddp, rendezvous_timeout=1.0)
    return str(raised.value)


def test_a_missing_peer_is_named() -> None:
    with Ranks(3, **ENVIRONMENT) as ranks:
        first, _, third = ranks.run(never_comes)
    for message in (first, third):
        assert "rank 1 did not join within 1 s" in message


def other_version(rank: int, world: int) -> str:
    from gradwire import _engine

    if rank == 1:
        _engine.PROTOCOL_VERSION += 1
    with pytest.raises(gradwire.RendezvousError) as raised:
        gradwire.attach(module())
    if rank == 1:
        _engine.PROTOCOL_VERSION -= 1
    return str(raised.value)


def test_another_protocol_version_is_named_with_both() -> None:
    from gradwire import _engine

    version = _engine.PROTOCOL_VERSION
    with Ranks(2, **ENVIRONMENT) as ranks:
        for message in ranks.run(other_version):
            assert f"rank 1 speaks gradwire protocol version {version + 1}" in message
            assert f"rank 0 speaks version {version}" in message


def other_plan(rank: int, world: int) -> str:
    ddp = module()
    attachment = gradwire.attach(ddp, "mlt", p=0.1)
    backward(ddp)
    if rank == 1:
        attachment.policy.p = 0.2  # on one rank only: its next plan is another
    with pytest.raises(RuntimeError) as raised:
        backward(ddp)
    return str(raised.value)


def test_another_plan_in_mid_training_is_named() -> None:
    with Ranks(2, **ENVIRONMENT) as ranks:
        messages = ranks.run(other_plan)
    assert any("plan" in message for message in messages)
    assert all("rank" in message for message in messages)


def exits(rank: int, world: int) -> str:
    """Ends without detach() or destroy_process_group(), with an engine open."""
    ddp = module()
    gradwire.attach(ddp, "dblp")
    backward(ddp)
    dist.barrier()
    return "done"


def test_a_process_that_just_ends_ends_in_peace() -> None:
    with Ranks(2, **ENVIRONMENT) as ranks:
        assert ranks.run(exits) == ["done", "done"]
        ranks.close()
        assert [process.exitcode for process in ranks.processes] == [0, 0]


def interrupted(rank: int, world: int) -> str:
    """A callback of DDP's future never sees set_exception: it would crash the process."""
    ddp = module()
    attachment = gradwire.attach(ddp, "reliable", timeout=2.0)
    warm_up(ddp)
    if rank == 1:
        dist.barrier()  # rank 0 has given up
        return ""
    with pytest.raises(RuntimeError) as raised:
        backward(ddp)
    dist.barrier()
    attachment.detach()
    return str(raised.value)


def test_a_transfer_that_takes_too_long_is_an_error_and_no_crash() -> None:
    with Ranks(2, **ENVIRONMENT) as ranks:
        outcome = ranks.outcomes(interrupted)
    assert not isinstance(outcome[0], (Failed, Gone)), outcome
    assert "step 2" in outcome[0]
    assert "rank 1" in outcome[0]


def waits_long(rank: int, world: int) -> tuple[list[str], dict[str, Any]]:
    """Rank 1 does not begin its third step: what rank 0 logs meanwhile, and its error."""
    logged: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(watch)
    ddp = module()
    gradwire.attach(ddp, "reliable", timeout=3.0)
    warm_up(ddp)
    dist.barrier()  # the steps before are over
    engines.FIRST_WARNING_S, engines.NEXT_WARNING_S = 0.5, 0.5
    if rank == 1:
        dist.barrier()  # rank 0 has given up
        return logged, {}
    with pytest.raises(RuntimeError) as raised:
        backward(ddp)
    dist.barrier()
    return logged, {"text": str(raised.value)}


def test_a_long_wait_is_logged_with_who_has_not_begun_and_when_it_was_last_heard() -> None:
    with Ranks(2, **ENVIRONMENT) as ranks:
        (logged, error), (silent, _) = ranks.run(waits_long)
    assert len(logged) >= 2
    for line in logged:
        assert "step 2" in line
        assert "rank 1 has not begun it and was last heard" in line
    assert silent == []
    assert "rank 1 has not begun it" in error["text"]
    assert "timeout=3, as given" in error["text"]


class Generator(nn.Linear):
    """A name of its own."""


def in_another_order(rank: int, world: int) -> tuple[list[str], str]:
    """Each rank waits in another module: what it logs meanwhile, and its error."""
    logged: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(watch)
    modules = [DistributedDataParallel(kind(8, 8)) for kind in (nn.Linear, Generator)]
    for each in modules:
        gradwire.attach(each, "reliable", timeout=3.0)
        each(torch.ones(2, 8)).sum().backward()
    dist.barrier()  # the steps before are over
    engines.FIRST_WARNING_S = 0.5
    first = modules[0] if rank else modules[1]  # the other one would be the next
    with pytest.raises(RuntimeError) as raised:
        first(torch.ones(2, 8)).sum().backward()
    return logged, str(raised.value)


def test_modules_that_are_stepped_in_another_order_are_named() -> None:
    with Ranks(2, **ENVIRONMENT) as ranks:
        outcomes = ranks.run(in_another_order)
    for rank, (logged, _) in enumerate(outcomes):
        own, other = ("Generator, number 1", "Linear, number 0")[:: -1 if rank else 1]
        expected = f"this rank waits in module {own}, rank {1 - rank} in module {other}"
        assert all(expected in line for line in logged)
        assert logged
    # Whoever is first to give up says so in its error, too, and the other may only hear of it.
    assert any("the order differs" in error for _, error in outcomes)


def takes_the_environment(rank: int, world: int) -> str:
    ddp = module()
    gradwire.attach(ddp, "reliable")
    warm_up(ddp)
    if rank == 1:
        dist.barrier()  # rank 0 has given up
        return ""
    with pytest.raises(RuntimeError) as raised:
        backward(ddp)
    dist.barrier()
    return str(raised.value)


def test_a_time_out_says_where_its_setting_came_from() -> None:
    with Ranks(2, **ENVIRONMENT, GRADWIRE_TIMEOUT="1.5") as ranks:
        text = ranks.run(takes_the_environment)[0]
    assert "timeout=1.5, from GRADWIRE_TIMEOUT" in text


# ---------------------------------------------------------------------------- memory


def needs_too_much(rank: int, world: int) -> dict[str, Any]:
    """Each parameter fits within the limit of rank 1, but the largest bucket does not."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))))
    gradwire.attach(ddp, "reliable", memory_limit=2 << 20 if rank == 1 else 0)
    with pytest.raises(RuntimeError) as raised:
        ddp(torch.ones(4, 512)).square().mean().backward()
    return {"message": str(raised.value)}


def test_a_bucket_that_exceeds_one_rank_s_memory_limit_is_an_error_on_all() -> None:
    with Ranks(3) as ranks:
        outcomes = ranks.run(needs_too_much)
    for outcome in outcomes:
        assert "memory_limit=2097152 at rank 1: step 0" in outcome["message"]
        assert "needs at least" in outcome["message"]
