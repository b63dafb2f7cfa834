"""Summaries reduce the samples of one contestant in one cell, all seeds together, to numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire_lab.contest.intervals import t_quantile
from gradwire_lab.contest.measure import FRAME_PAYLOAD, percentile
from gradwire_lab.contest.rivals import goodput
from gradwire_lab.network.presets import MAX_FRAME
from gradwire_lab.run.limits import limit
from gradwire_lab.run.model import CellRun, Quantities, Summary, Times, Track
from gradwire_lab.scenario.contestant import Contestant
from gradwire_lab.scenario.mark import P99_SAMPLES
from gradwire_lab.scenario.schema import Scenario

__all__ = ["P999_SAMPLES", "interval", "summarize", "times"]

P999_SAMPLES = 3000
"""A 99.9th percentile of fewer samples is not given."""


def times(seconds: Sequence[float]) -> Times:
    """Summarise times in a few numbers, in seconds; all are None where there are no times."""
    if not seconds:
        return Times(*[None] * 6)
    count = len(seconds)
    return Times(
        median_s=percentile(seconds, 50),
        mean_s=statistics.fmean(seconds),
        p95_s=percentile(seconds, 95),
        p99_s=percentile(seconds, 99) if count >= P99_SAMPLES else None,
        p999_s=percentile(seconds, 99.9) if count >= P999_SAMPLES else None,
        max_s=max(seconds),
    )


def interval(values: Sequence[float]) -> list[float] | None:
    """Return the 90 % confidence interval of the mean over seeds.

    It is None for fewer than two seeds, or where a value is not finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return [mean - half, mean + half]


def summarize(
    each: Contestant, scenario: Scenario, runs: Mapping[int, CellRun], *, limited: bool = True
) -> Summary | None:
    """Summarise a contestant in a cell; None if it has no samples.

    Args:
        scenario: the cell's.
        runs: the cell's, by seed.
        limited: whether the runs are of this form of the scenario, so that its limit, bytes and
            workers apply to them.
    """
    found = {
        seed: run.tracks[each.name]
        for seed, run in runs.items()
        if each.name in run.tracks and run.tracks[each.name].seconds
    }
    tracks = list(found.values())
    if not tracks:
        return None
    size = _size(scenario, tracks[0], runs)
    bound = each.loosest_bound(scenario.work.kind)
    floor = limit(scenario, size, bound) if limited else None
    training = scenario.work.kind == "training"
    whole = _useful(scenario, size) * 8

    together = _quantities(each.name, scenario, found, runs, limited=limited)
    alone = {
        seed: _quantities(each.name, scenario, {seed: track}, runs, limited=limited)
        for seed, track in found.items()
    }
    communicated = sum(sum(track.seconds) for track in tracks)
    prints = [track.fingerprints for track in tracks if track.fingerprints]
    return Summary(
        name=each.name,
        transport=each.transport,
        samples=sum(len(track.seconds) for track in tracks),
        seeds=len(tracks),
        **vars(together),
        intervals=_intervals(list(alone.values())),
        bound=bound,
        limit_s=floor,
        over_limit=None if floor is None else percentile(_seconds(tracks), 50) / floor,
        rate_limit_bps=(
            None
            if training or not limited
            else whole / (limit(scenario, size, 0.0) * MAX_FRAME / FRAME_PAYLOAD)
        ),
        comm_share=(
            communicated / sum(track.job_s for track in tracks)
            if training or scenario.work.compute_s
            else None
        ),
        **_delivery(tracks),
        replicas_identical=(all(len(set(each)) == 1 for each in prints) if prints else None),
        by_seed={str(seed): one for seed, one in alone.items()},
    )


def _seconds(tracks: Sequence[Track]) -> list[float]:
    return [value for track in tracks for value in track.seconds]


def _quantities(
    name: str,
    scenario: Scenario,
    tracks: Mapping[int, Track],
    runs: Mapping[int, CellRun],
    *,
    limited: bool,
) -> Quantities:
    """Compute the quantities that marks compare, over these seeds together; see `summarize`."""
    own = list(tracks.values())
    seconds = _seconds(own)
    job = sum(track.job_s for track in own)
    throughput = None
    if scenario.work.kind != "training" and limited:
        whole = _useful(scenario, scenario.work.bytes) * 8 * len(seconds)
        throughput = whole / sum(seconds)
    return Quantities(
        **vars(times(seconds)),
        throughput_bps=throughput,
        goodput_bps=None if throughput is None else throughput * _counted(own),
        job_s=job / len(own),
        steps_per_s=len(seconds) / job,
        rival_goodput_bps=_rivals(name, [runs[seed] for seed in tracks]),
        **_learning(tracks, {seed: _target(scenario, runs[seed]) for seed in tracks}),
    )


