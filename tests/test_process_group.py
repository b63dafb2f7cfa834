"""The backend "gradwire" in real processes, over loopback: what torch.distributed asks of it."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ddp_jobs import batch, fingerprint, gradients, local_gradients, model
from gradwire.core.settings import Settings
from gradwire.process_group.collectives import EngineCollectives, Request
from gradwire.process_group.signals import Signals
from gradwire.process_group.work import EngineWork
from gradwire.training.groups import Group
from gradwire_calls import until
from ranks import Failed, Gone, Ranks, free_port

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
OPERATIONS = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG}
ELEMENTS = 40_003
takes_backends = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="torch takes Python backends from 2.14 on"
)
ENVIRONMENT = {"GRADWIRE_PEER_TIMEOUT": "5", "GRADWIRE_RENDEZVOUS_TIMEOUT": "20"}


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    """Three ranks whose default group is of backend "gradwire"."""
    with Ranks(3, group=False, **ENVIRONMENT) as ranks:
        ranks.run(begins)
        yield ranks
        ranks.run(ends)


def begins(rank: int, world: int, options: Any = None, seconds: float = 60.0) -> None:
    dist.init_process_group(
        "gradwire", pg_options=options, timeout=datetime.timedelta(seconds=seconds)
    )


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gradwire")]


def sockets() -> int:
    links = Path("/proc/self/fd")
    return sum("socket:" in os.readlink(link) for link in links.iterdir() if link.exists())


def ends(rank: int, world: int) -> None:
    dist.destroy_process_group()
    assert until(lambda: threads() == [], 10.0)


def values(rank: int, dtype: torch.dtype, elements: int = ELEMENTS) -> torch.Tensor:
    """A rank's own; the small and the large ones show a sum that is rounded twice."""
    chance = torch.Generator().manual_seed(rank)
    scales = torch.logspace(-6, 3, elements)[torch.randperm(elements, generator=chance)]
    return (torch.randn(elements, generator=chance) * scales).to(dtype)


def reference(world: int, dtype: torch.dtype, average: bool, elements: int = ELEMENTS) -> Any:
    total = values(0, dtype, elements).float()
    for rank in range(1, world):
        total = total + values(rank, dtype, elements).float()
    return (total * torch.tensor(1.0 / world) if average else total).to(dtype)


# ---------------------------------------------------------------------------- sums


