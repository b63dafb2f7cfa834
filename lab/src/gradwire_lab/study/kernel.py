"""Cells over a kernel network, with real processes and clocks, check the virtual ones."""

from __future__ import annotations

import time
from dataclasses import asdict
from statistics import fmean
from typing import Any

from gradwire_lab.contest.job import Job
from gradwire_lab.contest.ranks import Message
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import NETWORK_A
from gradwire_lab.study.arms import ARMS
from gradwire_lab.study.cell import Cell, Outcome
from gradwire_lab.study.lesson import WORKERS
from gradwire_lab.study.scenarios import SCENARIOS

__all__ = ["train_on_kernel"]

TIMEOUT_S = 900.0


def train_on_kernel(cell: Cell) -> Outcome:
    """Train a cell by four processes of DDP on four hosts of network A.

    A scenario's loss is injected where a process receives: each packet passes one such place, as
    it passes one way up in virtual time. Scenarios whose loss comes and goes or is one worker's
    have no such place and no rows here (`study`).
    """
    started = time.perf_counter()
    scenario, arm = SCENARIOS[cell.scenario], ARMS[cell.arm]
    assert scenario.when == "always"
    assert not scenario.uneven
    assert not arm.calibrated
    config: dict[str, Any] = {
        "cell": asdict(cell),
        "drop_rate": scenario.losses[0] if scenario.losses else 0.0,
        "drop_burst": scenario.run,
    }
    worker, parts = "gradwire_lab.study.kernel_rank", []
    for part in range(cell.parts):
        with (
            Network(WORKERS, NETWORK_A) as net,
            Job(net, worker, TIMEOUT_S, part=part, **config) as job,
        ):
            answers = job.ask("train")
        if len({answer["fingerprint"] for answer in answers}) != 1:
            raise AssertionError(f"{cell.arm}: the replicas differ")
        parts.append(answers)
    scores = tuple(float(answers[0]["score"]) for answers in parts)
    delivered, comm_s = (_by_round(parts, key) for key in ("delivered", "comm_s"))
    return Outcome(
        score=sum(scores) / len(scores),
        scores=scores,
        delivered=fmean(map(fmean, delivered)),
        critical_share=sum(answers[0]["critical_share"] for answers in parts) / len(parts),
        lossy_rounds=sum(min(shares) < 1.0 for shares in delivered),
        guarded=sum(answers[0]["guarded"] for answers in parts),
        comm_s=fmean(map(max, comm_s)),
        error="",
        seconds=time.perf_counter() - started,
    )


def _by_round(parts: list[list[Message]], key: str) -> list[tuple[float, ...]]:
    """Return the workers' values of each round, of all parts."""
    return [
        values for answers in parts for values in zip(*(each[key] for each in answers), strict=True)
    ]
