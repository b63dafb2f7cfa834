"""attach() and detach(), several modules and groups, in real processes."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ddp_jobs import (
    average_of,
    batch,
    fingerprint,
    gradients,
    local_gradients,
    model,
    train,
    wrap,
)
from gradwire.training.staging import Stage
from gradwire.transport import engines, registry
from gradwire.transport.communicator import Communicator
from own_state import own_state
from ranks import Failed, Ranks, free_port

# ---------------------------------------------------------------------------- attaching


def detaches(rank: int, world: int) -> None:
    net = model()
    ddp = wrap(net)
    first = gradwire.attach(ddp, "reliable")
    with pytest.raises(gradwire.ConfigError, match="already attached"):
        gradwire.attach(ddp)
    train(ddp, rank, range(3))
    assert repr(first) == "Attachment(policy='reliable', step=3)"
    first.detach()
    first.detach()
    assert repr(first) == "Attachment(policy='reliable', step=3, detached)"
    changes: list[Callable[[], object]] = [
        first.flush,
        lambda: first.loss(1.0),
        lambda: first.epoch(3),
        lambda: setattr(first, "phase", None),
        lambda: setattr(first, "grad_scale", 2.0),
        lambda: first.load_state_dict({}),
    ]
    for change in changes:
        with pytest.raises(gradwire.GradwireError, match="detached: attach the module again"):
            change()
    assert first.report().step == 2
    assert own_state(first.state_dict())["step"] == 3
    reference = model()
    reference.load_state_dict(net.state_dict())
    expected = average_of(local_gradients(reference, batch(rank, 9)))
    net.zero_grad()
    ddp(batch(rank, 9)).square().mean().backward()  # over gloo
    torch.testing.assert_close(gradients(net), expected, rtol=1e-6, atol=1e-9)
    assert first.step == 3
    second = gradwire.attach(ddp, "mlt", p=0.1)
    train(ddp, rank, range(3, 6))
    assert second.report().step == 2
    assert second.report().policy == "mlt"
    second.detach()


def test_detach_forwards_to_the_host_group_and_attach_comes_back(two: Ranks) -> None:
    two.run(detaches)


def comes_back(rank: int, world: int) -> None:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(2))
    attachment.detach()
    kept = attachment if rank == 0 else None  # rank 1 lets go of the old attachment
    del attachment
    gc.collect()
    again = gradwire.attach(ddp, "mlt", p=0.1)
    train(ddp, rank, range(2, 4))
    again.detach()
    assert kept is None or kept.report().step == 1


def test_attach_comes_back_whoever_holds_the_old_attachment(two: Ranks) -> None:
    two.run(comes_back)


def foreign(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp = wrap(model())
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(gradwire.ConfigError, match="already has the communication hook 'allreduc"):
        gradwire.attach(ddp)
    other = wrap(model())
    other._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(gradwire.ConfigError, match="one hook for its whole life"):
        gradwire.attach(other)
    with pytest.raises(gradwire.ConfigError, match="a Sequential: wrap it first"):
        gradwire.attach(model())  # type: ignore[arg-type]


def test_a_foreign_hook_is_an_error(two: Ranks) -> None:
    two.run(foreign)


def foreign_on_one(rank: int, world: int) -> tuple[str, str]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp = wrap(model())
    if rank == 1:
        ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises((gradwire.ConfigError, gradwire.RendezvousError)) as raised:
        gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(1))  # over gloo on both, whatever the hook
    return type(raised.value).__name__, str(raised.value)


def test_a_foreign_hook_on_one_rank_is_told_to_all_at_once(two: Ranks) -> None:
    (other, message), (own, own_message) = two.run(foreign_on_one)
    assert (own, other) == ("ConfigError", "RendezvousError")
    assert "already has the communication hook 'allreduce_hook'" in own_message
    assert "attach gradwire to a module without one" in own_message
    assert message == f"rank 1 failed: {own_message}"


def bare(rank: int, world: int) -> None:
    net, reference = model(), model()
    ddp = wrap(net)
    ddp.register_comm_hook(gradwire.HookState("reliable"), gradwire.comm_hook)
    for step in range(3):
        expected = average_of(local_gradients(reference, batch(rank, step)))
        net.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        assert torch.equal(gradients(net), expected)
    wrong = wrap(model())
    wrong.register_comm_hook(None, gradwire.comm_hook)
    with pytest.raises(Exception, match="HookState"):
        wrong(batch(rank, 0)).square().mean().backward()


def names_another_module(rank: int, world: int) -> str | None:
    ddp = wrap(model())
    state = gradwire.HookState("dblp", model=model(), p_low={"0.*": 0.0, "*": 0.3})
    ddp.register_comm_hook(state, gradwire.comm_hook)
    with pytest.raises(gradwire.ConfigError, match=r"model=ddp\.module") as raised:
        train(ddp, rank, range(1))
    return raised.value.setting


def test_a_bare_hook_that_names_another_module_is_refused(two: Ranks) -> None:
    assert two.run(names_another_module) == ["model", "model"]


def test_the_bare_hook_opens_when_first_used(two: Ranks) -> None:
    two.run(bare)


def waits(rank: int, world: int, name: str, options: dict[str, object]) -> str:
    ddp = wrap(model())
    state = gradwire.HookState(name, model=ddp.module, **options)
    ddp.register_comm_hook(state, gradwire.comm_hook)
    with pytest.raises(gradwire.ConfigError) as raised:
        train(ddp, rank, range(1))
    other = wrap(model())
    attachment = gradwire.attach(other, name, **options)  # which has the calls
    train(other, rank, range(1))
    attachment.detach()
    attachment = gradwire.attach(other, name, **options)
    train(other, rank, range(1, 2))
    attachment.detach()
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "told", "call"),
    [
        ("dblp", {"every": "epoch"}, "every='epoch'", "epoch"),
        ("mlt", {"loss_rise": 0.5}, "loss_rise=0.5", "loss"),
    ],
)
def test_what_the_bare_hook_would_wait_for_in_vain_is_refused(
    two: Ranks, name: str, options: dict[str, object], told: str, call: str
) -> None:
    for message in two.run(waits, name=name, options=options):
        assert f"{told} with the bare hook, which has no attachment.{call}()" in message


def disagrees(rank: int, world: int) -> str:
    ddp = wrap(model())
    with pytest.raises(gradwire.RendezvousError) as raised:
        gradwire.attach(ddp, "mlt", p=0.1 * (rank + 1))
    train(ddp, rank, range(1))  # the module works on, over gloo
    attachment = gradwire.attach(ddp, "mlt", p=0.1)
    train(ddp, rank, range(1, 2))
    attachment.detach()
    return str(raised.value)


def test_another_policy_on_a_rank_is_named_by_all(two: Ranks) -> None:
    for message in two.run(disagrees):
        assert "rank 1 has mlt.p=0.2, rank 0 has mlt.p=0.1" in message


def pickles(rank: int, world: int) -> None:
    import copy
    import pickle

    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(1))
    state = pickle.loads(pickle.dumps(ddp._comm_hooks[0][1]))
    assert state.active
    twin = copy.deepcopy(ddp.module)
    assert fingerprint(twin) == fingerprint(ddp.module)
    attachment.detach()


def test_the_hooks_state_can_be_pickled_with_its_module(two: Ranks) -> None:
    two.run(pickles)


# ---------------------------------------------------------------------------- order of ops


class SlowStage(Stage):
    """Waits for its copy, as if the bucket lay on a CUDA device."""

    waits = True
    delay_s = 0.0

    def host(self) -> NDArray[np.float32]:
        time.sleep(self.delay_s)
        self.delay_s = 0.0
        return super().host()


def slow(attachment: gradwire.Attachment, delay_s: float) -> None:
    def stage(index: int, buffer: torch.Tensor, *_: object, **__: object) -> SlowStage:
        made = SlowStage(buffer)
        made.delay_s = delay_s
        return made

    attachment._pipeline._stages.stage = stage  # type: ignore[method-assign]


def two_at_once(rank: int, world: int, staged: int) -> None:
    """The first model's copies are the slow ones on rank 0, the second one's on rank 1."""
    nets, references = [model(), model()], [model(), model()]
    ddps = [wrap(net) for net in nets]
    attachments = [gradwire.attach(ddp, "reliable", timeout=20) for ddp in ddps]
    for number, attachment in enumerate(attachments[:staged]):
        slow(attachment, 0.03 if number == rank else 0.0)
    for step in range(3):
        x = batch(rank, step)
        expected = [
            average_of(local_gradients(net, sign * x))
            for net, sign in zip(references, (1, -1), strict=True)
        ]
        for net in nets:
            net.zero_grad()
        losses = [ddp(sign * x).square().mean() for ddp, sign in zip(ddps, (1, -1), strict=True)]
        sum(losses, start=torch.zeros(())).backward()
        for net, want in zip(nets, expected, strict=True):
            assert torch.equal(gradients(net), want)
    for attachment in attachments:
        attachment.detach()


@pytest.mark.parametrize("staged", [0, 1, 2])
def test_two_models_in_one_backward_keep_their_gradients_apart(two: Ranks, staged: int) -> None:
    """However long their copies take on each rank, and if only one of them has any."""
    two.run(two_at_once, staged=staged)


def swapped(rank: int, world: int) -> str:
    """Each rank waits for the end of another model's backward pass first."""
    ddps = [wrap(model()), wrap(model())]
    attachments = [gradwire.attach(ddp, "reliable", timeout=3) for ddp in ddps]
    assert [a.number for a in attachments] == [0, 1]

    def backward() -> None:
        for ddp in ddps if rank == 0 else reversed(ddps):
            ddp.require_forward_param_sync = False
            ddp(batch(rank, 0)).square().mean().backward()

    with pytest.raises(RuntimeError) as raised:
        backward()
    for attachment in attachments:
        attachment.detach()
    return str(raised.value)


