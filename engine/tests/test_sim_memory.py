"""Memory of an endpoint: it goes with what arrived and is kept, and stays within the limit."""

import pytest
from scenarios import gradients, heap_bytes, must_be_ok, plan

from gradwire.sim import Fabric, Link


@pytest.mark.parametrize("direction", ["up", "down"])
def test_what_is_lost_again_and_again_takes_no_more_memory_each_time(direction: str) -> None:
    """Fresh chunks go first, so that something always waits to be sent again."""
    elements = 57 * 20_000
    link = Link(rate=20e6)
    fabric = Fabric(1, servers=1, datagram_bytes=256, link=link)
    fabric.set_link(0, direction, Link(rate=20e6, loss=0.9))
    of = (
        plan(elements, 0.01, spend="lost", pull="none")
        if direction == "up"
        else plan(elements, pull="lossy", pull_bound=0.01)
    )
    fabric.all_reduce(0, of, gradients(1, elements))
    sender = 0 if direction == "up" else 1
    while fabric.counters(sender)["retransmissions"] < 20_000:  # all has gone once
        assert not fabric.run(fabric.now + 0.1)
    before = heap_bytes()
    most = 0
    while not fabric.run(fabric.now + 0.1):
        most = max(most, heap_bytes() - before)
    must_be_ok(fabric)
    assert fabric.counters(sender)["retransmissions"] > 100_000
    assert most < 100_000