def sums(rank: int, world: int, dtype: str, operation: str) -> None:
    kind, op = DTYPES[dtype], OPERATIONS[operation]
    expected = reference(world, kind, operation == "AVG")
    mine = values(rank, kind)
    dist.all_reduce(mine, op=op)
    assert torch.equal(mine, expected)
    # A reduce-scatter, of one tensor and of a list, has the same bits.
    elements = 3 * 15_000
    given = values(rank, kind, elements)
    expected = reference(world, kind, operation == "AVG", elements).chunk(world)[rank]
    single = torch.empty_like(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 has another name for it
        dist.reduce_scatter_tensor(single, given, op=op)
    assert torch.equal(single, expected)
    listed = torch.empty_like(expected)
    dist.reduce_scatter(listed, list(given.chunk(world)), op=op)
    assert torch.equal(listed, expected)
    parts = list(reference(world, kind, operation == "AVG", elements).split([40_000, 5000, 0]))
    uneven = torch.empty_like(parts[rank])
    dist.reduce_scatter(uneven, list(given.split([40_000, 5000, 0])), op=op)
    assert torch.equal(uneven, parts[rank])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_the_order_of_ranks_to_the_bit(
    three: Ranks, dtype: str, operation: str
) -> None:
    three.run(sums, dtype=dtype, operation=operation)


def non_finite(rank: int, world: int) -> None:
    for kind in DTYPES.values():
        mine = torch.ones(ELEMENTS, dtype=kind)
        mine[rank] = float("inf")
        mine[10 + rank] = float("nan")
        mine[20] = torch.finfo(kind).max
        dist.all_reduce(mine)
        assert mine[:3].isinf().all()
        assert mine[10:13].isnan().all()
        assert mine[30] == 3.0


def test_what_is_not_finite_stays_so(three: Ranks) -> None:
    three.run(non_finite)


def at_the_ends(rank: int, world: int) -> None:
    """Sums among the subnormals, and sums that exceed the type's range or nearly do."""
    for kind in (torch.float16, torch.bfloat16):
        most, least = torch.finfo(kind).max, torch.finfo(kind).smallest_normal / 8
        given = torch.ones(ELEMENTS, dtype=kind)
        given[:4] = torch.tensor([most, -most, most / 4, (rank + 1) * least], dtype=kind)
        total, mean = given.clone(), given.clone()
        dist.all_reduce(total)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        ends = [float("inf"), -float("inf"), 0.75 * most, 6 * least]
        assert torch.equal(total[:4], torch.tensor(ends, dtype=kind))
        # The sum is divided before it is rounded; of bfloat16 it has left the range of float32.
        whole = most if kind == torch.float16 else float("inf")
        ends = [whole, -whole, most / 4, 2 * least]
        assert torch.equal(mean[:4], torch.tensor(ends, dtype=kind))


def test_what_exceeds_the_range_becomes_infinite_and_subnormals_stay(three: Ranks) -> None:
    three.run(at_the_ends)


def around_min_bytes(rank: int, world: int) -> list[bool]:
    """Whether the engine carries each size, type and operation."""
    used = []
    elements = (1 << 16) // 4
    for tensor, op in (
        (torch.ones(elements - 1), "SUM"),
        (torch.ones(elements), "SUM"),
        (torch.ones(elements, dtype=torch.float16), "SUM"),
        (torch.ones(2 * elements, dtype=torch.float16), "AVG"),
        (torch.ones(elements, dtype=torch.float64), "SUM"),
        (torch.ones(elements, dtype=torch.int64), "SUM"),
        (torch.ones(elements), "MAX"),
    ):
        work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), async_op=True)
        assert work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, 3 if op == "SUM" else 1))
        used.append(isinstance(work, EngineWork))
    return used


def test_size_type_and_operation_decide_what_the_engine_carries(three: Ranks) -> None:
    for used in three.run(around_min_bytes):
        assert used == [False, True, False, True, False, False, False]


def small(rank: int, world: int) -> None:
    """What Gloo of some versions refuses, or answers with a sum."""
    for kind in DTYPES.values():
        given = torch.full((3 * 4,), float(rank + 1), dtype=kind)
        for op, result in ((dist.ReduceOp.SUM, 6), (dist.ReduceOp.AVG, 2)):
            part = torch.empty(4, dtype=kind)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch 2.13 has another name for it
                dist.reduce_scatter_tensor(part, given, op=op)
            assert torch.equal(part, torch.full_like(part, result))
            part = torch.empty(4, dtype=kind)
            dist.reduce_scatter(part, list(given.chunk(world)), op=op)
            assert torch.equal(part, torch.full_like(part, result))
            total = given.clone()
            dist.all_reduce(total, op=op)
            assert torch.equal(total, torch.full_like(total, result))


def test_small_sums_and_averages_are_right(three: Ranks) -> None:
    three.run(small)


def whole_numbers(rank: int, world: int) -> None:
    """Averages of whole numbers, which Gloo refuses, of several sizes and types."""
    for kind in (torch.int64, torch.int32, torch.uint8):
        for elements in (1, ELEMENTS):
            given = torch.full((elements,), rank + 3, dtype=kind)
            given[0] = rank
            work = dist.all_reduce(given, op=dist.ReduceOp.AVG, async_op=True)
            assert work.wait()
            assert given[0] == 1
            assert (given[1:] == 4).all()
    below = torch.tensor([-rank, -1 if rank == 0 else 0])
    dist.all_reduce(below, op=dist.ReduceOp.AVG)
    assert below.tolist() == [-1, 0]
    empty = torch.empty(0, dtype=torch.int64)
    dist.all_reduce(empty, op=dist.ReduceOp.AVG)


def test_averages_of_whole_numbers_are_rounded_towards_zero(three: Ranks) -> None:
    three.run(whole_numbers)


