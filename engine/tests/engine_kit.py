"""Engines of one process on real sockets, for tests: connected, summing, and closed together."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from gradwire import _engine
from scenarios import gradients, plan, rank_order_sum, same_bits

SECOND = 1_000_000_000


def engine(endpoint: int = 0, workers: int = 1, servers: int = 0, **options: Any) -> _engine.Engine:
    options.setdefault("address", "127.0.0.1")
    return _engine.Engine(
        endpoint=endpoint, workers=workers, servers=servers, session=99, **options
    )


def close_all(engines: Sequence[_engine.Engine]) -> None:
    """Together: an engine lingers until its peers have what they need."""
    threads = [threading.Thread(target=each.close) for each in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def connected(
    engines: list[_engine.Engine], places: Sequence[Sequence[Any]] | None = None
) -> Iterator[list[_engine.Engine]]:
    """`places`: for each engine where it finds all, if that is not where they are."""
    try:
        threads = range(len(engines[0].addresses))
        for number, each in enumerate(engines):
            if places is None:
                each.connect(*([one.addresses[n] for one in engines] for n in threads))
            else:
                each.connect(list(places[number]))
        for each in engines:
            assert each.wait_connected(30 * SECOND) == []
        yield engines
    finally:
        close_all(engines)


@contextlib.contextmanager
def job(workers: int, servers: int = 0, **options: Any) -> Iterator[list[_engine.Engine]]:
    with connected(
        [engine(i, workers, servers, **options) for i in range(workers + servers)]
    ) as engines:
        yield engines


def completed(
    engines: Sequence[_engine.Engine],
    op: int,
    made: _engine.Plan,
    values: list[Any],
    **options: Any,
) -> tuple[list[Any], list[_engine.Completion]]:
    """Starts the op on every worker; the buffers with their results, and the completions."""
    buffers = [value.copy() for value in values]
    for each, buffer in zip(engines, buffers, strict=False):
        each.all_reduce(op=op, step=op, plan=made, data=buffer, **options)
    completions = []
    for each, _ in zip(engines, buffers, strict=False):
        done = each.next_completion(60 * SECOND)
        assert done is not None
        assert done.ok, done.error
        assert done.op == op
        completions.append(done)
    return buffers, completions


def all_reduce(
    engines: Sequence[_engine.Engine],
    op: int,
    made: _engine.Plan,
    values: list[Any],
    **options: Any,
) -> list[Any]:
    """The same without the completions."""
    return completed(engines, op, made, values, **options)[0]


def sum_exactly(engines: Sequence[_engine.Engine], op: int, elements: int) -> None:
    """An exact sum, right to the bit on every worker."""
    values = gradients(len(engines), elements, op)
    total = rank_order_sum(values)
    assert all(same_bits(each, total) for each in all_reduce(engines, op, plan(elements), values))
