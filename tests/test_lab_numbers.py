"""What the lab makes of its samples: limits, summaries, marks, and words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gradwire_lab.contest.race import Round
from gradwire_lab.contest.rivals import goodput
from gradwire_lab.report.compare import compare
from gradwire_lab.report.markdown import as_markdown
from gradwire_lab.report.words import mark_rows, rate, reached, rows, seconds, verdict
from gradwire_lab.run.checks import fastest
from gradwire_lab.run.limits import limit, probe_cap, probe_passes, push_ideal
from gradwire_lab.run.marks import Measured, judge
from gradwire_lab.run.model import (
    CellRun,
    Judgement,
    MarkedCell,
    Results,
    Summary,
    Track,
    as_json,
)
from gradwire_lab.run.shares import carried, crossing_flows, route
from gradwire_lab.run.summary import interval, summarize, times
from gradwire_lab.run.tail import next_length
from gradwire_lab.run.training import segments
from gradwire_lab.run.transfers import track_of
from gradwire_lab.run.wires import lossy, wires_of
from gradwire_lab.scenario import Cell, Contestant, Mark, Scenario, Work
from gradwire_lab.scenario.network import Bursts, Loss, Topology
from gradwire_lab.scenario.reader import build
from gradwire_lab.scenario.schema import Tail
from gradwire_lab.scenario.work import Model, turn_length
from lab_results import cell_result, results, summary

OURS = Contestant("ours", "gradwire", bound=0.408)
THEIRS = Contestant("theirs", "gradwire", bound=0.008)
TCP = Contestant("tcp", "tcp")
MB4 = 4_000_000


def scenario(workers: int = 1, loss: Loss | None = None, rtt_s: float = 0.0) -> Scenario:
    return Scenario(
        name="test",
        title="test",
        work=Work("push", bytes=MB4),
        topology=Topology(workers=workers, servers=1, rtt_s=rtt_s),
        loss=loss or Loss(),
        contestants=(OURS, THEIRS, TCP),
    )


def test_times_and_rates_are_written_without_exponents() -> None:
    times_s = (0.9996, 0.9994, 0.0009996, 999.6, 0.0345)
    assert [seconds(value) for value in times_s] == ["1 s", "999 ms", "1 ms", "1000 s", "34.5 ms"]
    assert seconds(-0.0345) == "-34.5 ms"  # of an interval
    assert [rate(value) for value in (12345e6, 150e6)] == ["12345 Mbit/s", "150 Mbit/s"]


def test_a_value_may_be_infinite_though_its_interval_is_not() -> None:
    """As JSON holds it; see `gradwire.core.report.finite`."""
    cell = MarkedCell("a", difference=False, complete=True, interval=[0.5, 2.0])
    assert reached(cell) == "–"
    assert reached(replace(cell, value=1.0)) == "1 (0.5 … 2)"


def test_runs_are_compared_to_the_first_run_of_their_scenario() -> None:
    def document(scenario: str, **medians: float) -> Results:
        entries = [summary(name=name, median_s=median) for name, median in medians.items()]
        return results(scenario=scenario, cells=[cell_result("one", entries)])

    found = compare(
        {
            "a": document("s", tcp=2.0),
            "b": document("s", tcp=1.0, ours=1.0),
            "c": document("s", tcp=3.0, ours=0.5),
            "d": document("t", ours=4.0),
        }
    )
    ratios = {(row["run"], row["contestant"]): row["× the first run"] for row in found}
    assert ratios == {
        ("a", "tcp"): "1.00",
        ("b", "tcp"): "0.50",
        ("c", "tcp"): "1.50",
        ("b", "ours"): "–",  # the first run had none
        ("c", "ours"): "–",
        ("d", "ours"): "1.00",
    }


def test_the_limit_is_bytes_over_what_gets_through() -> None:
    # The table of the published code's measurements: 1 Gbit/s, 4 MB, p = 0.408.
    assert limit(scenario(), MB4, 0.408) == pytest.approx(0.019, abs=5e-4)
    assert limit(scenario(loss=Loss(0.6)), MB4, 0.408) == pytest.approx(0.047, abs=5e-4)
    assert limit(scenario(loss=Loss(0.9)), MB4, 0.408) == pytest.approx(0.189, abs=5e-4)


def test_where_the_loss_is_decides_which_port_is_the_limit() -> None:
    on_links = limit(scenario(3, Loss(0.9)), MB4, 0.0)
    at_server = limit(scenario(3, Loss(0.9, at="server")), MB4, 0.0)
    assert on_links == pytest.approx(0.32)
    assert at_server == pytest.approx(3 * 0.32)
    # 3 workers at 50 %: their links need twice the time, the server's port three times.
    assert limit(scenario(3, Loss(0.5)), MB4, 0.0) == pytest.approx(3 * 0.032)
    uneven = Loss(per_worker=(0.0, 0.9, 0.0))
    assert limit(scenario(3, uneven), MB4, 0.0) == pytest.approx(0.32)


def spread(kind: str, loss: Loss | None = None, **topology: Any) -> Scenario:
    contestant = TCP if kind == "push" else Contestant("gloo", "gloo")
    if kind == "served":
        kind, contestant = "all_reduce", Contestant("ours", "gradwire")
    return Scenario(
        name="test",
        title="test",
        work=Work(kind, bytes=MB4),
        topology=Topology(**topology),
        loss=loss or Loss(),
        contestants=(contestant,),
    )


def test_an_uplink_is_a_limit_where_it_carries_less_than_its_leaf() -> None:
    def reduce(**topology: Any) -> float:
        return limit(spread("all_reduce", workers=8, **topology), MB4, 0.0)

    ports = 2 * 7 / 8 * 0.032
    assert reduce() == reduce(leaves=2) == reduce(leaves=2, uplink_rate=1e9) == ports
    # However it is done, two leaves tell each other 4 MB each.
    assert reduce(leaves=2, uplink_rate=100e6) == pytest.approx(0.32)
    assert reduce(leaves=4, uplink_rate=100e6) == pytest.approx(1.5 * 0.32)

    def push(loss: Loss | None = None, **topology: Any) -> float:
        return limit(spread("push", loss, workers=5, servers=1, **topology), MB4, 0.5)

    # Workers 0, 1, 2 are on the first leaf, 3, 4 and the server on the second.
    assert push(leaves=2) == push() == pytest.approx(0.5 * 5 * 0.032)
    assert push(leaves=2, uplink_rate=100e6) == pytest.approx(0.5 * 3 * 0.32)
    lossy = Loss(0.5)  # a worker's losses come before its leaf's uplink, a server's behind it
    assert push(lossy, leaves=2, uplink_rate=100e6) == pytest.approx(0.5 * 3 * 0.32)
    at_server = Loss(0.5, at="server")
    assert push(at_server, leaves=2, uplink_rate=100e6) == pytest.approx(3 * 0.32)
    ideal = push_ideal(spread("push", workers=5, servers=1, leaves=2, uplink_rate=100e6))
    assert ideal == pytest.approx(3 * 0.32 * 1514 / 1432)


def test_servers_help_an_all_reduce_to_a_gradient_each_way_at_best() -> None:
    def reduce(loss: Loss | None = None, **topology: Any) -> float:
        return limit(spread("served", loss, workers=4, **topology), MB4, 0.0)

    assert reduce() == pytest.approx(1.5 * 0.032)
    # Jiang et al. (OSDI 2020), section 4.1: between the ring's and one gradient each way.
    assert reduce(servers=1) == pytest.approx(24 / 18 * 0.032)
    assert reduce(servers=2) == pytest.approx(24 / 20 * 0.032)
    assert reduce(servers=4) == reduce(servers=9) == pytest.approx(0.032)
    assert reduce(Loss(0.5), servers=4) == pytest.approx(0.064)
    # Where links lose, the division leans to those that do not: all over the two servers, twice as
    # much as a ring's 3 for each worker's link; over one, nearly so.
    assert reduce(Loss(0.5), servers=2) == pytest.approx(2.0 * 0.032)
    assert reduce(Loss(0.5), servers=1) == pytest.approx(2.4 * 0.032)
    # Whoever shuns lossy servers has the ring's 1.5, and some of them may still help.
    assert reduce(Loss(0.5, at="server"), servers=4) == pytest.approx(1.2 * 0.032)
    assert reduce(Loss(0.5, at="everywhere"), servers=1) == pytest.approx(2 * 24 / 18 * 0.032)
    # Workers 0 to 3 share the first leaf, the servers are on the second: nothing must cross.
    assert reduce(servers=4, leaves=2, uplink_rate=1e6) == pytest.approx(0.032)
    assert reduce(servers=2, leaves=2, uplink_rate=100e6) == pytest.approx(0.32)
    at_server = Loss(0.5, at="server")
    assert reduce(at_server, servers=2, leaves=2, uplink_rate=100e6) == pytest.approx(0.32)
    # Three leaves with workers, one of servers alone, which sums for them.
    three = {"servers": 1, "leaves": 5, "uplink_rate": 100e6}
    assert reduce(**three) == pytest.approx(24 / 18 * 0.32)


def test_a_calibration_wants_what_ports_and_uplinks_let_through() -> None:
    one = Topology(workers=4)
    assert crossing_flows(one) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert carried(one, crossing_flows(one)) == pytest.approx(4e9)
    two = Topology(workers=4, leaves=2, uplink_rate=1e9)
    assert crossing_flows(two) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert route(two, 1, 3) == [
        ("port", "up", 1),
        ("port", "down", 3),
        ("uplink", "up", 0),
        ("uplink", "down", 1),
    ]
    assert route(two, 0, 1) == [("port", "up", 0), ("port", "down", 1)]
    assert carried(two, crossing_flows(two)) == pytest.approx(2e9)
    # Three hosts on leaves of two and one: host 1's flow stays at home and has its port alone.
    odd = Topology(workers=3, leaves=2, uplink_rate=400e6)
    assert crossing_flows(odd) == [(0, 2), (1, 0), (2, 1)]
    assert carried(odd, crossing_flows(odd)) == pytest.approx(400e6 + 1e9 + 400e6)
    # What one flow cannot use, another gets.
    assert carried(two, [(0, 2), (1, 2), (0, 1)]) == pytest.approx(500e6 * 3)


def test_a_calibration_is_of_the_machine_and_not_of_short_queues() -> None:
    def ports(**topology: Any) -> Topology:
        return fastest(replace(scenario(), topology=Topology(workers=3, servers=1, **topology)))

    assert ports(queue=65_536) == ports(queue=262_144)
    assert ports(queue=1_048_576).ports.queue == 1_048_576
    leaves = ports(queue=65_536, leaves=2, uplink_queue=65_536)
    assert leaves.spread is not None
    assert leaves.ports.queue == leaves.spread.uplink.queue == 262_144


def test_what_is_left_when_a_rounds_loss_ends_goes_without() -> None:
    """1.6 s at 90 % loss: after 0.2 s an eighth is there, and the rest takes 7/8 of 0.16 s."""
    ever = limit(scenario(loss=Loss(0.9, when="rounds", lasts_s=20.0)), 20_000_000, 0.0)
    assert ever == pytest.approx(1.6)
    ends = limit(scenario(loss=Loss(0.9, when="rounds", lasts_s=0.2)), 20_000_000, 0.0)
    assert ends == pytest.approx(0.2 + 7 / 8 * 0.16)
    always = limit(scenario(loss=Loss(0.9, when="always", lasts_s=0.2)), 20_000_000, 0.0)
    assert always == pytest.approx(ever)


def test_of_ports_that_differ_each_is_a_limit() -> None:
    def ours(kind: str, loss: Loss | None = None, **topology: Any) -> float:
        return limit(spread(kind, loss, **topology), MB4, 0.0)

    even = ours("all_reduce", workers=4, rates=(1e9, 1e9, 1e9, 1e9))
    assert even == pytest.approx(ours("all_reduce", workers=4))
    # One at a tenth: its own gradient takes 320 ms, all of them over 3.1 Gbit/s 62 ms.
    slow = (1e9, 1e9, 1e9, 1e8)
    assert ours("all_reduce", workers=4, rates=slow) == pytest.approx(0.32)
    assert ours("all_reduce", Loss(0.5), workers=4, rates=slow) == pytest.approx(0.64)
    pushed = {"workers": 2, "servers": 1}
    assert ours("push", **pushed, rates=(1e9, 1e9, 5e8)) == pytest.approx(0.128)
    assert ours("push", **pushed, rates=(1e8, 1e9, 1e9)) == pytest.approx(0.32)
    behind = Loss(0.5, at="server")
    assert ours("push", behind, **pushed, rates=(1e9, 1e9, 5e8)) == pytest.approx(0.256)
    uneven = Topology(workers=3, rates=(1e9, 1e9, 2e8), queues=(262_144, 65_536, 262_144))
    assert [(port.rate, port.queue) for port in map(uneven.port, range(3))] == [
        (10**9, 262_144),
        (10**9, 65_536),
        (2 * 10**8, 262_144),
    ]
    assert uneven.ports.rate == 10**9
    assert set(uneven.odd_ports) == {1, 2}
    # Host 2's port is where two of the three flows end up.
    assert carried(uneven, crossing_flows(uneven)) == pytest.approx(1e9 + 2e8 + 2e8)
    assert "1000 Mbit/s, 64 KiB; 200 Mbit/s, 256 KiB" in uneven.words
    leaves = Topology(workers=4, leaves=2, rates=(1e9, 1e9, 1e8, 1e8)).spread
    assert leaves is not None
    assert leaves.uplink.rate == 2 * 10**9


def test_losses_in_runs_are_the_wires() -> None:
    ours = scenario(2, Loss(0.1, run=8.0))
    wires = wires_of(ours)
    assert sorted(wires) == [0, 1, 2]
    losing = lossy(wires[0], ours, 0.1)
    assert (losing.loss, losing.loss_burst) == (0.1, 8.0)
    cut = lossy(wires[0], ours, 1.0)
    assert (cut.loss, cut.loss_burst) == (1.0, 0.0)


def test_what_a_prober_leaves_to_win() -> None:
    assert probe_passes(0.9, 0.008) == 46
    assert probe_passes(0.9, 0.408) == 9
    assert probe_passes(0.001, 0.008) == 1

    def cap(workers: int, loss: Loss, rtt_s: float) -> float:
        return probe_cap(scenario(workers, loss, rtt_s), MB4, 0.408, 0.008)

    # "about 3.8 and 8.5 on the workers' links, 2.4 and 4.6 behind one server port"
    assert cap(3, Loss(0.9), 0.010) == pytest.approx(3.8, abs=0.1)
    assert cap(3, Loss(0.9), 0.040) == pytest.approx(8.5, abs=0.2)
    assert cap(3, Loss(0.9, at="server"), 0.010) == pytest.approx(2.4, abs=0.1)
    assert cap(3, Loss(0.9, at="server"), 0.040) == pytest.approx(4.6, abs=0.2)


def test_bounds_come_from_the_contestant_or_its_policy() -> None:
    assert OURS.loosest_bound("push") == 0.408
    assert Contestant("late", "gradwire", enough=0.8).loosest_bound("push") == pytest.approx(0.2)
    assert TCP.loosest_bound("push") == 0.0
    mlt = Contestant("mlt", "gradwire", policy="mlt", options={"p": 0.3})
    assert mlt.loosest_bound("training") == 0.3
    assert Contestant("dblp", "gradwire", policy="dblp").loosest_bound("training") == 0.408
    assert Contestant("ltp", "gradwire", policy="ltp").loosest_bound("training") == 0.0


def test_percentiles_need_samples() -> None:
    few, more, many = (times([0.001 * n for n in range(count)]) for count in (299, 300, 3000))
    assert few.p99_s is None
    assert few.p95_s is not None
    assert more.p99_s == pytest.approx(0.296)
    assert more.p999_s is None
    assert many.p999_s == pytest.approx(2.996)
    assert times([]).median_s is None


def test_an_interval_needs_two_seeds() -> None:
    assert interval([1.0]) is None
    low, high = interval([1.0, 2.0, 3.0]) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - 2.0 == pytest.approx(2.920 / 3**0.5)  # Student's t, 2 degrees of freedom


def test_a_summary_joins_the_seeds() -> None:
    def track(*seconds: float) -> Track:
        return Track(
            seconds=list(seconds),
            starts=[float(n) for n in range(len(seconds))],
            spans=[(0.0, 1.0)],
            job_s=sum(seconds),
            delivered=[[0.5, 1.0]] * len(seconds),
            layers={"front": 0.75},
            bytes=[100] * len(seconds),
            packets=[10] * len(seconds),
            retransmissions=[1] * len(seconds),
            push_s=[each / 2 for each in seconds],
            critical=[each < 0.3 for each in seconds],
        )

    runs = {
        0: CellRun(0.0, {"ours": track(0.1, 0.2, 0.3)}, rivals=[(0.0, 0), (0.5, 50), (1.5, 100)]),
        1: CellRun(0.0, {"ours": track(0.4, 0.4, 0.4)}),
    }
    found = summarize(OURS, scenario(2), runs)
    assert found is not None
    assert found.samples == 6
    assert found.median_s == 0.3
    assert found.by_seed["0"].median_s == 0.2
    assert found.intervals["median_s"] == interval([0.2, 0.4])
    assert found.intervals["job_s"] == interval([0.6, 1.2])
    assert found.intervals["p99_s"] is None
    assert found.intervals["rival_goodput_bps"] is None  # of one seed only
    assert found.throughput_bps == pytest.approx(2 * MB4 * 8 * 6 / 1.8)
    assert found.delivered == 0.75
    assert found.delivered_by_worker == [0.5, 1.0]
    assert found.delivered_by_layer == {"front": 0.75}
    assert found.retransmitted == pytest.approx(0.1)
    assert found.push.median_s == 0.15
    assert found.critical_share == pytest.approx(2 / 6)
    assert found.rival_goodput_bps == pytest.approx(8 * 100)
    assert summarize(TCP, scenario(2), runs) is None


def test_computation_between_rounds_is_part_of_the_job_and_of_nothing_else() -> None:
    rounds = [Round(0.0, (0.1, 0.2)), Round(1.0, (0.3, 0.1))]
    working = replace(scenario(), work=Work("push", bytes=MB4, compute_s=0.25))
    run = CellRun(0.0, {"ours": track_of(rounds, [], 0.25)})
    found = summarize(OURS, working, {0: run})
    assert found is not None
    assert found.job_s == pytest.approx(0.2 + 0.3 + 2 * 0.25)
    assert found.comm_share == pytest.approx(0.5)
    assert found.throughput_bps == pytest.approx(MB4 * 8 * 2 / 0.5)


@pytest.mark.parametrize(
    ("losses", "seconds"),
    [
        ([(10, 4.0, 3.0), (20, 8.0, 2.0)], 6.0),
        ([(10, 4.0, 2.5)], 4.0),  # when exactly is not known: at the first evaluation
        ([(10, 4.0, math.nan), (20, 8.0, 2.0)], 8.0),
        ([(10, 4.0, 3.0)], None),
    ],
)
def test_time_to_a_loss_lies_between_evaluations(
    losses: list[tuple[int, float, float]], seconds: float | None
) -> None:
    training = Scenario(
        name="test",
        title="test",
        work=Work("training"),
        topology=Topology(workers=2),
        model=Model(target_loss=2.5),
        contestants=(Contestant("ours", "gradwire"),),
    )
    run = CellRun(0.0, {"ours": Track(seconds=[1.0], job_s=1.0, losses=losses)})
    run.facts["parameters"] = 1000
    found = summarize(training.contestants[0], training, {0: run})
    assert found is not None
    assert found.time_to_loss_s == seconds


def test_the_loss_to_time_may_be_what_another_ended_with_in_the_same_seed() -> None:
    training = Scenario(
        name="test",
        title="test",
        work=Work("training"),
        topology=Topology(workers=2),
        model=Model(target_of="tcp", target_within=0.5),
        contestants=(Contestant("ours", "gradwire"), Contestant("tcp", "gloo")),
    )
    curves = {0: ((4.0, 3.0), (8.0, 2.0)), 1: ((4.0, 6.0), (8.0, 4.0))}
    runs = {}
    for seed, curve in curves.items():
        losses = [(step, now, loss) for step, (now, loss) in enumerate(curve)]
        quicker = [(step, now / 2, loss) for step, now, loss in losses]
        runs[seed] = CellRun(
            0.0,
            {
                "ours": Track(seconds=[1.0], job_s=1.0, losses=quicker),
                "tcp": Track(seconds=[1.0], job_s=1.0, losses=losses),
            },
            facts={"parameters": 1000},
        )
    ours, theirs = (summarize(each, training, runs) for each in training.contestants)
    assert theirs is not None
    assert ours is not None
    assert theirs.by_seed["0"].time_to_loss_s == 6.0  # to 2.5 of 3 and 2
    assert theirs.by_seed["1"].time_to_loss_s == 7.0  # to 4.5 of 6 and 4
    assert (theirs.time_to_loss_s, ours.time_to_loss_s) == (6.5, 3.25)
    del runs[1].tracks["tcp"]
    found = summarize(training.contestants[0], training, runs)
    assert found is not None
    assert found.time_to_loss_s is None


def test_who_never_comes_to_a_loss_takes_for_ever() -> None:
    def end(seconds: float | None, loss: float | None = 2.0) -> Summary:
        return summary(time_to_loss_s=seconds, final_loss=loss)

    mark = Mark("t", "ours", quantity="time_to_loss", over=("theirs", "tcp"), at_most=1.05)

    def judged(ours: Any, theirs: Any, tcp: Any) -> Judgement:
        return judge(mark, [measured("a", {"ours": ours, "theirs": theirs, "tcp": tcp})])

    # Whoever has not come there is none of those that are as good: the best of the others counts.
    assert judged(end(5.0), end(None), end(10.0)).value == 0.5
    assert judged(end(5.0), end(None), end(None)).met is True
    missed = judged(end(None), end(None), end(10.0))
    assert (missed.met, missed.value) == (False, math.inf)
    assert judged(end(None), end(None), end(None)).met is None
    assert judged(end(5.0), end(None, None), end(10.0)).met is None  # not measured at all


def test_rivals_that_starve_are_a_mark_missed() -> None:
    mark = Mark("t", "ours", quantity="rival_goodput", over=("tcp",), at_least=0.8)
    cells = [
        measured(
            "a",
            {"ours": summary(rival_goodput_bps=0.0), "tcp": summary(rival_goodput_bps=5e8)},
        )
    ]
    assert judge(mark, cells).met is False


def test_goodput_is_what_fell_into_the_spans() -> None:
    read = [(0.0, 7), (1.0, 100), (2.0, 300)]
    assert goodput(read, [(0.0, 1.0)]) == 100
    assert goodput(read, [(0.5, 1.5)]) == pytest.approx(200)
    assert goodput(read, [(5.0, 6.0)]) is None
    assert goodput([], [(0.0, 1.0)]) is None


def measured(label: str, entries: Mapping[str, Summary], rtt_s: float = 0.0) -> Measured:
    each = scenario(1, Loss(0.9), rtt_s)
    return Measured(Cell({"axis": label}, each), entries)


def test_a_mark_is_judged_by_its_worst_cell() -> None:
    mark = Mark("t", "ours", over=("tcp",), at_most=0.5)
    cells = [
        measured("a", {"ours": summary(median_s=1.0), "tcp": summary(median_s=4.0)}),
        measured("b", {"ours": summary(median_s=3.0), "tcp": summary(median_s=4.0)}),
    ]
    found = judge(mark, cells)
    assert found.met is False
    assert found.value == 0.75
    assert found.missed_by == pytest.approx(0.5)
    assert [row.met for row in found.cells] == [True, False]
    assert judge(mark, cells[:1]).met is True
    assert judge(mark, cells[:1]).missed_by == 0


def test_a_mark_of_what_was_not_measured_is_not_met() -> None:
    mark = Mark("t", "ours", over=("theirs",), inverse=True, share_of_cap=0.85)
    assert judge(mark, [measured("a", {"ours": summary(median_s=1.0)})]).met is None
    assert judge(mark, []).met is None
    tail = Mark("t", "ours", quantity="time_p99", at_most=1.0)
    assert judge(tail, [measured("a", {"ours": summary(median_s=1.0)})]).met is None
    # Missed in one cell is missed, however many cells are open.
    plain = Mark("t", "ours", at_most=1.0)
    cells = [measured("a", {"ours": summary(median_s=2.0)}), measured("b", {})]
    assert judge(plain, cells).met is False
    cells[0] = measured("a", {"ours": summary(median_s=0.5)})
    assert judge(plain, cells).met is None


def test_a_mark_over_the_limit_forgives_round_trips() -> None:
    mark = Mark("t", "ours", over=("limit",), at_most=1.3, plus_rtts=3)
    entry = summary(median_s=0.155, limit_s=0.1)
    assert judge(mark, [measured("a", {"ours": entry})]).met is False
    assert judge(mark, [measured("a", {"ours": entry}, rtt_s=0.01)]).value == pytest.approx(1.25)


def test_a_mark_of_the_cap_knows_the_formulas() -> None:
    mark = Mark("t", "ours", over=("theirs",), inverse=True, share_of_cap=0.85)
    entries = {
        "ours": summary(median_s=0.25, limit_s=0.1, bound=0.408),
        "theirs": summary(median_s=1.0, limit_s=0.1, bound=0.008),
    }
    row = judge(mark, [measured("a", entries, rtt_s=0.010)]).cells[0]
    assert row.cap == pytest.approx(3.8, abs=0.1)
    assert row.value == 4.0
    assert row.met is True


def test_the_best_and_the_worst_of_several() -> None:
    entries = {
        "ours": summary(throughput_bps=6.0),
        "theirs": summary(throughput_bps=2.0),
        "tcp": summary(throughput_bps=3.0),
    }
    base = {"text": "t", "contestant": "ours", "quantity": "throughput", "at_least": 2.5}
    over = ("theirs", "tcp")
    cells = [measured("a", entries)]
    assert judge(Mark(**base, over=over), cells).value == 2.0
    assert judge(Mark(**base, over=over, pick="worst"), cells).value == 3.0


def test_a_mark_may_compare_cells() -> None:
    mark = Mark(
        "t",
        "ours",
        quantity="job_time",
        over_cell={"axis": "a"},
        where={"axis": "b"},
        at_most=1.01,
    )
    cells = [
        measured("a", {"ours": summary(job_s=10.0)}),
        measured("b", {"ours": summary(job_s=10.05)}),
    ]
    found = judge(mark, cells)
    assert found.value == pytest.approx(1.005)
    assert found.met is True
    assert len(found.cells) == 1


def finals(*losses: float) -> Summary:
    by_seed = {str(seed): summary(final_loss=loss) for seed, loss in enumerate(losses)}
    return summary(by_seed=by_seed)


def test_a_mark_of_a_difference_pairs_the_seeds() -> None:
    mark = Mark("t", "ours", quantity="final_loss", over=("tcp",), difference=True, within=0.01)

    def judged(ours: list[float], tcp: list[float]) -> Judgement:
        return judge(mark, [measured("a", {"ours": finals(*ours), "tcp": finals(*tcp)})])

    # The seeds differ by a lot, the pairs by little: 0.002 ± 2.920 · 0.001 / √3.
    found = judged([1.003, 2.002, 3.001], [1.0, 2.0, 3.0])
    assert found.value == pytest.approx(0.002)
    assert found.interval == pytest.approx([0.002 - 0.00169, 0.002 + 0.00169], abs=1e-5)
    assert found.met is True
    # A mean within it is not enough, and better is as far off as worse.
    assert judged([1.012, 2.0, 2.991], [1.0, 2.0, 3.0]).met is False
    missed = judged([0.98, 1.98, 2.98], [1.0, 2.0, 3.0])
    assert missed.met is False
    assert missed.missed_by == pytest.approx(1.0)
    # Pairs are of one seed; one pair tells nothing; who lost its way is not near.
    assert judged([1.0], [1.0]).met is None
    assert judge(mark, [measured("a", {"ours": finals(1.0, 2.0)})]).met is None
    lost = judged([1.0, math.nan], [1.0, 2.0])
    assert (lost.met, lost.missed_by) == (False, math.inf)

    written = [build(Judgement, as_json(each), "t") for each in (found, missed, lost)]
    assert [row[1:] for row in mark_rows([*written, judged([1.0], [1.0])])] == [
        ["+0.002 (+0.000314 … +0.00369)", "± 0.01", "every cell; the worst", "met"],
        ["-0.02 (-0.02 … -0.02)", "± 0.01", "every cell; the worst", "missed by 100.0 %"],
        ["–", "± 0.01", "every cell; the worst", "missed"],
        ["–", "–", "every cell; the worst", "not measured"],
    ]


def job_times(*seconds: float) -> Summary:
    by_seed = {str(seed): summary(job_s=each) for seed, each in enumerate(seconds)}
    return summary(job_s=statistics.fmean(seconds), by_seed=by_seed)


def test_a_quotient_has_the_interval_of_its_seeds() -> None:
    mark = Mark("t", "ours", quantity="job_time", over=("tcp",), inverse=True, at_least=1.2)
    cells = [
        # The seeds differ by a lot, their quotients by little.
        measured("a", {"ours": job_times(1.0, 2.0, 4.0), "tcp": job_times(1.3, 2.8, 6.0)}),
        measured("b", {"ours": job_times(1.0, 1.0, 1.0), "tcp": job_times(1.6, 1.6, 1.5)}),
    ]
    found = judge(mark, cells)
    assert found.cells[0].by_seed == pytest.approx({"0": 1.3, "1": 1.4, "2": 1.5})
    assert found.interval == pytest.approx(interval([1.3, 1.4, 1.5]))
    assert found.value == pytest.approx(10.1 / 7.0)  # of the seeds together, which decides
    mean = judge(replace(mark, scope="mean"), cells)
    assert mean.interval == pytest.approx(interval([1.45, 1.5, 1.5]))
    # A seed that one of the two lacks has no quotient; one seed has no interval.
    cells[0] = measured("a", {"ours": job_times(1.0, 2.0), "tcp": job_times(1.3)})
    assert judge(mark, cells[:1]).interval is None
    assert judge(mark, cells[:1]).cells[0].by_seed == pytest.approx({"0": 1.3})
    assert judge(replace(mark, scope="mean"), cells).interval is None
    (row,) = mark_rows([found])
    assert row[1] == "1.44 (1.23 … 1.57)"


def test_a_training_that_lost_its_way_is_told_not_hidden() -> None:
    mark = Mark("t", "ours", quantity="final_loss", at_most=2.0)
    cells = [
        measured("a", {"ours": summary(final_loss=1.0)}),
        measured("b", {"ours": summary(final_loss=math.nan)}),
        measured("c", {"ours": summary(final_loss=1.5)}),
    ]
    assert judge(mark, cells).met is False
    assert interval([1.0, math.nan]) is None


def test_rivals_and_final_losses_stand_in_the_tables() -> None:
    entry = summary(
        name="ours",
        samples=3,
        median_s=0.1,
        intervals={"median_s": [0.09, 0.11]},
        max_s=0.2,
        limit_s=0.05,
        over_limit=2.0,
        steps_per_s=4.0,
        rival_goodput_bps=5e7,
        final_loss=2.25,
    )
    cell = cell_result("200 Mbit/s, 10 streams", [entry])
    columns, (found,) = rows(cell)
    shown = dict(zip(columns, found, strict=True))
    assert (shown["rivals"], shown["final loss"]) == ("50 Mbit/s", "2.25")
    assert "90 ms … 110 ms" in found
    text = as_markdown(results(cells=[cell]))
    assert "| cell | contestant | samples | median | limit | throughput | rivals | final" in text
    assert "| 50 ms | 4 steps/s | 50 Mbit/s | 2.25 |" in text


def test_a_mark_is_open_where_the_tail_was_another() -> None:
    mark = Mark("t", "ours", quantity="job_time", over_cell={"axis": "a"}, at_most=1.01)
    mark = replace(mark, where={"axis": "b"})

    def cell(label: str, wanted: float, p99_s: float) -> Measured:
        entries = {"ours": summary(job_s=10.0), "tcp": summary(median_s=0.1, p99_s=p99_s)}
        one = measured(label, entries)
        burst = Bursts(rate=4e9, on_s=0.05, period_s=3.0)
        tuned = replace(one.cell.scenario, bursts=(burst,), tail=Tail(wanted, "tcp"))
        return Measured(Cell({"axis": label}, tuned), entries)

    calm, wild, tame = cell("a", 1.5, 0.15), cell("b", 3.0, 0.31), cell("b", 3.0, 0.15)
    assert judge(mark, [calm, wild]).met is True
    found = judge(mark, [calm, tame])
    assert found.met is None
    assert found.value is None
    assert verdict(found) == "open: b: the tail was 1.50, wanted 3"
    # the cell that it is compared with counts as much
    assert judge(mark, [cell("a", 1.5, 0.53), wild]).met is None


def test_turns_are_cut_where_a_step_loses() -> None:
    assert list(segments(0, 5, (2,))) == [(2, False), (1, True), (2, False)]
    assert list(segments(10, 3, (10, 12))) == [(1, True), (1, False), (1, True)]
    assert list(segments(0, 4, (9,))) == [(4, False)]


def test_no_turn_is_too_short_to_be_timed() -> None:
    work = Work("training", block=3, warm_up=1)
    lengths, left = [], 9
    while left:
        lengths.append(turn_length(work, left))
        left -= lengths[-1]
    assert lengths == [4, 5]


def test_a_tail_is_found_by_doubling_and_halving() -> None:
    low, high, length = next_length(0.0, math.inf, 0.125, too_short=True)
    assert (low, high, length) == (0.125, math.inf, 0.25)
    low, high, length = next_length(low, high, length, too_short=False)
    assert (low, high, length) == (0.125, 0.25, 0.1875)
    assert next_length(low, high, length, too_short=True) == (0.1875, 0.25, 0.21875)
