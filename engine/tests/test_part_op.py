"""One op at each of several endpoints, without an endpoint: tables of packets in and frames out,
and conversations over a network that loses, repeats and reorders. Also what lets ops start.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from _parts import Again, Op, OpsWaiting, Outbox, id_of, part_bytes

from gradwire._engine import Plan
from part_kit import CHUNK, DATAGRAM, plan_of

PUSH, PULL, OPEN, FORGIVE, STOP, CLOSE, FOLD, COMMIT, ENOUGH, PROBE, BITMAP = range(1, 12)
TAKEN, REFUSED, MALFORMED = range(3)
EAGER = [("open", "all", 0, -1.0)]


# ---------------------------------------------------------------------------- outbox


@pytest.mark.parametrize(
    ("length", "prefix", "parts"),
    [
        (1, 0, 1),
        (100, 0, 1),
        (part_bytes(DATAGRAM), 0, 1),
        (part_bytes(DATAGRAM) + 1, 0, 2),
        (part_bytes(DATAGRAM), 8, 2),
        (5 * part_bytes(DATAGRAM), 0, 5),
    ],
)
def test_a_message_goes_in_parts_that_fit_a_datagram(length: int, prefix: int, parts: int) -> None:
    out = Outbox(DATAGRAM)
    body = random.Random(1).randbytes(length)
    out.message(3, body, b"p" * prefix)
    frames = out.frames()
    assert [part for _, _, part, _ in frames] == list(range(parts))
    assert out.unacknowledged == parts
    joined = b""
    for to, _, _, payload in frames:
        assert to == 3
        assert len(payload) <= DATAGRAM - 28
        assert payload[prefix : prefix + 4] == length.to_bytes(4, "little")
        joined += payload[prefix + 4 :]
    assert joined == body


def test_a_long_list_goes_in_several_frames() -> None:
    out = Outbox(DATAGRAM)
    values = list(range(250))
    out.list(1, values)
    joined = b"".join(payload for _, _, _, payload in out.frames())
    assert [int.from_bytes(joined[i : i + 4], "little") for i in range(0, len(joined), 4)] == values


def test_an_outbox_is_empty_once_all_is_acted_on_and_still_awaits_acknowledgements() -> None:
    out = Outbox(DATAGRAM)
    assert not out.any()
    out.list(1, [1])
    assert out.any()
    out.clear()
    assert not out.any()
    assert out.unacknowledged == 1


# ---------------------------------------------------------------------------- conversations


@dataclass
class Conversation:
    """Ops of all endpoints of a job, and what is on its way between them."""

    plan: Plan
    workers: int
    seed: int
    loss: float = 0.0
    servers: int = 0
    ops: list[Op] = field(default_factory=list)
    data: list[npt.NDArray[np.float32]] = field(default_factory=list)
    # (source, destination, kind, chunk or part, payload, frame)
    under_way: list[tuple[int, int, int, int, bytes, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        numbers = np.random.default_rng(self.seed)
        for endpoint in range(self.workers + self.servers):
            values = numbers.integers(-50, 50, self.plan.elements).astype(np.float32)
            self.data.append(values.copy())
            self.ops.append(
                Op(self.plan, endpoint, self.workers, self.servers, DATAGRAM, self.data[-1])
            )
            self.inputs = [*getattr(self, "inputs", []), values]
        for endpoint in range(self.workers):
            self.ops[endpoint].begin()
        for endpoint in range(len(self.ops)):
            self.collect(endpoint)

    def peers(self, endpoint: int) -> list[int]:
        return [
            other
            for other in range(len(self.ops))
            if other != endpoint
            and (not self.servers or (endpoint < self.workers) != (other < self.workers))
        ]

    def collect(self, source: int) -> None:
        op = self.ops[source]
        assert op.failure() == "", f"seed {self.seed}"
        for to, kind, part, payload in op.frames():
            self.under_way.append((source, to, kind, part, payload, True))
        op.clear()

    def send(self, source: int) -> None:
        for peer in self.peers(source):
            sent = self.ops[source].next(peer)
            if sent is None:
                self.ops[source].end_passes(peer)
                self.collect(source)
                continue
            kind, chunk, _, payload = sent
            self.under_way.append((source, peer, kind, chunk, payload, False))

    def step(self) -> None:
        source = self.random.randrange(len(self.ops))
        self.send(source)
        if not self.under_way:
            return
        at = self.random.randrange(len(self.under_way))
        source, peer, kind, chunk, payload, frame = self.under_way.pop(at)
        sender, receiver = self.ops[source], self.ops[peer]
        if self.random.random() < self.loss:
            if frame:
                self.under_way.append((source, peer, kind, chunk, payload, True))
            else:
                sender.lost(peer, kind, chunk, self.random.choice([Again.lost, Again.probe]))
                self.collect(source)
            return
        for _ in range(1 + (self.random.random() < 0.1)):  # some arrive twice
            fate = receiver.take(source, kind, chunk, payload)
            assert fate == TAKEN, f"seed {self.seed}: kind {kind}"
            report = receiver.applied()
            if report:
                self.applied = [*getattr(self, "applied", []), (peer, report)]
            self.collect(peer)
        if frame:
            sender.control_acked()
        else:
            sender.acked(peer, kind, chunk)
            report = sender.applied()
            if report:
                self.applied = [*getattr(self, "applied", []), (source, report)]
        self.collect(source)

    def run(self, most: int = 60_000) -> None:
        for _ in range(most):
            self.step()
            if not self.under_way and all(op.drained() for op in self.ops):
                return
        raise AssertionError(f"not over after {most} events, seed {self.seed}")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("servers", [0, 2])
def test_exact_ops_give_everybody_the_sum_whatever_is_lost(seed: int, servers: int) -> None:
    plan, _ = plan_of((23, 0.0))
    talk = Conversation(plan, 3, seed, loss=0.2, servers=servers)
    talk.run()
    total = np.sum(talk.inputs[:3], axis=0)
    for worker in range(3):
        assert talk.ops[worker].done()
        assert np.array_equal(talk.data[worker], total), f"seed {seed}"


OPTIONS: list[dict[str, Any]] = [
    {"spend": "anything", "schedule": EAGER},
    {"spend": "lost"},
    {"spend": "anything", "schedule": EAGER, "pull": "committed", "pull_bound": 0.2},
    {"spend": "anything", "schedule": EAGER, "pull": "lossy", "pull_bound": 0.2},
    {"spend": "anything", "schedule": EAGER, "control": "probe"},
    {
        "spend": "anything",
        "schedule": EAGER,
        "control": "probe",
        "pull": "lossy",
        "pull_bound": 0.2,
    },
    {"spend": "anything", "schedule": EAGER, "pull": "none"},
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", OPTIONS)
def test_bounded_ops_end_within_their_bounds(options: dict[str, Any], seed: int) -> None:
    plan, _ = plan_of((20, 0.3), (10, 0.0), **options)
    talk = Conversation(plan, 3, seed, loss=0.2)
    talk.run()
    assert all(op.done() and op.drained() for op in talk.ops)
    if options.get("pull", "exact") in ("exact", "committed"):
        # Replicas stay equal to the bit.
        assert np.array_equal(talk.data[0], talk.data[1]), f"seed {seed}"
        assert np.array_equal(talk.data[0], talk.data[2]), f"seed {seed}"
    if options.get("pull", "exact") == "exact":
        total = np.sum(talk.inputs, axis=0)
        assert np.array_equal(talk.data[0][20 * CHUNK :], total[20 * CHUNK :]), f"seed {seed}"


# ---------------------------------------------------------------------------- tables


def two_ops(**options: Any) -> tuple[Op, Op, Plan]:
    plan, _ = plan_of((8, 0.0), **options)
    ops = [Op(plan, e, 2, 0, DATAGRAM, np.ones(plan.elements, np.float32)) for e in range(2)]
    return ops[0], ops[1], plan


def opens(op: Op) -> list[bytes]:
    return [payload for _, kind, _, payload in op.frames() if kind == OPEN]


def test_an_op_opens_at_every_aggregator_but_its_own() -> None:
    op, _, _ = two_ops()
    op.begin()
    assert [(to, kind) for to, kind, _, _ in op.frames()] == [(1, OPEN)]
    assert op.backlog(1) == (0, 4)
    assert op.wanted(1) == 8  # four contributions, four results
    assert op.missing() == [1]
    assert not op.drained()


@pytest.mark.parametrize(
    ("kind", "chunk", "payload"),
    [
        (PUSH, 0, b""),
        (PUSH, 4, bytes(4 * CHUNK)),  # of the other shard
        (PULL, 0, bytes(4 * CHUNK)),
        (PULL, 4, bytes(4 * CHUNK - 4)),
        (FORGIVE, 0, b"\1\2\3"),
        (STOP, 0, b"\1\2\3"),
        (CLOSE, 0, bytes(12)),  # an exact op has none
        (COMMIT, 0, bytes(12)),
        (FOLD, 0, bytes(80)),  # of an aggregator that is not the first
        (ENOUGH, 0, bytes(4)),
        (PROBE, 0, bytes(8)),
        (BITMAP, 0, bytes(12)),
    ],
)
def test_what_no_correct_peer_sends_changes_nothing(kind: int, chunk: int, payload: bytes) -> None:
    op, _, _ = two_ops()
    op.begin()
    op.clear()
    assert op.take(1, kind, chunk, payload) == MALFORMED
    assert op.failure() == ""
    assert op.frames() == []
    assert op.wanted(1) == 8


def test_another_plan_is_told_by_the_first_part_of_an_open() -> None:
    op, _, _ = two_ops()
    _, other, _ = two_ops(scale=0.5)
    other.begin()
    assert op.take(1, OPEN, 0, opens(other)[0]) == MALFORMED
    assert "rank 1 has plan" in op.failure()


def test_a_chunk_given_up_against_the_bound_ends_the_job() -> None:
    op, _, _ = two_ops(spend="lost")
    op.begin()
    assert op.take(1, FORGIVE, 0, (0).to_bytes(4, "little")) == MALFORMED
    assert "bound" in op.failure()


def test_an_op_is_drained_once_every_peer_has_left_with_all_it_needed() -> None:
    talk = Conversation(plan_of((8, 0.0))[0], 2, 3)
    for _ in range(2_000):
        talk.step()
        if talk.ops[0].done():
            break
    assert talk.ops[0].done()
    talk.ops[0].left(1)
    talk.ops[0].left(1)
    assert talk.ops[0].drained()


# ---------------------------------------------------------------------------- admission


def test_a_lanes_ops_start_in_order_and_others_pass_one_that_waits() -> None:
    plan, _ = plan_of((100, 0.0))
    ops = OpsWaiting(0, 2, 1 << 30)
    assert ops.add(id_of(0, 1), plan) == ""
    one = ops.start()[0]
    need = ops.held()
    # Room for one more op of another lane, not for a second of the same.
    ops = OpsWaiting(0, 2, need * 8 // 3 - 8)
    for op in (id_of(0, 1), id_of(1, 1), id_of(0, 2)):
        assert ops.add(op, plan) == ""
    assert ops.start() == (one, "")
    assert ops.start() == (id_of(0, 2), "")
    assert ops.start() == (None, "")
    ops.finish(id_of(0, 1))
    assert ops.finished(id_of(0, 1))
    assert ops.start() == (id_of(1, 1), "")


def test_an_op_that_exceeds_the_limit_alone_says_the_least_limit() -> None:
    plan, _ = plan_of((100, 0.0))
    ops = OpsWaiting(0, 2, 1 << 10)
    assert ops.add(0, plan) == ""
    started, why = ops.start()
    assert started is None
    least = int(why.split("needs at least ")[1].split()[0])
    ops = OpsWaiting(0, 2, least)
    assert ops.add(0, plan) == ""
    assert ops.start() == (0, "")
    ops = OpsWaiting(0, 2, least - 8)
    assert ops.add(0, plan) == ""
    assert ops.start()[1] != ""


def test_an_op_out_of_order_is_refused() -> None:
    plan, _ = plan_of((4, 0.0))
    ops = OpsWaiting(0, 2, 1 << 30)
    assert "next is 0" in ops.add(id_of(1, 0), plan)
    assert ops.add(id_of(0, 0), plan) == ""
    assert "next is 1" in ops.add(id_of(2, 0), plan)
    assert ops.add(id_of(1, 0), plan) == ""


def test_ids_are_expanded_near_the_lanes_next_op_and_bounded_ahead() -> None:
    plan, _ = plan_of((4, 0.0))
    ops = OpsWaiting(0, 2, 1 << 30)
    assert ops.add(id_of(0, 5), plan) == ""
    assert ops.start()[0] == id_of(0, 5)
    assert ops.full_id(id_of(1, 5)) == id_of(1, 5)
    assert not ops.far_ahead(id_of(1_024, 5))
    assert ops.far_ahead(id_of(1_025, 5))
