"""Several engines of a host share its port as one does: no more drops, and hardly more time."""

from __future__ import annotations

from statistics import median

import pytest

from gradwire.sim.cores import CoresFabric
from gradwire.sim.fabric import Link
from scenarios import gradients, plan, rank_order_sum, same_bits

HOSTS = {"host_delay": 10e-6, "host_jitter": 60e-6}
OPS, WARM = 8, 3


def run(cores: int, workers: int, elements: int, link: Link, seed: int) -> tuple[float, float]:
    """The median time of the later ops, and the share of packets that ports dropped."""
    fabric = CoresFabric(workers, cores, link=link, seed=seed, **HOSTS)
    made, values, times = plan(elements), gradients(workers, elements), []
    for op in range(OPS):
        began = fabric.now
        fabric.all_reduce(op, made, values, at=began)
        assert fabric.run(began + 30)
        times.append(max(fabric.finished_at(each, op) for each in range(workers)) - began)
        assert same_bits(fabric.result(op % workers, op, made), rank_order_sum(values))
        assert fabric.counted(op % workers, op).all()
    counters = [fabric.counters(each) for each in range(workers)]
    sent = sum(each["packets_sent"] for each in counters)
    return median(times[WARM:]), sum(each["dropped_by_ports"] for each in counters) / sent


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("cores", [2, 4])
@pytest.mark.parametrize(
    "link", [Link(rate=1.25e9, delay=10e-6, queue=512 << 10)], ids=["10 Gbit/s"]
)
def test_several_engines_of_a_host_behave_as_one(cores: int, workers: int, link: Link) -> None:
    elements = 500_000
    seeds = range(2)
    one = [run(1, workers, elements, link, seed) for seed in seeds]
    several = [run(cores, workers, elements, link, seed) for seed in seeds]
    assert median(t for t, _ in several) <= 1.03 * median(t for t, _ in one)
    assert max(drops for _, drops in several) <= max(drops for _, drops in one) + 1e-3
