"""Step reports: how buckets join into one, and the lines they become."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from gradwire.core.agreed import Summary
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import Region
from gradwire.core.report import ReportWriter, StepReport, build_report
from gradwire.core.transfer_report import TransferReport


def transfer(
    lengths: list[int], delivered: list[float], **fields: object
) -> tuple[TransferPlan, TransferReport]:
    regions, at = [], 0
    for index, length in enumerate(lengths):
        regions.append(Region(at, length, 0.25, f"r{index}"))
        at += length
    values: dict[str, object] = {
        "op": 0,
        "step": 3,
        "counted": np.ones(1, np.uint8),
        "applied": np.ones(1, np.uint8),
        "withheld_chunks": np.zeros(0, np.uint32),
        "withheld_values": np.zeros(0, np.float32),
        "delivered": tuple(delivered),
        "effective_bounds": (0.2,) * len(lengths),
        "exceeded": (),
        "stats_sum": (0.0,) * 4,
        "stats_max": (0.0,) * 4,
        "push_s": 0.1,
        "pull_s": 0.2,
        "total_s": 0.3,
        "bytes_sent": 1000,
        "packets_sent": 2,
        "retransmissions": 1,
        "rtprop_s": 1e-4,
        "btlbw": 1e8,
    }
    return (
        TransferPlan(at, tuple(regions), spend="anything"),
        TransferReport(**{**values, **fields}),  # type: ignore[arg-type]
    )


def report(*transfers: tuple[TransferPlan, TransferReport]) -> StepReport:
    return build_report(
        step=3,
        rank=1,
        policy="mlt",
        phase="tolerant",
        transfers=transfers,
        comm_s=0.5,
        agreed=Summary(step=3, fresh_norm=math.nan),
        critical_share=0.25,
        verdict="fixed bound",
    )


def test_buckets_join_by_elements() -> None:
    joined = report(
        transfer([100, 300], [1.0, 0.8], push_s=0.4, exceeded=(1,)),
        transfer([600], [0.9], pull_s=0.7, rtprop_s=5e-5, btlbw=2e8),
    )
    assert joined.delivered == pytest.approx((100 + 240 + 540) / 1000)
    assert [region.delivered for region in joined.regions] == [1.0, 0.8, 0.9]
    assert (joined.bytes, joined.packets, joined.retransmissions, joined.buckets) == (2000, 4, 2, 2)
    assert (joined.push_s, joined.pull_s, joined.comm_s) == (0.4, 0.7, 0.5)
    assert (joined.rtprop_s, joined.btlbw) == (5e-5, 2e8)
    assert (joined.bound, joined.effective_bound) == (0.25, 0.2)
    assert joined.exceeded == ("r1",)


def test_a_line_holds_the_keys_that_readers_know() -> None:
    line = json.loads(report(transfer([10], [0.9])).line())
    asked = (
        "step phase bound effective_bound delivered bytes packets retransmissions push_s pull_s "
        "comm_s rtprop_s btlbw critical_share exceeded verdict"
    )
    for field in asked.split():
        assert field in line
    assert line["regions"] == [
        {"name": "r0", "bound": 0.25, "effective_bound": 0.2, "delivered": 0.9}
    ]
    assert line["agreed"]["fresh_norm"] is None  # JSON knows no NaN


def test_a_report_prints_as_three_lines() -> None:
    step = report(transfer([100, 300], [1.0, 0.8], exceeded=(1,)))
    lines = str(step).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) < 120
    for text in ("step 3 of rank 1", "mlt", "85 %", "25 %", "1 region"):
        assert text in lines[0]
    assert "1 again" in lines[1]
    assert "500 ms" in lines[2]
    assert len(repr(step)) < 120
    assert "delivered=0.85" in repr(step)


@pytest.mark.parametrize(("delivered", "text"), [(1.0, "100 %"), (0.99999, "99.9 %"), (0.0, "0 %")])
def test_only_a_whole_step_is_shown_as_whole(delivered: float, text: str) -> None:
    assert f"delivered {text}," in str(report(transfer([100], [delivered])))


def test_rank_0_writes_and_the_others_only_when_named(tmp_path: Path) -> None:
    step = report(transfer([10], [0.9]))
    for rank in range(3):
        for name in ("steps.jsonl", "steps.{rank}.jsonl"):
            writer = ReportWriter(tmp_path / name, rank)
            writer.write(step)
            writer.close()
            writer.write(step)  # dropped
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "steps.0.jsonl",
        "steps.1.jsonl",
        "steps.2.jsonl",
        "steps.jsonl",
    ]
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1


class Closing(StepReport):
    """A report that becomes its line just when the writer is closed, as by another thread."""

    def line(self) -> str:
        self.writer.close()
        return super().line()

    writer: ReportWriter


def test_a_report_that_comes_while_the_writer_is_closed_is_dropped(tmp_path: Path) -> None:
    writer = ReportWriter(tmp_path / "steps.jsonl", 0)
    step = report(transfer([10], [0.9]))
    late = Closing(**{field.name: getattr(step, field.name) for field in fields(step)})
    object.__setattr__(late, "writer", writer)
    writer.write(late)
    assert (tmp_path / "steps.jsonl").read_text() == ""


def test_a_full_disk_does_not_stop_training() -> None:
    writer = ReportWriter("/dev/full", 0)
    with pytest.warns(RuntimeWarning, match="stops writing reports"):
        writer.write(report(transfer([10], [0.9])))
    writer.write(report(transfer([10], [0.9])))