def never_the_sum(rank: int, world: int) -> list[str]:
    """Operations that are Gloo's, of a type that is Gloo's, by each call that has one."""
    refused = []
    group: Any = dist.group.WORLD
    operations = {"AVG": 7 / 3, "MAX": 4.0, "MIN": 1.0, "PRODUCT": 8.0}
    for name, result in operations.items():
        op = getattr(dist.ReduceOp, name)
        given = torch.full((3 * 2,), float(2**rank), dtype=torch.float64)
        options = dist.ReduceScatterOptions()
        options.reduceOp = op

        def reduced(op: Any = op, given: Any = given) -> torch.Tensor:
            whole = given.clone()
            dist.all_reduce(whole, op=op)
            return whole

        def listed(op: Any = op, given: Any = given) -> torch.Tensor:
            part = torch.empty(2, dtype=torch.float64)
            dist.reduce_scatter(part, list(given.chunk(3)), op=op)
            return part

        def single(op: Any = op, given: Any = given) -> torch.Tensor:
            part = torch.empty(2, dtype=torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch 2.13 has another name for it
                dist.reduce_scatter_tensor(part, given, op=op)
            return part

        def coalesced(options: Any = options, given: Any = given) -> torch.Tensor:
            part = torch.empty(2, dtype=torch.float64)
            newer = getattr(group, "reduce_scatter_single_coalesced", None)
            call = newer or group.reduce_scatter_tensor_coalesced
            call([part], [given], options).wait()
            return part

        for call in (reduced, listed, single, coalesced):
            try:
                found = call()
            except (RuntimeError, gradwire.ConfigError):
                refused.append(f"{call.__name__} {name}")
                continue
            torch.testing.assert_close(found, torch.full_like(found, result))
    return refused


def test_what_gloo_carries_is_right_or_refused(three: Ranks) -> None:
    first, *others = three.run(never_the_sum)
    assert all(each == first for each in others)
    if torch.__version__ >= "2.9":
        assert first == []


def odd_tensors(rank: int, world: int) -> None:
    """Each rank's tensor lies otherwise in memory."""
    whole = torch.full((300, 200), float(rank))
    tensor = whole.t() if rank == 0 else torch.full((200, 300), float(rank))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((200, 300), 3.0))
    strided = torch.full((200, 600), float(rank))
    dist.all_reduce(strided[:, ::2])
    assert torch.equal(strided[:, ::2], torch.full((200, 300), 3.0))
    assert torch.equal(strided[:, 1::2], torch.full((200, 300), float(rank)))
    empty = torch.empty(0)
    dist.all_reduce(empty)
    leaf = torch.full((ELEMENTS,), 1.0, requires_grad=True)
    dist.all_reduce(leaf.detach())
    assert leaf[0] == 3.0
    with torch.inference_mode():
        made = torch.ones(ELEMENTS, dtype=torch.bfloat16)
        dist.all_reduce(made)
        assert made[-1] == 3.0


def test_any_layout_is_summed(three: Ranks) -> None:
    three.run(odd_tensors)


# ---------------------------------------------------------------------------- works and threads


def asynchronous(rank: int, world: int) -> None:
    """An all-reduce that nobody waits for must not keep two ranks from talking first."""
    group: Any = dist.new_group()
    mine = values(rank, torch.float32)
    work: Any = dist.all_reduce(mine, group=group, async_op=True)
    if rank == 0:
        dist.send(torch.ones(3), 1)
    note = torch.zeros(3)
    if rank == 1:
        dist.recv(note, 0)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert torch.equal(mine, reference(world, torch.float32, False))
    (result,) = work.get_future().value()
    assert result.data_ptr() == mine.data_ptr()
    chained = dist.all_reduce(torch.ones(ELEMENTS), group=group, async_op=True).get_future()
    # A callback may wait for another collective.
    second = chained.then(
        lambda done: dist.all_reduce(done.value()[0], group=group, async_op=True).get_future()
    )
    assert second.wait().wait()[0][5] == 9.0
    dist.destroy_process_group(group)


def test_an_asynchronous_sum_returns_at_once(three: Ranks) -> None:
    three.run(asynchronous)


