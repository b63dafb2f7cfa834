"""Encoded transfers: replicas alike, books in balance, fewer bytes, and nothing trusted."""

from typing import Any

import numpy as np
import pytest

from gradwire import _engine
from gradwire.sim.fabric import NETWORK_A, Fabric, Link
from scenarios import (
    EAGER,
    chunks_of,
    expand,
    gradients,
    must_be_ok,
    plan,
    random_link,
    random_regions,
    rank_order_sum,
    same_bits,
)

ENCODINGS: dict[str, dict[str, Any]] = {
    "f16": {"encoding": "f16"},
    "bf16": {"encoding": "bf16"},
    "half": {"encoding": "half"},
    "int8": {"encoding": "int8"},
    "topk": {"encoding": "topk", "kept": 0.05},
}
LOSSY = Link(loss=0.05, reorder=0.1, duplicate=0.05)
SEEDS = 240
BATCH = 40


def tame(workers: int, elements: int, seed: int = 0) -> list[np.ndarray]:
    """Gradients without the largest magnitudes, for sums in float64 to compare with."""
    return [np.clip(v, -50, 50) for v in gradients(workers, elements, seed)]


def sent_of(fabric: Fabric, made: _engine.Plan, values: np.ndarray) -> np.ndarray:
    """What the others get of a worker's values."""
    aggregators = fabric.servers or fabric.workers
    return _engine.round_trip(made, values, fabric.datagram_bytes, aggregators)


def balance(fabric: Fabric, made: _engine.Plan, values: list, scale: float, op: int = 0) -> None:
    """applied + residuals = all gradients: what the pushes lost and what did not count, at each
    worker, and what its own results lost, at each aggregator."""
    aggregators = fabric.servers or fabric.workers
    offsets, lengths, _, _ = chunks_of(fabric, made)
    books = fabric.result(0, op).astype(np.float64) / scale
    tolerance = np.zeros(len(books))
    for worker, mine in enumerate(values):
        done = fabric.completion(worker, op)
        assert done is not None
        assert same_bits(fabric.result(worker, op), fabric.result(0, op))
        residual = mine.copy()
        _engine.keep_encoding_error(
            made, residual, done.counted, fabric.datagram_bytes, aggregators
        )
        # Which is what it sent less what the others got.
        counted = expand(fabric, made, done.counted)
        got = sent_of(fabric, made, mine)
        np.testing.assert_array_equal(residual, np.where(counted, mine - got, mine))
        begin, error = done.error_offset, done.take_result_error()
        books[begin : begin + len(error)] += error / scale
        at = 0
        for chunk in done.withheld_chunks:
            span = slice(int(offsets[chunk]), int(offsets[chunk] + lengths[chunk]))
            books[span] += done.withheld_values[at : at + lengths[chunk]] / scale
            at += lengths[chunk]
        books += residual
        tolerance += np.abs(mine)
    total = sum(v.astype(np.float64) for v in values)
    assert (np.abs(books - total) <= (len(values) + 4) * 2.0**-23 * tolerance + 1e-40).all()