def test_backward_passes_in_another_order_are_an_error_and_no_sum() -> None:
    with Ranks(2, GRADWIRE_PEER_TIMEOUT="10", GRADWIRE_RENDEZVOUS_TIMEOUT="20") as ranks:
        messages = ranks.run(swapped)
    assert all("TransferError" in message and "rank" in message for message in messages)


def numbers(rank: int, world: int) -> list[int]:
    def attach() -> gradwire.Attachment:
        return gradwire.attach(wrap(model()), "reliable")

    first, second = attach(), attach()
    seen = [first.number, second.number]
    first.detach()
    third = attach()
    first.detach()  # again: no harm to the third
    fourth = attach()
    seen += [third.number, fourth.number]
    for attachment in (second, third, fourth):
        attachment.detach()
    wrong = wrap(model())
    with pytest.raises(gradwire.RendezvousError):
        gradwire.attach(wrong, "mlt", p=0.1 * (rank + 1))
    last = attach()
    seen.append(last.number)
    last.detach()
    return seen


def test_attachments_are_numbered_alike_and_numbers_come_back(two: Ranks) -> None:
    first, second = two.run(numbers)
    assert first == second
    lowest = first[0]  # the bare hook of another test may still hold one
    assert [number - lowest for number in first] == [0, 1, 0, 2, 0]


