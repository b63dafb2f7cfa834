"""The contestants of gradwire that move one buffer share what a round is."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from gradwire.core.plan import BY_BOUND, CloseStep, TransferPlan
from gradwire.core.regions import Region
from gradwire.core.transfer_report import TransferReport
from gradwire.transport.communicator import Communicator

ROUND_TIMEOUT = 60.0
"""Seconds that a round may take where no setting says otherwise."""

GRACE = 5.0
"""Seconds for which a round waits longer than the engine."""


def make_plan(
    elements: int, bound: float, spend: str, pull: str, seed: int, encoding: str = "f32"
) -> TransferPlan:
    """Make a plan of one region and bound; spend "anything" closes it eagerly."""
    return TransferPlan(
        elements,
        (Region(0, elements, bound, "all"),),
        spend=spend if bound else "nothing",
        schedule=(CloseStep(fraction=BY_BOUND),) if bound else (CloseStep(),),
        order="shuffled" if bound else "sequential",
        pull=pull,
        pull_bound=bound if pull == "committed" else 0.0,
        encoding=encoding,
        seed=seed,
    )


class Rounds:
    """A contestant's rounds on a communicator are counted here.

    The engine is shared by this process's contestants: its counters are everybody's.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.step = 0
        self._sent = 0
        self._retransmissions = 0

    def run(self, buffer: torch.Tensor, plan: TransferPlan) -> TransferReport:
        allowed = self._communicator.timeout_s + GRACE  # the engine fails earlier, with a reason
        report = self._communicator.all_reduce(buffer, plan, step=self.step).wait(allowed)
        self.step += 1
        self._sent += report.packets_sent
        self._retransmissions += report.retransmissions
        return report

    def record(self, entries: int) -> list[list[tuple[int, str, int | None, int]]]:
        """Keep a timeline of the engine, as `gradwire.transport.transfer.Engine.record` does."""
        engine = self._communicator.engine
        return [] if engine is None else engine.record(entries)

    def report(self) -> dict[str, Any]:
        return {
            "engine": self._communicator.counters(),
            "packets_sent": self._sent,
            "retransmissions": self._retransmissions,
        }

    def close(self) -> None:
        self._communicator.close()


def counters_of(report: TransferReport) -> dict[str, Any]:
    """Return a transfer's counters, those of its round."""
    return {
        "passes": report.passes,
        "delivered": statistics.fmean(report.delivered or [1.0]),
        "layers": {},
        "bytes": report.bytes_sent,
        "packets": report.packets_sent,
        "retransmissions": report.retransmissions,
        "push_s": report.push_s,
    }
