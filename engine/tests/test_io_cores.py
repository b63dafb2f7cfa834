"""Engines with several threads on real sockets: what they report is that of one engine."""

import contextlib

import numpy as np
import pytest

from engine_kit import SECOND, close_all, completed, engine, job
from gradwire import _engine
from hostile import Wire, nothing
from scenarios import EAGER, gradients, plan, rank_order_sum, same_bits


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("cores", [2, 3])
def test_exact_sums_are_those_of_one_thread(cores: int, servers: int) -> None:
    with job(3, servers, engines=cores) as engines:
        for op, elements in enumerate((1, 1000, 300_000, 77)):
            values = gradients(3, elements, op)
            buffers, done = completed(engines, op, plan(elements), values, stats=[1.0])
            for buffer, report in zip(buffers, done, strict=True):
                assert same_bits(buffer, rank_order_sum(values))
                assert report.counted.all()
                assert report.applied.all()
                assert report.delivered == [1.0]
                assert report.exceeded == []
                assert report.stats_sum[0] == 3.0


def test_every_thread_has_a_socket_and_its_part_of_the_traffic() -> None:
    with job(2, engines=2) as engines:
        assert len({port for _, port in engines[0].addresses}) == 2
        elements = 100_000
        values = gradients(2, elements)
        _, done = completed(engines, 0, plan(elements), values)
        bare = elements // 2 * 4 * 2  # half goes to the other rank, and the own half back
        for each, report in zip(engines, done, strict=True):
            # A report counts what has gone by then: results may still be on their way.
            assert 0.5 * bare < report.bytes_sent < 1.2 * bare
            assert bare < each.counters()["bytes_sent"]
            assert [peer.endpoint for peer in each.peers()] == [1 - engines.index(each)]


def test_the_bound_of_a_region_holds_over_all_threads() -> None:
    elements, bound = 200_000, 0.2
    with job(3, engines=2) as engines:
        for index, each in enumerate(engines):
            each.set_drop(0.1, seed=index)
        random = np.random.default_rng(0)  # whole numbers: their sums are exact in any order
        values = [random.integers(-99, 99, elements).astype(np.float32) for _ in engines]
        made = plan(elements, bound, spend="anything", schedule=EAGER, order="shuffled")
        offsets, lengths, *_ = _engine.chunk_grid(made, 1472, 3)
        assert made.effective_bounds(1472, 3, 2)[0] <= bound
        buffers, done = completed(engines, 0, made, values)
        assert all(same_bits(buffer, buffers[0]) for buffer in buffers)
        for report in done:
            counted = float(lengths[report.counted > 0].sum()) / elements
            assert 1 - bound <= counted
            assert report.delivered[0] == pytest.approx(counted)
            assert report.exceeded == []
        wanted = np.zeros(elements, np.float32)
        for value, report in zip(values, done, strict=True):
            for chunk in np.flatnonzero(report.counted):
                at = slice(int(offsets[chunk]), int(offsets[chunk] + lengths[chunk]))
                wanted[at] += value[at]
        assert np.array_equal(buffers[0], wanted)
        for each in engines:
            each.set_drop(0.0)


def test_critical_chunks_and_classes_reach_the_thread_that_carries_them() -> None:
    elements = 200_000
    made = plan(elements, 0.3, spend="anything", schedule=EAGER, order="priority")
    chunks = len(_engine.chunk_grid(made, 1472, 2)[0])
    critical = np.arange(0, chunks, 7, dtype=np.uint32)
    priorities = (np.arange(chunks) % 8).astype(np.uint8)
    with job(2, engines=3) as engines:
        _, done = completed(
            engines, 0, made, gradients(2, elements), critical=critical, priorities=priorities
        )
        for report in done:
            assert report.counted[critical].all()


def test_the_error_of_an_encoding_covers_the_whole_shard() -> None:
    elements = 100_000
    made = plan(elements, encoding="int8", pull="exact")
    with job(2, engines=2) as engines:
        buffers, done = completed(engines, 0, made, gradients(2, elements))
        assert same_bits(buffers[0], buffers[1])
        end = 0
        for report in done:
            assert report.error_offset == end
            end += len(report.take_result_error())
        assert end == elements