def subgroup(rank: int, world: int, report: str) -> int:
    groups = [dist.new_group([each]) for each in range(world)]
    pair = dist.new_group(list(range(world)))
    single = DistributedDataParallel(model(), process_group=groups[rank])
    attachment = gradwire.attach(single, "reliable", report=report)
    expected = local_gradients(model(), batch(rank, 0))
    single(batch(rank, 0)).square().mean().backward()
    assert torch.equal(gradients(single), expected)
    assert attachment.report().rank == rank
    attachment.detach()
    both = DistributedDataParallel(model(), process_group=pair)
    attachment = gradwire.attach(both, "reliable")
    train(both, rank, range(2))
    attachment.detach()
    communicator: Communicator = attachment.communicator
    return communicator.world_size


def test_groups_with_other_members_are_apart(two: Ranks, tmp_path: Path) -> None:
    """Each is the first of its group; reports count ranks in the job."""
    assert two.run(subgroup, report=str(tmp_path / "each-{rank}.jsonl")) == [2, 2]
    for rank in range(2):
        (line,) = (tmp_path / f"each-{rank}.jsonl").read_text().splitlines()
        assert json.loads(line)["rank"] == rank
    two.run(subgroup, report=str(tmp_path / "all.jsonl"))
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["rank"] for line in lines) == [0, 1]


def otherwise(rank: int, world: int) -> tuple[str, tuple[int, ...]]:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return "", ()
    ddp = DistributedDataParallel(model(), process_group=pair)
    with pytest.raises(gradwire.RendezvousError) as raised:
        gradwire.attach(ddp, "mlt", p=0.1 * (rank + 1))
    return str(raised.value), raised.value.ranks


def test_errors_of_a_group_name_ranks_of_the_job() -> None:
    with Ranks(3) as three:
        first, _, last = three.run(otherwise)
    assert first == last
    assert first[0].startswith("rank 2 has mlt.p=0.3")
    assert "rank 0 has mlt.p=0.1:" in first[0]
    assert first[1] == (2,)


def two_modules(rank: int, world: int, report: str) -> list[int]:
    modules = [wrap(model()), wrap(model())]
    attached = [gradwire.attach(each, "reliable", report=report) for each in modules]
    for module in modules:
        train(module, rank, range(2))
    for each in attached:
        each.detach()
    return [each.report().attachment for each in attached]


