"""Control "probe": pushes in passes, of which only the next one sends again what was lost.

The fabric itself sees to it, in these runs and in all others, that no chunk goes twice in one pass
and none between a PROBE and its answer.
"""

import math
import random
import struct
from collections import Counter

import numpy as np
import pytest

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from scenarios import chunks_of, expand, gradients, must_be_ok, plan, rank_order_sum, same_bits

BY_WORKER = (("open", "worker", 0, -1.0),)
PROBE = {"spend": "anything", "schedule": BY_WORKER, "control": "probe"}
PUSH, PULL = 0, 1
BITMAP_BYTES = 35  # of 100,000 elements
NONE_MISSING = struct.pack("<I", BITMAP_BYTES) + bytes(BITMAP_BYTES)
ALL_MISSING = struct.pack("<I", BITMAP_BYTES) + b"\xff" * BITMAP_BYTES
VERSION = _engine.PROTOCOL_VERSION
KINDS = {"stop": 5, "probe": 10, "bitmap": 11}


def star(workers: int = 1, *, loss: float = 0.0, delay: float = 50e-6, **options: object) -> Fabric:
    """Workers and one server; what the workers send is lost, what they get is not."""
    fabric = Fabric(workers, servers=1, link=Link(delay=delay), **options)  # type: ignore[arg-type]
    for worker in range(workers):
        fabric.set_link(worker, "up", Link(delay=delay, loss=loss))
    return fabric


def sent(fabric: Fabric, kind: str, source: int) -> int:
    return sum(each.kind == kind and each.source == source for each in fabric.trace())


def until_sent(fabric: Fabric, kind: str, source: int, count: int = 1) -> None:
    while sent(fabric, kind, source) < count:
        assert not fabric.run(fabric.now + 1e-3), f"no {kind} was sent"
        assert fabric.now < 60.0


def packet(kind: str, source: int, body: bytes, *, number: int, part: int = 0) -> bytes:
    head = struct.pack("<BBHI", VERSION, KINDS[kind], source, 1)
    return head + struct.pack("<IIIIHH", number, 0, 0, part, 0, 0) + body


def control(way: int, number: int, rest: bytes = b"") -> bytes:
    return struct.pack("<II", way, number) + rest


# ---------------------------------------------------------------------------- passes


@pytest.mark.parametrize(
    ("loss", "bound"),
    [(0.1, 0.05), (0.3, 0.05), (0.3, 0.408), (0.6, 0.008), (0.6, 0.408), (0.9, 0.408)],
)
def test_passes_follow_loss_and_bound(loss: float, bound: float) -> None:
    """What is left after n passes is loss^n; it must come down to the bound."""
    fabric = star(loss=loss, seed=3)
    fabric.all_reduce(0, plan(700_000, bound, **PROBE), gradients(1, 700_000))
    fabric.run()
    must_be_ok(fabric)
    done = fabric.completion(0, 0)
    assert abs(done.passes - math.ceil(math.log(bound) / math.log(loss))) <= 1
    assert done.delivered[0] >= 1 - bound


def test_losses_alone_send_nothing_again() -> None:
    """A tenth is lost, and may be: one pass, although loss detection has seen it."""
    fabric = star(loss=0.1, trace=100_000)
    made = plan(400_000, 0.2, **PROBE)
    fabric.all_reduce(0, made, gradients(1, 400_000))
    fabric.run()
    must_be_ok(fabric)
    assert fabric.counters(0)["declared_lost"] > 50
    assert fabric.completion(0, 0).passes == 1
    assert fabric.completion(0, 0).retransmissions == 0
    pushed = Counter(each.chunk for each in fabric.trace() if each.kind == "push")
    assert set(pushed.values()) == {1}


def test_a_later_pass_has_what_is_missing_and_no_more() -> None:
    fabric = star(loss=0.3, trace=100_000, seed=5)
    made = plan(400_000, 0.01, **PROBE)
    fabric.all_reduce(0, made, gradients(1, 400_000))
    fabric.run()
    must_be_ok(fabric)
    passes = [Counter[int]()]
    asked = False
    for each in fabric.trace():
        if each.kind == "probe":
            # A copy that arrives before the next pass begins belongs to the last one.
            asked |= each.fate == "delivered" and bool(passes[-1])
        elif each.kind == "bitmap" and each.fate == "delivered" and asked:
            asked = False  # a second copy of the answer begins nothing
            passes.append(Counter())
        if each.kind == "push":
            passes[-1][each.chunk] += each.fate == "delivered"
    chunks = len(chunks_of(fabric, made)[0])
    assert len(passes) == fabric.completion(0, 0).passes >= 4
    arrived: set[int] = set()
    for number, now in enumerate(passes[:-1]):
        assert set(now) == set(range(chunks)) - arrived, f"pass {number + 1}"
        assert max(now.values()) == 1
        arrived |= {chunk for chunk, times in now.items() if times}
    assert list(passes[1]) == sorted(passes[1])  # in the order of the first one