def random_options(random: np.random.Generator, elements: int, workers: int) -> dict[str, Any]:
    spend = str(random.choice(["nothing", "lost", "anything"]))
    pull = str(random.choice(["exact", "committed"]))
    return {
        "regions": random_regions(random, elements),
        "spend": spend,
        "schedule": EAGER if spend == "anything" else (("open", "all", 0, 1.0),),
        "order": str(random.choice(["shuffled", "sequential"])),
        "pull": pull,
        "pull_bound": float(random.choice([0.1, 0.4])) if pull == "committed" else 0.0,
        "scale": float(random.choice([1.0, 1 / workers])),
        "seed": int(random.integers(2**63)),
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_random_jobs_keep_replicas_alike_and_books_in_balance(encoding: str, first: int) -> None:
    for seed in range(first, first + BATCH):
        random = np.random.default_rng([seed, 77])
        workers = int(random.integers(2, 6))
        elements = int(10 ** random.uniform(0, 4.7))
        options = random_options(random, elements, workers)
        made = _engine.Plan(elements=elements, **options, **ENCODINGS[encoding])
        link = random_link(random)
        datagram = int(random.choice([256, 601, 1472]))
        whole_trains = bool(random.random() < 0.3)
        least = _engine.least_memory_limit(made, datagram, workers)
        fabric = Fabric(
            workers,
            seed=seed,
            link=link,
            datagram_bytes=datagram,
            whole_trains=whole_trains,
            memory_limit=int(random.choice([least, 2**31])),
        )
        jobs = [tame(workers, elements, seed + op) for op in range(2)]
        for op, values in enumerate(jobs):
            fabric.all_reduce(op, made, values)
        fabric.run(300.0)
        must_be_ok(fabric, len(jobs))
        for op, values in enumerate(jobs):
            balance(fabric, made, values, options["scale"], op)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_exact_sum_is_that_of_the_decoded_values_in_rank_order(
    encoding: str, servers: int
) -> None:
    """And its result is that sum, encoded and decoded once, to the bit."""
    values = tame(5, 20_011)
    made = plan(20_011, scale=0.2, **ENCODINGS[encoding])
    fabric = Fabric(5, servers=servers, link=LOSSY)
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    total = rank_order_sum([sent_of(fabric, made, v) for v in values], 0.2)
    expected = sent_of(fabric, made, total)
    explained = 0
    for worker in range(5):
        assert same_bits(fabric.result(worker, 0), expected)
        done = fabric.completion(worker, 0)
        begin, error = done.error_offset, done.take_result_error()
        assert same_bits(error, (total - expected)[begin : begin + len(error)])
        explained += len(error)
    # A server has no residual to put it into.
    assert explained == (0 if servers else 20_011)


@pytest.mark.parametrize("elements", [1, 2, 7, 240, 241, 721, 722, 723, 1440, 1441, 4801])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ragged_chunks(encoding: str, elements: int) -> None:
    values = tame(3, elements)
    made = plan(elements, **ENCODINGS[encoding])
    fabric = Fabric(3, link=LOSSY)
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    balance(fabric, made, values, 1.0)


def test_ops_of_all_encodings_share_trains_and_credit() -> None:
    """Datagrams of one train are equally long: the fabric looks at each."""
    random = np.random.default_rng(11)
    fabric = Fabric(4, link=LOSSY, seed=11)
    jobs = []
    for op in range(15):
        options = list(ENCODINGS.values())[op % 5] if op % 5 < 4 else {}
        made = plan(int(random.integers(1, 30_000)), **options)
        values = tame(4, made.elements, op)
        fabric.all_reduce(op, made, values)
        jobs.append((made, values))
    fabric.run()
    must_be_ok(fabric, len(jobs))
    for op, (made, values) in enumerate(jobs):
        balance(fabric, made, values, 1.0, op)


def test_the_wire_carries_fewer_bytes() -> None:
    elements = 400_000
    sent = {}
    for encoding, options in [("f32", {}), *ENCODINGS.items()]:
        fabric = Fabric(4, link=NETWORK_A)
        made = plan(elements, **options)
        fabric.all_reduce(0, made, gradients(4, elements))
        fabric.run()
        must_be_ok(fabric)
        done = [fabric.completion(worker, 0) for worker in range(4)]
        sent[encoding] = sum(each.bytes_sent for each in done)
        # Fractions are of represented elements, whatever the bytes.
        assert all(each.delivered == [1.0] for each in done)
    # A worker's count ends with its own op, perhaps before it has sent its last results.
    assert sent["f16"] == pytest.approx(sent["f32"] / 2, rel=0.05)
    assert sent["bf16"] == pytest.approx(sent["f32"] / 2, rel=0.05)
    assert sent["half"] == pytest.approx(sent["f32"] / 2, rel=0.05)
    assert sent["int8"] == pytest.approx(sent["f32"] / 4, rel=0.05)
    assert sent["topk"] == pytest.approx(sent["f32"] * 0.05 * 6 / 4, rel=0.1)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_bound_counts_represented_elements(encoding: str) -> None:
    elements, bound = 300_000, 0.3
    made = plan(elements, bound, spend="anything", schedule=EAGER, **ENCODINGS[encoding])
    fabric = Fabric(2, link=Link(loss=0.05))
    values = tame(2, elements)
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    for worker in range(2):
        done = fabric.completion(worker, 0)
        counted = expand(fabric, made, done.counted)
        assert not counted.all()
        assert done.delivered == [pytest.approx(counted.mean())]
        assert counted.mean() >= 1 - bound
    balance(fabric, made, values, 1.0)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_not_finite_arrives_and_leaves_nothing_behind(encoding: str, servers: int) -> None:
    elements = 9000
    values = [np.clip(v, -50, 50) for v in tame(3, elements)]
    values[1][4000] = np.nan
    values[2][100] = np.inf
    values[0][8999] = -np.inf
    fabric = Fabric(3, servers=servers, link=LOSSY)
    made = plan(elements, **ENCODINGS[encoding])
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        result = fabric.result(worker, 0)
        assert np.isnan(result[4000])
        assert result[100] == np.inf
        assert result[8999] == -np.inf
        assert np.isfinite(np.delete(result, [100, 4000, 8999])).all()
        done = fabric.completion(worker, 0)
        assert np.isfinite(done.take_result_error()).all()
        residual = values[worker].copy()
        _engine.keep_encoding_error(made, residual, done.counted, 1472, servers or 3)
        assert np.isfinite(residual).all()


def test_a_chunk_that_is_full_of_nan_is_nan_for_everybody() -> None:
    values = tame(2, 5000)
    values[1][:] = np.nan
    made = plan(5000, **ENCODINGS["topk"])
    fabric = Fabric(2)
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    assert np.isnan(fabric.result(0, 0)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_push_alone_leaves_the_sum_as_it_is(encoding: str) -> None:
    values = tame(4, 10_000)
    made = plan(10_000, pull="none", **ENCODINGS[encoding])
    fabric = Fabric(4, link=LOSSY)
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    _, lengths, _, aggregators = chunks_of(fabric, made)
    owner = np.repeat(aggregators, lengths)
    total = rank_order_sum([sent_of(fabric, made, v) for v in values])
    for worker in range(4):
        result = fabric.result(worker, 0)
        assert same_bits(result[owner == worker], total[owner == worker])
        assert len(fabric.completion(worker, 0).take_result_error()) == 0


def forged(session: int, source: int, kind: int, number: int, chunk: int, payload: bytes) -> bytes:
    head = bytes([_engine.PROTOCOL_VERSION, kind])
    head += source.to_bytes(2, "little") + session.to_bytes(4, "little")
    words = (number, 0, 0, chunk)
    return head + b"".join(w.to_bytes(4, "little") for w in words) + bytes(4) + payload


BAD_PAYLOADS = {
    "f16": b"\xff\x7f" + bytes(2 * 721),
    "bf16": bytes(2 * 722 - 1),
    "half": bytes(2 * 722 - 1),
    "int8": b"\x00\x00\xc0\x7f" + bytes(1440),
    "topk": bytes(6 * 240),
}


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_malformed_chunk_changes_nothing(encoding: str, kind: int) -> None:
    """From a peer of the job, at the right length or nearly so."""
    elements = 100_000
    values = tame(2, elements)
    made = plan(elements, **ENCODINGS[encoding])
    fabric = Fabric(2, seed=1)
    fabric.all_reduce(0, made, values)
    fabric.run(0.0001, until_done=False)
    before = fabric.counters(0)["malformed"]
    chunks = len(chunks_of(fabric, made)[0])
    for chunk in range(chunks):
        payload = BAD_PAYLOADS[encoding]
        fabric.inject(1, 0, forged(1, 1, kind, 4000 + chunk, chunk, payload))
    fabric.run()
    must_be_ok(fabric)
    assert fabric.counters(0)["malformed"] >= before + chunks
    total = rank_order_sum([sent_of(fabric, made, v) for v in values])
    assert same_bits(fabric.result(0, 0), sent_of(fabric, made, total))


def test_another_encoding_is_another_plan() -> None:
    """Named by the error, as every mismatch."""
    fabric = Fabric(2)
    for worker, encoding in enumerate(["f16", "bf16"]):
        made = plan(1000, encoding=encoding)
        fabric.start(worker, 0, made, gradients(1, 1000)[0])
    fabric.run(10.0)
    for worker in range(2):
        assert "plan" in fabric.completion(worker, 0).error


def test_flipped_bits_can_do_no_harm_to_the_job() -> None:
    """A payload that became invalid on the way is sent again."""
    for encoding, options in ENCODINGS.items():
        fabric = Fabric(3, link=Link(flip=0.2), seed=5)
        fabric.all_reduce(0, plan(60_000, **options), tame(3, 60_000), timeout=30.0)
        fabric.run(60.0)
        for worker in range(3):
            done = fabric.completion(worker, 0)
            assert done is not None, encoding