def test_whoever_waited_for_a_sum_has_the_value_of_its_future() -> None:
    """The thread that ends it may be stopped anywhere."""
    one = [torch.ones(1)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            work = EngineWork(one, "a sum")
            ending = threading.Thread(target=work.finish)
            ending.start()
            assert work.wait()
            assert work.get_future().value() == one
            ending.join()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_may_wait_where_a_collective_has_ended_as_it_started(fails: bool) -> None:
    """The sum of a lone member is over at once, and so is one whose group could not open."""
    opening = threading.Event()

    @contextlib.contextmanager
    def watch() -> Iterator[Callable[[], None]]:
        assert opening.wait(20)
        if fails:
            raise gradwire.RendezvousError("a member has died", [1])
        yield lambda: None

    group = Group(dist.HashStore(), "lone", 0, (0,), 60.0)
    collectives = EngineCollectives(group, Settings(), watch)
    ones = torch.ones(4)
    request = Request("all_reduce", [ones], ones, (), 0, False, 60.0)
    first = collectives.start(request)
    seen: list[object] = []

    def wait_for_another(_: object) -> None:
        try:
            seen.append(collectives.start(request).wait(datetime.timedelta(seconds=20)))
        except gradwire.GradwireError as error:
            seen.append(error)

    after = first.get_future().then(wait_for_another)
    opening.set()
    after.wait()
    collectives.close()
    if fails:
        assert "not all members" in str(seen[0])
    else:
        assert seen == [True]


def several_groups(rank: int, world: int) -> None:
    """Threads open and use groups of the same and of other members, each rank in its own order."""
    groups = [dist.new_group(), dist.new_group(), dist.new_group([0, 2])]
    sizes = [3, 3, 2]
    done: list[bool] = []

    def use(index: int) -> None:
        if index == 2 and rank == 1:
            done.append(True)
            return
        for turn in range(5):
            tensor = torch.full((ELEMENTS,), float(turn + index))
            dist.all_reduce(tensor, group=groups[index])
            done.append(bool((tensor == sizes[index] * (turn + index)).all()))

    order = [0, 1, 2] if rank else [2, 1, 0]
    running = [threading.Thread(target=use, args=(index,)) for index in order]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert len(done) == (11 if rank == 1 else 15)
    assert all(done)
    before = sockets()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    assert sockets() < before


def test_groups_are_used_from_threads_in_any_order(three: Ranks) -> None:
    three.run(several_groups)


def objects(rank: int, world: int) -> None:
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 100_000})
    assert [each["rank"] for each in gathered] == [0, 1, 2]
    sent = [("a", 1)] if rank == 0 else [None]
    dist.broadcast_object_list(sent, 0)
    assert sent == [("a", 1)]
    parts = [torch.zeros(ELEMENTS) for _ in range(world)]
    dist.all_gather(parts, torch.full((ELEMENTS,), float(rank)))
    assert [part[0].item() for part in parts] == [0.0, 1.0, 2.0]
    dist.barrier()
    assert dist.get_backend() == "gradwire"
    assert torch.device("cpu") in dist.group.WORLD._device_types  # type: ignore[union-attr]


def broadcasts(rank: int, world: int) -> None:
    """Gloo's thread drops the tensors of one while the next one is queued."""
    for turn in range(500):
        tensor = torch.full((3,), float(rank))
        dist.broadcast(tensor, turn % world)
        assert tensor[0] == turn % world


def test_no_broadcast_stands_still(three: Ranks) -> None:
    three.run(broadcasts)


def test_everything_else_is_gloos(three: Ranks) -> None:
    three.run(objects)


# ---------------------------------------------------------------------------- training


def trains(rank: int, world: int) -> bytes:
    """DDP without a hook, beside a reference that sums the gradients by hand."""
    net, twin = model(), model()
    ddp = DistributedDataParallel(net)  # one bucket, and DDP divides before it sums
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(4):
        x = batch(rank, step)
        local = local_gradients(twin, x) * (1.0 / world)
        everybody = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(everybody, local)
        total = everybody[0]
        for other in everybody[1:]:
            total = total + other
        optimizer.zero_grad()
        ddp(x).float().square().mean().backward()
        assert torch.equal(gradients(net), total)
        optimizer.step()
        twin.load_state_dict(net.state_dict())
    return fingerprint(net)