def test_lines_of_two_modules_in_one_file_tell_whose_they_are(two: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    numbers, others = two.run(two_modules, report=str(path))
    assert numbers == others
    assert numbers[0] != numbers[1]
    lines = [json.loads(line)["attachment"] for line in path.read_text().splitlines()]
    assert lines == [numbers[0]] * 2 + [numbers[1]] * 2


def no_report(rank: int, world: int, path: str) -> tuple[str, str]:
    ddp = wrap(model())
    with pytest.raises((gradwire.ConfigError, gradwire.RendezvousError)) as raised:
        gradwire.attach(ddp, "mlt", p=0.2, report=path)
    attachment = gradwire.attach(ddp, "mlt", p=0.2)  # the module is none the worse
    train(ddp, rank, range(2))
    attachment.detach()
    return type(raised.value).__name__, str(raised.value)


def test_a_report_that_one_rank_cannot_open_fails_on_all_before_the_first_step(two: Ranks) -> None:
    for name in ("steps.jsonl", "{rank}.jsonl"):
        path = f"/no/such/folder/{name}"
        outcomes = two.run(no_report, path=path)
        for rank, (kind, message) in enumerate(outcomes):
            assert f"report={path!r}" in message
            assert "cannot be opened for writing: No such file or directory" in message
            if rank == 0 or "{rank}" in name:
                assert kind == "ConfigError"
            else:
                assert (kind, message[:13]) == ("RendezvousError", "rank 0 failed")


def too_large(rank: int, world: int) -> list[Any]:
    """A weight of 16 MB, of which each of two ranks sums half, and a limit of 4 MiB on rank 1."""
    ddp = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(2000, 2000)))
    with pytest.raises((gradwire.ConfigError, gradwire.RendezvousError)) as raised:
        gradwire.attach(ddp, "reliable", memory_limit=1 << (22 if rank == 1 else 30))
    found = [type(raised.value).__name__, str(raised.value)]
    if isinstance(raised.value, gradwire.ConfigError):
        found += [raised.value.setting, raised.value.value]
    return found


def test_a_parameter_that_exceeds_the_memory_limit_is_an_error_where_it_is_attached(
    two: Ranks,
) -> None:
    other, own = two.run(too_large)
    assert own[0] == "ConfigError"
    assert own[2:] == ["memory_limit", 4194304]
    assert "'1.weight'" in own[1]
    assert re.search(r"needs [89]\d{6} bytes", own[1])
    assert other == ["RendezvousError", f"rank 1 failed: {own[1]}"]


def wrong_on_one(rank: int, world: int, options: dict[str, object]) -> tuple[str, str]:
    ddp = wrap(model())
    with pytest.raises((gradwire.ConfigError, gradwire.RendezvousError)) as raised:
        gradwire.attach(ddp, **(options if rank == 1 else {"policy": "mlt"}))
    attachment = gradwire.attach(ddp, "mlt", p=0.2)
    train(ddp, rank, range(2))
    attachment.detach()
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"policy": "plot", "table": "/no/such/bounds.toml"}, "table='/no/such/bounds.toml'"),
        ({"policy": "plot", "table": {"nothing.*": 0.1}}, "'nothing.*'"),
        ({"policy": "mlt", "p": 1.5}, "p=1.5"),
        ({"policy": "mlt", "timeout": -1.0}, "timeout=-1.0"),
        ({"policy": "mlt", "memory_limit": 1000}, "memory_limit=1000"),
    ],
)
def test_what_is_wrong_on_one_rank_is_told_to_all_at_once(
    two: Ranks, options: dict[str, object], cause: str
) -> None:
    """Also before anything is open; and the ranks are in step when they attach again."""
    (other, message), (own, own_message) = two.run(wrong_on_one, options=options)
    assert (own, other) == ("ConfigError", "RendezvousError")
    assert cause in own_message
    assert message == f"rank 1 failed: {own_message}"


def another_transport(rank: int, world: int, alike: bool) -> tuple[str, str]:
    """A second module's attachment asks for other transport settings than the engine has: on one
    rank, or on all while only rank 0 still holds the first."""
    first = gradwire.attach(wrap(model()), "reliable")
    if alike and rank == 1:
        del first
        gc.collect()
    options = {"memory_limit": 1 << 29} if alike or rank == 0 else {}
    ddp = wrap(model())
    with pytest.raises((gradwire.ConfigError, gradwire.RendezvousError)) as raised:
        gradwire.attach(ddp, "reliable", **options)
    if rank == 0 or not alike:
        first.detach()
    again = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(2))
    again.detach()
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize("alike", [False, True])
def test_an_engine_that_one_rank_cannot_share_is_told_to_all_at_once(alike: bool) -> None:
    with Ranks(2) as ranks:
        (own, own_message), (other, message) = ranks.run(another_transport, alike=alike)
    assert (own, other) == ("ConfigError", "RendezvousError")
    assert "memory_limit=536870912: this process's engine already runs with" in own_message
    assert message == f"rank 0 failed: {own_message}"


