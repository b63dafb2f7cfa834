"""Steps minutes apart, as around a validation: what was known before may hold no longer."""

from dataclasses import replace

import pytest

from gradwire.sim.fabric import NETWORK_A, Fabric
from scenarios import gradients, must_be_ok, plan


def seconds_after_a_pause(drift: float) -> float:
    """Of six ops. Clocks that drift apart lengthen one way by as much as they shorten the other."""
    link = replace(NETWORK_A, delay=1.05e-3)
    longer, shorter = (replace(link, delay=link.delay + by) for by in (drift, -drift))
    fabric = Fabric(2, seed=1, link=link)
    made, values = plan(1_000_000), gradients(2, 1_000_000)

    def run(op: int) -> float:
        start = fabric.now + 1e-3
        fabric.all_reduce(op, made, values, at=start)
        fabric.run(start + 30)
        return max(fabric.finished_at(worker, op) for worker in range(2)) - start

    for op in range(4):
        run(op)
    fabric.run(fabric.now + 300, until_done=False)
    for host, slow, fast in ((0, "up", "down"), (1, "down", "up")):
        fabric.set_link(host, slow, longer)
        fabric.set_link(host, fast, shorter)
    seconds = sum(run(op) for op in range(4, 10))
    must_be_ok(fabric, 10)
    return seconds


@pytest.mark.parametrize("drift", [0.25e-3, 1e-3])
def test_clocks_that_drifted_apart_in_a_pause_are_no_queue(drift: float) -> None:
    """Counted as queues, they would make ops take 1.3 to 1.7 times as long."""
    assert seconds_after_a_pause(drift) < 1.25 * seconds_after_a_pause(0.0)
