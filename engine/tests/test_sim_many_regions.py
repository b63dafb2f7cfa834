"""Plans of very many regions: control frames by the ten thousand, in few packets where they may."""

import pytest

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from scenarios import gradients, must_be_ok

REGIONS = 65_536
PLAN_BYTES = 16  # a region's, in an OPEN to a server


def finest(bound: float = 0.0, regions: int = REGIONS, **options: object) -> _engine.Plan:
    """One element to a region."""
    made = [(each, 1, bound) for each in range(regions)]
    return _engine.Plan(elements=regions, regions=made, **options)  # type: ignore[arg-type]


def test_more_control_frames_than_there_are_slots_are_sent_all_the_same() -> None:
    """OPENs with their plans, 4,682 datagrams each: 14 fill the slots of a path."""
    ops = 15
    link = Link(rate=1e12, queue=1 << 30)
    roomy = {"link": link, "receive_buffer": 1 << 28, "trace": 1_000_000}
    fabric = Fabric(1, servers=1, datagram_bytes=256, **roomy)  # type: ignore[arg-type]
    made = finest()
    for op in range(ops):
        fabric.all_reduce(op, made, gradients(1, REGIONS))
    fabric.run(0.5e-3)
    sent = {(each.op, each.chunk) for each in fabric.trace() if each.kind == "open"}
    parts = len({part for op, part in sent if op == 0})
    assert parts > REGIONS * PLAN_BYTES / 256
    assert len(sent) == parts * ops > REGIONS


@pytest.mark.parametrize("servers", [0, 1])
def test_regions_that_close_together_share_a_stop(servers: int) -> None:
    """At the deadline, for a worker that has hardly begun: a datagram tells of 361 of them."""
    workers, regions = 3, 6000
    schedule = [("open", "all", 0, 1.0), ("open", "all", 5_000_000, 0.0)]
    made = finest(0.9, regions, spend="late", schedule=schedule)
    fabric = Fabric(workers, servers=servers, trace=100_000)
    fabric.set_link(0, "up", Link(rate=1e6))
    fabric.all_reduce(0, made, gradients(workers, regions))
    fabric.run()
    must_be_ok(fabric)
    assert fabric.completion(0, 0).delivered.count(0.0) > regions / 2
    stops = sum(each.kind == "stop" for each in fabric.trace())
    assert 0 < stops < 60