def test_stop_ends_a_pass_in_the_middle() -> None:
    fabric = star(trace=100_000)
    made = plan(400_000, 0.408, **PROBE)
    fabric.all_reduce(0, made, gradients(1, 400_000))
    fabric.run()
    must_be_ok(fabric)
    chunks = len(chunks_of(fabric, made)[0])
    counted = fabric.completion(0, 0).counted
    assert sent(fabric, "push", 0) < 0.7 * chunks
    assert sent(fabric, "probe", 0) == 0
    # What a clean network leaves out is the end of the order.
    assert counted.mean() == pytest.approx(0.592, abs=1e-3)
    assert counted[: counted.sum()].all()


def test_workers_do_not_wait_for_each_others_start() -> None:
    fabric = star(3)
    fabric.all_reduce(0, plan(300_000, 0.4, **PROBE), gradients(3, 300_000), at=[0.0, 0.0, 0.5])
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        assert fabric.completion(worker, 0).passes == 1
        assert fabric.completion(worker, 0).delivered[0] < 0.65


def test_who_was_stopped_in_mid_pass_takes_no_credit_from_the_others() -> None:
    """The last word of a stopped worker was of a backlog; another one still has passes to go."""

    def push_s(workers: int, seed: int) -> float:
        fabric = Fabric(workers, servers=1, link=Link(delay=2.5e-3), seed=seed)
        fabric.set_link(0, "up", Link(delay=2.5e-3, loss=0.5))
        fabric.all_reduce(0, plan(300_000, 0.2, **PROBE), gradients(workers, 300_000))
        fabric.run()
        must_be_ok(fabric)
        return float(fabric.completion(0, 0).push_ns)

    alone = sum(push_s(1, seed) for seed in (1, 2, 3))
    beside = sum(push_s(3, seed) for seed in (1, 2, 3))
    assert beside < 1.5 * alone


# ---------------------------------------------------------------------------- what comes of it


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("fill", ["zero", "mean"])
def test_the_bound_holds_and_replicas_are_identical(servers: int, fill: str) -> None:
    workers, elements = 4, 100_000
    regions = [(0, 30_000, 0.1), (30_000, 20_000, 0.0), (50_000, 50_000, 0.3)]
    made = _engine.Plan(elements=elements, regions=regions, fill=fill, **PROBE)
    fabric = Fabric(workers, servers=servers, link=Link(loss=0.15), seed=2)
    values = [np.clip(v, -50, 50) for v in gradients(workers, elements)]
    critical = [[0, 5], None, [200], None]
    fabric.all_reduce(0, made, values, critical=critical)
    fabric.run()
    must_be_ok(fabric)
    short = 0
    total = np.zeros(elements)
    contributors = np.zeros(elements)
    for worker in range(workers):
        done = fabric.completion(worker, 0)
        assert done.delivered[0] >= 0.9
        assert done.delivered[1] == 1.0
        assert done.delivered[2] >= 0.7
        assert done.counted[critical[worker] or []].all()
        assert done.exceeded == []
        assert same_bits(fabric.result(worker, 0), fabric.result(0, 0))
        counted = expand(fabric, made, done.counted)
        total += np.where(counted, values[worker].astype(np.float64), 0.0)
        contributors += counted
        short += not done.counted.all()
    assert short
    if fill == "mean":
        total *= workers / np.maximum(contributors, 1)
    np.testing.assert_allclose(fabric.result(0, 0), total, rtol=1e-5, atol=1e-3)


def test_an_exact_plan_is_exact_in_passes_too() -> None:
    fabric = Fabric(3, link=Link(loss=0.1))
    values = gradients(3, 60_000)
    fabric.all_reduce(0, plan(60_000, control="probe"), values)
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        assert fabric.completion(worker, 0).passes > 1
        assert same_bits(fabric.result(worker, 0), rank_order_sum(values))


# ---------------------------------------------------------------------------- control that is lost


@pytest.mark.parametrize("kind", ["probe", "bitmap", "stop"])
def test_lost_control_comes_again(kind: str) -> None:
    source = 0 if kind == "probe" else 1
    fabric = star(loss=0.3, delay=5e-3, trace=100_000)
    fabric.all_reduce(0, plan(100_000, 0.02, **PROBE), gradients(1, 100_000))
    until_sent(fabric, kind, source)
    fabric.partition(0, 1)
    fabric.run(fabric.now + 0.2)
    fabric.heal(0, 1)
    assert fabric.run()
    must_be_ok(fabric)
    fates = [e.fate for e in fabric.trace() if e.kind == kind and e.source == source]
    assert {"unreachable", "delivered"} <= set(fates)


