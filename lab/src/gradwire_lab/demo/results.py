"""The demo's JSON is computed from what its ranks measured."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradwire.core.report import finite
from gradwire_lab.contest.measure import all_reduce_payload, environment, header_ideal, percentile
from gradwire_lab.demo.course import Outcome
from gradwire_lab.demo.scenario import TAIL_STEPS
from gradwire_lab.demo.words import against_gloo, headline, notes
from gradwire_lab.training.block import Block, Step, join
from gradwire_lab.training.recipe import Entry

FORMAT = 1
_FLOAT_BYTES = 4

HALF = 0.5
"""Share of float32's bytes from which on a step's gradients count as compressed."""


def summarize(steps: Sequence[Step], tail_steps: int = TAIL_STEPS) -> dict[str, Any]:
    """Summarise a contestant's steps; times are in seconds, and of timed steps only."""
    timed = [step for step in steps if step.timed]
    comm = [step.comm for step in timed]
    elapsed = sum(step.took for step in timed)
    phases = [step.critical for step in steps if step.critical is not None]
    encoded = [step.encoded for step in timed if step.encoded is not None]
    return {
        "steps": len(steps),
        "timed_steps": len(timed),
        "steps_per_s": len(timed) / elapsed,
        "comm_median_s": percentile(comm, 50),
        "comm_p90_s": percentile(comm, 90),
        "comm_p99_s": percentile(comm, 99) if len(comm) >= tail_steps else None,
        "comm_max_s": max(comm),
        "comm_share": sum(comm) / elapsed,
        "delivered": statistics.fmean(step.delivered for step in steps),
        "delivered_min": min(step.delivered for step in steps),
        "critical_share": sum(phases) / len(phases) if phases else None,
        "encoded_share": statistics.fmean(encoded) if encoded else None,
        "compressed_share": (
            sum(share <= HALF for share in encoded) / len(encoded) if encoded else None
        ),
    }


def document(outcome: Outcome, command: str, far: Outcome | None = None) -> dict[str, Any]:
    """Put everything that is known about a demo into JSON; non-finite numbers become null.

    Args:
        far: what was measured where hosts are far from each other, if that came after it.
    """
    known: dict[str, Any] = finite(_document(outcome, command))
    known["far"] = None if far is None else document(far, command)
    for entry in known["contestants"]:
        entry.update(against_gloo(known, entry))
    return {"headline": headline(known), **known, "notes": notes(known)}


def _document(outcome: Outcome, command: str) -> dict[str, Any]:
    scenario, ground = outcome.scenario, outcome.ground
    payload, ideal = _ideal(outcome)
    preset = ground.preset if ground else None
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "machine": environment(),
        "mode": "loopback" if preset is None else "namespaces",
        "reason": ground.reason if ground else None,
        "network": asdict(preset) if preset else None,
        "bursts": asdict(ground.burst) if ground and ground.burst else None,
        "scenario": asdict(scenario),
        "model": outcome.facts,
        "payload_bytes": payload,
        "header_ideal_s": ideal,
        "contestants": [
            _contestant(outcome, entry)
            for entry in scenario.entries
            if any(block.contestant == entry.name for block in outcome.blocks)
        ],
        "turns": [
            {"contestant": block.contestant, "start": block.start - outcome.origin}
            for block in outcome.blocks
        ],
        "bursts_sent": [
            {"start": burst.start - outcome.origin, "stop": burst.stop - outcome.origin}
            for burst in outcome.bursts
        ],
        "network_drops": outcome.network_drops,
        "softnet_drops": outcome.softnet_drops,
        "error": outcome.error,
        "error_details": outcome.details,
        "late": outcome.late,
        "wall_s": time.monotonic() - outcome.origin,
    }


def _ideal(outcome: Outcome) -> tuple[float | None, float | None]:
    """Return the bytes per port and direction of a step's all-reduce, and the seconds they need."""
    if not outcome.facts:
        return None, None
    size = outcome.facts["parameters"] * _FLOAT_BYTES
    payload = all_reduce_payload(size, outcome.scenario.ranks)
    preset = outcome.ground.preset if outcome.ground else None
    return payload, header_ideal(payload, preset.rate) if preset else None


def _contestant(outcome: Outcome, entry: Entry) -> dict[str, Any]:
    mine = [
        (number, block)
        for number, block in enumerate(outcome.blocks)
        if block.contestant == entry.name
    ]
    steps = [step for number, block in mine for step in join(block, number, outcome.origin)]
    prints = outcome.fingerprints.get(entry.name)
    last = [step.loss for step in steps[-outcome.scenario.block :]]
    return {
        "name": entry.name,
        "label": entry.label,
        "policy": entry.policy,
        **summarize(steps),
        "final_loss": mine[-1][1].validation,
        "final_training_loss": statistics.fmean(last),
        "validation": [
            {"step": block.ranks[0][-1]["step"] + 1, "loss": block.validation} for _, block in mine
        ],
        "verdict": mine[-1][1].verdict,
        "replicas_identical": None if prints is None else len(set(prints)) == 1,
        "bytes_sent": _total(mine, "bytes"),
        "retransmissions": _total(mine, "retransmissions"),
        "series": [asdict(step) for step in steps],
    }


def _total(blocks: Sequence[tuple[int, Block]], key: str) -> int | None:
    """Sum a number over all steps of all ranks; None where a rank does not know it."""
    values = [step[key] for _, block in blocks for steps in block.ranks for step in steps]
    return None if any(value is None for value in values) else sum(values)