def test_a_shard_that_was_asked_for_is_summed_by_all_threads() -> None:
    shards = [70_000, 20_000, 10_000]
    values = gradients(3, sum(shards))
    with job(3, engines=2) as engines:
        buffers, _ = completed(engines, 0, plan(sum(shards), pull="none", shards=shards), values)
        total, begin = rank_order_sum(values), 0
        for rank, length in enumerate(shards):
            own = slice(begin, begin + length)
            assert same_bits(buffers[rank][own], total[own])
            rest = np.delete(buffers[rank], own)
            assert same_bits(rest, np.delete(values[rank], own))
            begin += length


def test_a_failure_is_told_once_and_ends_every_thread() -> None:
    with job(3, engines=2) as engines:
        values = gradients(3, 50_000)
        for worker in (0, 2):
            engines[worker].all_reduce(op=0, step=7, plan=plan(50_000), data=values[worker])
        engines[1].fail("enough")
        for worker in (0, 2):
            done = engines[worker].next_completion(20 * SECOND)
            assert (done.ok, done.error_rank, done.error_cause) == (False, 1, "engine")
            assert done.error.count("enough") == 1
            assert engines[worker].next_completion(0) is None
            with pytest.raises(RuntimeError, match="enough"):
                engines[worker].all_reduce(op=1, step=8, plan=plan(50_000), data=values[worker])


def test_a_thread_whose_path_is_lost_ends_the_others() -> None:
    """Before the op's time-out, for which they would wait."""
    engines = [engine(n, 2, engines=2, peer_timeout_ns=SECOND) for n in range(2)]
    wire = Wire([each.addresses[1] for each in engines], nothing)
    wire.thread.start()
    try:
        for number, each in enumerate(engines):
            each.connect([one.addresses[0] for one in engines], wire.places(number))
        for each in engines:
            assert each.wait_connected(20 * SECOND) == []
        values = gradients(1, 50_000)[0]
        engines[1].all_reduce(op=0, step=5, plan=plan(50_000), data=values)
    finally:
        wire.close()
    try:
        done = engines[1].next_completion(20 * SECOND)
        assert done is not None
        assert (done.ok, done.step, done.error_cause) == (False, 5, "silence")
        with pytest.raises(RuntimeError):
            engines[1].all_reduce(op=1, step=6, plan=plan(50_000), data=values)
    finally:
        close_all(engines)


def test_the_ports_of_a_range_are_taken_in_order() -> None:
    with contextlib.closing(engine(engines=2)) as first:
        taken = [port for _, port in first.addresses]
        with pytest.raises(OSError, match="in use"):
            engine(engines=2, ports=taken)
        with contextlib.closing(engine(engines=2, ports=[*taken, 0, 0])) as second:
            assert not {port for _, port in second.addresses} & set(taken)


def test_every_thread_keeps_a_timeline_while_it_is_asked_to() -> None:
    with job(2, engines=2) as engines:
        assert engines[0].record(10_000) == [[], []]
        completed(engines, 0, plan(100_000), gradients(2, 100_000))
        for entries in engines[0].record(3):
            words = [what for _, what, _, _ in entries]
            assert words.index("begun") < words.index("sent") < words.index("ended")
            assert {"read", "turn", "sleep"} <= set(words)
            bytes_sent = sum(value for _, what, _, value in entries if what == "sent")
            assert bytes_sent > 1.9 * 100_000  # half of the values, out and back, on two threads
            assert [time for time, *_ in entries] == sorted(time for time, *_ in entries)
        completed(engines, 1, plan(100_000), gradients(2, 100_000))
        for entries in engines[0].record(0):
            assert len(entries) == 3
            assert entries[-1][1] == "full"
        completed(engines, 2, plan(100_000), gradients(2, 100_000))
        assert engines[0].record(0) == [[], []]