def _intervals(alone: Sequence[Quantities]) -> dict[str, list[float] | None]:
    """Return the interval of each quantity over seeds; None where a seed lacks it."""
    found = {key: [getattr(each, key) for each in alone] for key in vars(alone[0])}
    return {key: None if None in values else interval(values) for key, values in found.items()}


def _size(scenario: Scenario, track: Track, runs: Mapping[int, CellRun]) -> int:
    if scenario.work.kind != "training":
        return scenario.work.bytes
    return 4 * next(int(run.facts["parameters"]) for run in runs.values() if run.facts)


def _counted(tracks: Sequence[Track]) -> float:
    """Return the share of all rounds' gradients that counted."""
    shares = [statistics.fmean(each) for track in tracks for each in track.delivered]
    return statistics.fmean(shares) if shares else 1.0


def _useful(scenario: Scenario, size: int) -> int:
    """Return the bytes of gradient that a round moves for its workers."""
    return size * scenario.topology.workers


def _delivery(tracks: Sequence[Track]) -> dict[str, Any]:
    shares = [shares for track in tracks for shares in track.delivered]
    layers: dict[str, list[float]] = {}
    for track in tracks:
        for name, share in track.layers.items():
            layers.setdefault(name, []).append(share)
    packets = sum(sum(track.packets) for track in tracks)
    rounds = sum(len(track.bytes) for track in tracks)
    counted = sum(track.wire_rounds for track in tracks)
    passes = [count for track in tracks for count in track.passes]
    pushes = [value for track in tracks for value in track.push_s]
    critical = [each for track in tracks for each in track.critical]
    return {
        "delivered": statistics.fmean(map(statistics.fmean, shares)) if shares else None,
        "delivered_min": min(map(min, shares)) if shares else None,
        "delivered_by_worker": [statistics.fmean(column) for column in zip(*shares, strict=False)],
        "delivered_by_layer": {name: statistics.fmean(each) for name, each in layers.items()},
        "bytes_per_round": sum(sum(t.bytes) for t in tracks) / rounds if rounds else None,
        "wire_bytes_per_round": sum(t.wire_bytes for t in tracks) / counted if counted else None,
        "retransmitted": (
            sum(sum(t.retransmissions) for t in tracks) / packets if packets else None
        ),
        "push": times(pushes) if pushes else None,
        "critical_share": statistics.fmean(critical) if critical else None,
        "passes_median": percentile(passes, 50) if passes else None,
        "passes_max": max(passes) if passes else None,
    }


def _rivals(name: str, runs: Sequence[CellRun]) -> float | None:
    found = [goodput(run.rivals, run.tracks[name].spans) for run in runs if run.rivals]
    known = [8 * value for value in found if value is not None]
    return statistics.fmean(known) if known else None


def _target(scenario: Scenario, run: CellRun) -> float | None:
    """Return the held-out loss whose time is asked for; None if none is."""
    model = scenario.model
    if not model.target_of:
        return model.target_loss or None
    lossless = run.tracks.get(model.target_of)
    if lossless is None or not lossless.losses:
        return None
    return lossless.curve[-1][1] + model.target_within


def _reached(track: Track, target: float | None) -> float | None:
    """Return the seconds of training until the held-out loss had fallen to the target.

    Between two evaluations the loss is taken as falling in proportion to time.
    """
    if target is None:
        return None
    before: tuple[float, float] | None = None
    for now, loss in track.curve:
        if loss <= target:
            if before is None:
                return now
            return now - (now - before[0]) * (target - loss) / (before[1] - loss)
        before = (now, loss) if math.isfinite(loss) else None
    return None


def _learning(tracks: Mapping[int, Track], targets: Mapping[int, float | None]) -> dict[str, Any]:
    reached = [_reached(track, targets[seed]) for seed, track in tracks.items()]
    known = [seconds for seconds in reached if seconds is not None]
    last = [track.curve[-1][1] for track in tracks.values() if track.losses]
    return {
        "final_loss": statistics.fmean(last) if last else None,
        "time_to_loss_s": statistics.fmean(known) if known and len(known) == len(tracks) else None,
    }