def test_control_of_an_earlier_pass_is_not_heeded() -> None:
    """A BITMAP of pass 1, while that of pass 2 is awaited: the fabric would see chunks go.

    Forged under packet numbers that were lost long ago, so that both sides take them, and neither
    believes that something arrived that it still waits to send again.
    """
    fabric = star(loss=0.4, delay=5e-3, trace=100_000)
    fabric.set_link(0, "down", Link(delay=5e-3, loss=0.2))
    made = plan(100_000, 0.01, **PROBE)
    fabric.all_reduce(0, made, gradients(1, 100_000))
    until_sent(fabric, "bitmap", 1)
    fabric.run(fabric.now + 12e-3)
    before = sent(fabric, "probe", 0)
    until_sent(fabric, "probe", 0, before + 1)
    assert (len(chunks_of(fabric, made)[0]) + 7) // 8 == BITMAP_BYTES
    lost = {
        each.source: each.packet_number
        for each in reversed(fabric.trace())
        if each.packet_number and each.fate == "loss"
    }
    fabric.inject(1, 0, packet("bitmap", 1, control(PUSH, 1, ALL_MISSING), number=lost[1]))
    fabric.inject(0, 1, packet("probe", 0, control(PUSH, 1), number=lost[0]))
    chunks, bitmaps = sent(fabric, "push", 0), sent(fabric, "bitmap", 1)
    fabric.run(fabric.now + 1e-3)
    assert (sent(fabric, "push", 0), sent(fabric, "bitmap", 1)) == (chunks, bitmaps)
    fabric.run()
    must_be_ok(fabric)
    assert fabric.completion(0, 0).passes >= 3
    assert fabric.counters(0)["malformed"] == fabric.counters(1)["malformed"] == 0


MALFORMED = {
    "a pass that nobody began": ("bitmap", 1, control(PUSH, 9, ALL_MISSING)),
    "another length": ("bitmap", 1, control(PUSH, 1, struct.pack("<I", 36) + bytes(36))),
    "cut short": ("bitmap", 1, control(PUSH, 1)),
    "nothing missing": ("bitmap", 1, control(PUSH, 1, NONE_MISSING)),
    "pass 0": ("bitmap", 1, control(PUSH, 0, ALL_MISSING)),
    "a pull that loses nothing": ("stop", 1, control(PULL, 1)),
    "no way": ("stop", 1, control(7, 1)),
    "stop of a later pass": ("stop", 1, control(PUSH, 3)),
    "stop without a pass": ("stop", 1, struct.pack("<I", PUSH)),
    "stop with more": ("stop", 1, control(PUSH, 1, b"more")),
    "probe of a later pass": ("probe", 0, control(PUSH, 3)),
    "probe of pass 0": ("probe", 0, control(PUSH, 0)),
    "probe by the aggregator": ("probe", 1, control(PUSH, 1)),
    "bitmap by the worker": ("bitmap", 0, control(PUSH, 1, ALL_MISSING)),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_control_is_counted_and_changes_nothing(what: str) -> None:
    kind, source, body = MALFORMED[what]
    fabric = star(loss=0.4, delay=5e-3, trace=100_000)
    fabric.all_reduce(0, plan(100_000, 0.01, **PROBE), gradients(1, 100_000))
    until_sent(fabric, "probe", 0)  # pass 1 waits for its answer
    fabric.inject(source, 1 - source, packet(kind, source, body, number=5000))
    fabric.run()
    must_be_ok(fabric)
    assert fabric.counters(1 - source)["malformed"] == 1


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_forged_control_crashes_and_hangs_nobody(first: int) -> None:
    for seed in range(first, first + 50):
        noise = random.Random(seed)
        # The least chance of a flipped bit: the fabric then takes no value for wrong.
        link = Link(loss=0.05, flip=1e-12)
        fabric = Fabric(3, servers=seed % 2, link=link, peer_timeout=5.0, seed=seed)
        made = plan(30_000, 0.3, pull="lossy", pull_bound=0.3, **PROBE)
        for op in range(2):
            fabric.all_reduce(op, made, gradients(3, 30_000), timeout=20.0)
        for moment in range(40):
            source, to = noise.sample(range(fabric.workers + fabric.servers), 2)
            head = struct.pack("<BBHI", VERSION, noise.choice([5, 9, 10, 11]), source, 1)
            head += struct.pack("<IIIIHH", noise.randrange(100), 0, noise.randrange(3),
                                noise.randrange(2), noise.randrange(1 << 16), 0)  # fmt: skip
            rest = bytes(noise.choice([0, 255]) for _ in range(noise.randrange(40)))
            body = control(noise.randrange(2), noise.randrange(4), struct.pack("<I", len(rest)))
            fabric.inject(source, to, head + body + rest)
            fabric.run(1e-4 * moment)
        assert fabric.run(200.0), f"seed {seed} does not end"


def test_passes_against_a_policer_that_carries_no_train_whole_are_no_flood() -> None:
    """Trains of two where most is lost: one of eight would be lost each time."""
    policed = Link(police_rate=12.5e6, police_burst=2048)
    fabric = Fabric(2, link=policed, whole_trains=True)
    elements = 400_000
    bounds = {"spend": "anything", "pull": "committed", "pull_bound": 0.1}
    of = plan(elements, 0.1, control="probe", **bounds)
    fabric.all_reduce(0, of, gradients(2, elements))
    assert fabric.run(10.0)
    must_be_ok(fabric)
    dropped = sum(fabric.counters(host)["dropped_by_ports"] for host in range(2))
    assert dropped < 50 * elements / 358
