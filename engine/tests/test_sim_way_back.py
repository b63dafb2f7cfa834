"""Workers whose ways up lose most: what a server sends arrives, only word of it gets lost."""

from dataclasses import replace

import pytest

from gradwire.sim.fabric import NETWORK_B, Fabric
from scenarios import EAGER, gradients, must_be_ok, plan

WORKERS, ELEMENTS, LOSS, BOUND = 3, 1_000_000, 0.8, 0.408


@pytest.mark.parametrize("seed", range(4))
def test_results_are_not_sent_again_for_want_of_word(seed: int) -> None:
    """The server's port is full of the first copies; it sent more than twice as many results."""
    fabric = Fabric(WORKERS, servers=1, link=NETWORK_B, seed=seed, trace=60_000)
    values = gradients(WORKERS, ELEMENTS)
    fabric.all_reduce(0, plan(ELEMENTS), values)
    fabric.run()
    for worker in range(WORKERS):
        fabric.set_link(worker, "up", replace(NETWORK_B, loss=LOSS))
    started = fabric.now
    fabric.all_reduce(1, plan(ELEMENTS, BOUND, spend="anything", schedule=EAGER), values)
    fabric.run()
    must_be_ok(fabric, 2)
    done = max(fabric.finished_at(worker, 1) for worker in range(WORKERS))
    results = [(s.destination, s.chunk) for s in fabric.trace() if s.kind == "pull" and s.op == 1]
    assert len(results) < 1.8 * len(set(results)), f"seed {seed}"
    limit = (1 - BOUND) * 4 * ELEMENTS / NETWORK_B.rate / (1 - LOSS)
    assert done - started < 1.6 * limit, f"seed {seed}"