def changes_transport(rank: int, world: int) -> None:
    ddp = wrap(model())
    first = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(2))
    first.detach()
    second = gradwire.attach(ddp, "reliable", memory_limit=1 << 29)
    train(ddp, rank, range(2, 4))
    assert first.counters()["packets_sent"] > 0
    second.detach()


def test_a_detached_module_can_be_attached_with_another_transport() -> None:
    with Ranks(2) as ranks:
        ranks.run(changes_transport)


def lost_on_one(rank: int, world: int) -> str:
    """The engine is closed on rank 1 alone, behind its attachment's back."""
    first = gradwire.attach(wrap(model()), "reliable")
    if rank == 1:
        engine = first.communicator.engine
        assert isinstance(engine, engines.SharedEngine)
        registry.drop(engine)
    ddp = wrap(model())
    with pytest.raises(gradwire.RendezvousError) as raised:
        gradwire.attach(ddp, "reliable")
    first.detach()
    again = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(2))
    again.detach()
    return str(raised.value)


def test_an_engine_that_one_rank_lost_is_named_and_opened_anew_when_it_is_free() -> None:
    with Ranks(2) as ranks:
        for message in ranks.run(lost_on_one):
            assert "rank 0 still has an attachment over an engine that was closed" in message


def dropped_or_detached(rank: int, world: int) -> int:
    first = gradwire.attach(wrap(model()), "reliable")
    if rank == 0:
        first.detach()
    del first
    ddp = wrap(model())
    again = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(2))
    again.detach()
    return again.number


def test_an_attachment_that_one_rank_dropped_and_another_detached_is_in_nobodys_way() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(dropped_or_detached)
    assert first == second


def starts_over(rank: int, world: int, store_ports: list[int]) -> int:
    """Process groups come and go, each with a store of its own, and nobody detaches; the port is
    always the same."""
    port = free_port()
    for store_port in store_ports:
        ddp = wrap(model())
        attachment = gradwire.attach(ddp, "reliable", port=port)
        train(ddp, rank, range(2))
        del attachment, ddp
        gc.collect()
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(store_port)
        dist.init_process_group("gloo", rank=rank, world_size=world)
    return len(registry.open_engines)


def test_an_engine_of_a_store_that_is_gone_does_not_keep_its_port() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(starts_over, store_ports=[free_port() for _ in range(3)]) == [1, 1]


def in_a_range(rank: int, world: int, low: int) -> int:
    """The engine's port, of a range whose first one is not free."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("gradwire")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable", port=f"{low}-{low + 4}")
    train(ddp, rank, range(1))
    attachment.detach()
    with pytest.raises((gradwire.ConfigError, gradwire.RendezvousError)) as raised:
        gradwire.attach(wrap(model()), "reliable", port=(low, low + 4 * rank))
    assert re.search(rf"rank 0 .*cannot open UDP 127.0.0.1 port={low}:", str(raised.value))
    log.removeHandler(handler)
    (place,) = re.findall(r"reached all peers: .*?UDP 127.0.0.1:(\d+),", "\n".join(lines))
    return int(place)


def test_engines_take_the_free_ports_of_a_range() -> None:
    with Ranks(2) as ranks, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        low = free_port(socket.SOCK_DGRAM, following=4)
        holder.bind(("127.0.0.1", low))
        here, there = ranks.run(in_a_range, low=low)
    assert here != there
    assert {here, there} <= set(range(low + 1, low + 5))


def late(rank: int, world: int) -> tuple[int, ...]:
    """Rank 1 comes when rank 0 has given up once, and attaches with its second attempt."""
    ddp = wrap(model())
    absent: tuple[int, ...] = ()
    if rank == 0:
        with pytest.raises(gradwire.RendezvousError) as raised:
            gradwire.attach(ddp, "reliable", rendezvous_timeout=1.0)
        absent = raised.value.ranks
    dist.barrier()
    attachment = gradwire.attach(ddp, "reliable", rendezvous_timeout=20.0)
    train(ddp, rank, range(2))
    attachment.detach()
    return absent


def test_a_rank_that_comes_late_meets_the_others_when_they_try_again() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(late) == [(1,), ()]


def fails(rank: int, world: int) -> None:
    raise OSError("no such luck")


def test_a_failure_in_a_rank_is_reported_by_the_harness(two: Ranks) -> None:
    outcome = two.outcomes(fails)[0]
    assert isinstance(outcome, Failed)