def test_ddp_without_a_hook_trains_to_the_bit(three: Ranks) -> None:
    assert len(set(three.run(trains))) == 1


def compiled(rank: int, world: int) -> None:
    """DDP broadcasts the buffers in its forward pass, which Dynamo traces."""
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    step: Any = torch.compile(DistributedDataParallel(net), backend="eager")
    for turn in range(2):
        step(batch(rank, turn)).square().mean().backward()
    assert net[0].weight.grad is not None


def test_a_compiled_module_trains(three: Ranks) -> None:
    three.run(compiled)


def attached(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.1)
    for step in range(3):
        ddp(batch(rank, step)).square().mean().backward()
    assert attachment.report().step == 2
    attachment.detach()


def test_a_module_is_attached_over_the_backend(three: Ranks) -> None:
    three.run(attached)


def zero(rank: int, world: int) -> bytes:
    ddp = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return fingerprint(ddp)


def test_a_sharded_optimizer_keeps_the_replicas_equal(three: Ranks) -> None:
    assert len(set(three.run(zero))) == 1


def fully_sharded(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    net, twin = model(), model()
    mesh = init_device_mesh("cpu", (world,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    x = batch(rank, 0)
    local = local_gradients(twin, x)
    everybody = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(everybody, local)
    net(x).square().mean().backward()
    got = torch.cat([p.grad.full_tensor().flatten() for p in net.parameters()])  # type: ignore[union-attr]
    assert all(isinstance(p.grad, DTensor) for p in net.parameters())
    total = everybody[0] + everybody[1] + everybody[2]
    torch.testing.assert_close(got, total / world, rtol=1e-6, atol=1e-7)


def test_fsdp2_shards_a_model_on_the_cpu(three: Ranks) -> None:
    three.run(fully_sharded)


# ---------------------------------------------------------------------------- the beginning


def lazy(rank: int, world: int) -> None:
    begins(rank, world, {"min_bytes": 1000, "key": "0f" * 32})
    world_group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(100))
    assert world_group.counters() == {}
    assert threads() == []
    group: Any = dist.new_group()
    assert group.settings.min_bytes == 1000  # as the default group's
    assert group.settings.authentication == "key"
    dist.all_reduce(torch.ones(250), group=group)
    assert group.counters() != {}
    before = sockets()
    ends(rank, world)
    assert sockets() < before


def refused(rank: int, world: int, **options: Any) -> None:
    dist.init_process_group(**options)


def settings_differ(rank: int, world: int) -> None:
    begins(rank, world, {"min_bytes": 1000 + rank})


def without_engine(rank: int, world: int) -> None:
    if rank == 1:
        sys.modules["gradwire._engine"] = None  # type: ignore[assignment]
    try:
        begins(rank, world)
    finally:
        sys.modules.pop("gradwire._engine", None)


@pytest.mark.parametrize(
    ("job", "arguments", "told"),
    [
        (
            refused,
            {"backend": "cpu:gloo,cuda:gradwire"},
            ["cpu:gloo,cuda:gradwire", "give 'gradwire' alone"],
        ),
        (
            refused,
            {"backend": "gradwire", "pg_options": {"guard": "skip"}},
            ["pg_options['guard']", "min_bytes"],
        ),
        (refused, {"backend": "gradwire", "pg_options": 5}, ["pg_options=5", "a mapping"]),
        (refused, {"backend": "gradwire", "pg_options": {"min_bytes": 0}}, ["min_bytes=0"]),
        (settings_differ, {}, ["min_bytes", "rank 1"]),
        (without_engine, {}, ["make engine"]),
    ],
)
def test_an_impossible_beginning_fails_on_every_rank(
    job: Callable[..., Any], arguments: dict[str, Any], told: list[str]
) -> None:
    if "cuda" in arguments.get("backend", "") and torch.__version__ >= "2.14":
        pytest.skip("from 2.14 on the backends stand beside each other")
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        for outcome in ranks.outcomes(job, **arguments):
            assert isinstance(outcome, Failed)
            assert all(word in outcome.text for word in told), outcome.text


def test_groups_that_send_little_open_no_engine() -> None:
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        ranks.run(lazy)


def beside(rank: int, world: int) -> None:
    dist.init_process_group("cpu:gradwire,cuda:gloo", pg_options={"min_bytes": 1000})
    mine = values(rank, torch.bfloat16)
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    assert torch.equal(mine, reference(world, torch.bfloat16, False))
    dist.broadcast(mine, 1)
    dist.barrier()
    group: Any = dist.new_group(backend="gradwire")
    assert group.settings.min_bytes == 1000  # as the default group's
    ends(rank, world)


class Demanding(Backend.Options):
    """Options of a backend that takes none but its own, as NCCL does."""

    def __init__(self) -> None:
        super().__init__("demanding")


def demands(opts: Any, options: object) -> dist.ProcessGroupGloo:
    assert options is None or isinstance(options, Demanding)
    return dist.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, opts.timeout)


def beside_options(rank: int, world: int, string: str, given: bool) -> None:
    dist.Backend.register_backend("demanding", demands, extended_api=True, devices=["cuda"])
    # As a backend of torch's own has a type of its own.
    dist.Backend.backend_type_map["demanding"] = dist.ProcessGroup.BackendType.UCC
    dist.init_process_group(string, pg_options=Demanding() if given else None)
    work = dist.all_reduce(torch.ones(ELEMENTS), async_op=True)
    assert isinstance(work.get_future().wait()[0], torch.Tensor)
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.settings == Settings.build()
    assert dist.get_backend_config() == string
    ends(rank, world)


def alien(rank: int, world: int, string: str) -> None:
    dist.Backend.register_backend("alien", demands, extended_api=True, devices=["cuda"])
    dist.init_process_group(string)


@takes_backends
@pytest.mark.parametrize("string", ["cpu:gradwire,cuda:alien", "cuda:alien,cpu:gradwire"])
def test_another_backend_from_outside_of_torch_is_refused(string: str) -> None:
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        for outcome in ranks.outcomes(alien, string=string):
            assert isinstance(outcome, Failed)
            assert "'cuda:alien' for one and the same backend" in outcome.text


def under_gloo(rank: int, world: int) -> None:
    group: Any = dist.new_group(backend="gradwire")
    assert group.settings == Settings.build()


def test_a_group_whose_default_group_is_of_another_backend_has_the_usual_settings() -> None:
    with Ranks(2, **ENVIRONMENT) as ranks:
        ranks.run(under_gloo)


@takes_backends
def test_the_backend_stands_beside_others() -> None:
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        ranks.run(beside)


@takes_backends
@pytest.mark.parametrize("string", ["cpu:gradwire,cuda:demanding", "cuda:demanding,cpu:gradwire"])
def test_options_of_another_backend_of_the_string_are_not_ours(string: str) -> None:
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        for given in (False, True):
            ranks.run(beside_options, string=string, given=given)


# ---------------------------------------------------------------------------- failures


def dies(rank: int, world: int, first: bool) -> None:
    begins(rank, world)
    if not first:
        dist.all_reduce(torch.ones(ELEMENTS))
    if rank == 1:
        os._exit(1)
    ddp = DistributedDataParallel(model(), init_sync=False) if first else None
    assert ddp is None or rank == 0
    dist.all_reduce(torch.ones(ELEMENTS))


@pytest.mark.parametrize("first", [False, True])
def test_a_peer_that_dies_is_an_error(first: bool) -> None:
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        outcome, gone = ranks.outcomes(dies, first=first)
        assert isinstance(gone, Gone)
        assert isinstance(outcome, Failed)
        assert outcome.kind in ("TransferError", "RendezvousError", "RuntimeError")


def too_late(rank: int, world: int, first: int) -> tuple[tuple[int, ...], float]:
    """The other comes to the first large sum once one has given up; whom the errors name, when."""
    begins(rank, world)
    store = dist.distributed_c10d._get_default_store()
    group: Any = dist.group.WORLD
    limits = {"timeout": datetime.timedelta(milliseconds=300)} if rank == first else {}
    if rank != first:
        store.wait(["given up"])
    begun = time.monotonic()
    with pytest.raises(gradwire.RendezvousError) as failed:
        group.allreduce([torch.ones(ELEMENTS)], op=dist.ReduceOp.SUM, **limits).wait()
    seconds = time.monotonic() - begun
    store.set("given up", "")
    small = torch.ones(3)
    dist.all_reduce(small)  # Gloo's connections are whole
    assert small[0] == 2
    return failed.value.ranks, seconds


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_large_sum_has_the_time_out_that_it_was_given(first: int) -> None:
    """The ranks' own is a minute."""
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        outcomes = ranks.run(too_late, first=first)
        assert [at_fault for at_fault, _ in outcomes] == [(1,), (0,)]
        assert max(seconds for _, seconds in outcomes) < 30.0  # nobody stays to tell the other


def alone(rank: int, world: int) -> None:
    """Rank 1's large sum ends by its time-out; rank 0 has none, and both go on."""
    for _ in range(2):
        begins(rank, world, seconds=20.0)
        if rank == 1:
            limit = datetime.timedelta(milliseconds=100)
            group: Any = dist.group.WORLD
            with pytest.raises(gradwire.RendezvousError):
                group.allreduce([torch.ones(ELEMENTS)], op=dist.ReduceOp.SUM, timeout=limit).wait()
        small = torch.ones(3)
        dist.all_reduce(small)
        assert small[0] == 2
        ends(rank, world)  # nothing waits for the other any more


def test_a_group_without_large_sums_goes_on_and_ends() -> None:
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        ranks.run(alone)


class BreaksByTimeouts:
    """Gloo as far as signals go: a receive that times out breaks the group's connections."""

    def __init__(self) -> None:
        self.waits: list[datetime.timedelta] = []
        self.waiting = threading.Event()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> BreaksByTimeouts:
        return self

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None:
        pass

    def wait(self, timeout: datetime.timedelta) -> None:
        self.waits.append(timeout)
        self.waiting.set()
        raise RuntimeError("the next member has ended")


def test_no_watch_times_out_while_the_group_may_live() -> None:
    gloo: Any = BreaksByTimeouts()
    group = Group(dist.HashStore(), "two", 0, (0, 1), 4.0)
    with Signals(group, gloo).watching() as check:
        assert gloo.waiting.wait(20)

        def raises() -> bool:
            try:
                check()
            except gradwire.RendezvousError as error:
                return error.ranks == (1,)
            return False

        assert until(raises, 20.0)
    assert gloo.waits[0] > datetime.timedelta(days=100)


def beside_another_thread(rank: int, world: int) -> None:
    """The first large sum comes before another thread's gather on one rank, after it on others."""
    begins(rank, world, seconds=20.0)
    gathered = [torch.empty(3) for _ in range(world)]
    mine, total = torch.full((3,), float(rank)), torch.ones(ELEMENTS)
    starts: list[Callable[[], Any]] = [
        lambda: dist.all_gather(gathered, mine, async_op=True),
        lambda: dist.all_reduce(total, async_op=True),
    ]
    works = [start() for start in (starts if rank else reversed(starts))]
    assert all(work.wait() for work in works)
    assert [each[0].item() for each in gathered] == list(range(world))
    assert (total == world).all()
    ends(rank, world)


def test_the_first_large_sum_is_in_no_order_with_gloos_collectives() -> None:
    """As where a checkpoint is written by a thread of its own."""
    with Ranks(3, group=False, **ENVIRONMENT) as ranks:
        ranks.run(beside_another_thread)


# ---------------------------------------------------------------------------- the end


def lives(rank: int, world: int, count: int, holds_s: float) -> None:
    """Job after job on the port of the first, whose store rank 0 hosts and leaves last, and ends so
    many seconds later."""
    for life in range(count):
        begins(rank, world, seconds=20.0)
        tensor = torch.full((ELEMENTS,), float(life))
        dist.all_reduce(tensor)
        assert (tensor == world * life).all()
        if rank == 0:
            others = [f"leaves/{other}" for other in range(1, world)]
            dist.distributed_c10d._get_default_store().wait(others)
        else:
            dist.distributed_c10d._get_default_store().set(f"leaves/{rank}", "")
        kept = dist.distributed_c10d._get_default_store() if holds_s and rank == 0 else None
        dist.destroy_process_group()
        if kept is not None:
            time.sleep(holds_s)
        del kept


@pytest.mark.parametrize(("count", "holds_s"), [(6, 0.0), (2, 0.4)])
def test_jobs_in_a_row_meet_on_one_port(count: int, holds_s: float) -> None:
    with Ranks(3, group=False, **ENVIRONMENT) as ranks:
        ranks.run(lives, count=count, holds_s=holds_s)


def leaves(rank: int, world: int) -> None:
    begins(rank, world)
    dist.all_reduce(torch.ones(ELEMENTS))
    with no_collections():
        dist.destroy_process_group()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Fails where the process's garbage is collected, which takes as long as it has objects."""
    seen: list[dict[str, int]] = []
    gc.disable()
    gc.callbacks.append(lambda phase, found: seen.append(found))
    try:
        yield
    finally:
        gc.callbacks.pop()
        gc.enable()
    assert seen == []


def test_the_end_of_a_group_collects_no_garbage() -> None:
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        ranks.run(leaves)


def late(rank: int, world: int) -> None:
    begins(rank, world)
    dist.all_reduce(torch.ones(ELEMENTS))
    if rank == 0:
        group: Any = dist.group.WORLD
        tensor = torch.ones(ELEMENTS)
        work = group.allreduce(tensor, dist.ReduceOp.SUM, datetime.timedelta(milliseconds=300))
        with pytest.raises(gradwire.TransferError, match="not done after"):
            work.wait(datetime.timedelta(milliseconds=10))
        with pytest.raises(gradwire.TransferError) as failed:
            work.wait()
        assert failed.value.cause == "timeout"
        assert isinstance(work.exception(), gradwire.TransferError)
        assert not work.is_success()
        with pytest.raises(RuntimeError, match="timeout"):
            work.get_future().wait()
    dist.distributed_c10d._get_default_store().set(f"late/{rank}", "")
    dist.distributed_c10d._get_default_store().wait(["late/0"])
    dist.destroy_process_group()


def test_a_time_out_ends_the_work_and_its_future() -> None:
    with Ranks(2, group=False, **ENVIRONMENT) as ranks:
        ranks.run(late)


# ---------------------------------------------------------------------------- import torch


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_torch_registers_and_imports_nothing_else() -> None:
    run = python(
        "import sys, torch\n"
        "assert torch.distributed.is_backend_available('gradwire')\n"
        "ours = [m for m in sys.modules if m.startswith('gradwire')]\n"
        "assert sorted(ours) == ['gradwire', 'gradwire.autoload', 'gradwire.process_group'], ours\n"
        "assert torch.distributed.Backend.default_device_backend_map['cpu'] == 'gloo'\n"
    )
    assert run.returncode == 0, run.stderr


def test_a_broken_installation_does_not_break_import_torch(tmp_path: Path) -> None:
    """Of the backend's package nothing is left that could be imported."""
    code = (
        "import sys; sys.modules['gradwire.process_group'] = None; import torch; print('went on')"
    )
    run = python(code)
    assert run.stdout == "went on\n"
    assert "could not register" in run.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in run.stderr


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch finds the backend by its name")
def test_without_autoload_and_without_an_import_torch_names_the_backend_at_once() -> None:
    """docs/guides/backend.md says what to do under this text."""
    code = (
        "import torch.distributed as dist\n"
        "try:\n"
        f"    dist.init_process_group('gradwire', rank=0, world_size=1, init_method="
        f"'tcp://127.0.0.1:{free_port()}')\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    run = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert run.stdout.strip() == "Unknown backend type gradwire", run.stderr


def test_without_autoload_an_import_registers() -> None:
    code = (
        "import sys, torch\n"
        "assert 'gradwire' not in sys.modules\n"
        "import gradwire.process_group\n"
        "torch.distributed.init_process_group(\n"
        f"    'gradwire', rank=0, world_size=1, init_method='tcp://127.0.0.1:{free_port()}')\n"
        "t = torch.ones(100_000)\n"
        "torch.distributed.all_reduce(t)\n"
        "assert t[0] == 1\n"
        "torch.distributed.destroy_process_group()\n"
    )
    run = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert run.returncode == 0, run.stderr
