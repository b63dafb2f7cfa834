"""Summary, which says of a run what was lost where, what that cost, and what to try."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.core.report import finite
from gradwire.core.words import count, seconds, share
from gradwire.reading.records import Record, Run
from gradwire.reading.why import Why, slowest_steps

FEWEST = 20
"""Of fewer steps nothing is advised."""
LITTLE = 0.05
"""Below this share of the time waiting costs little."""
SEVERAL = 3
"""So many slow steps, and half of them, have one cause before that is looked at."""
SOME_LOST = 1e-3
"""From this share of packets sent again on the network loses."""
OFTEN = 0.01
"""From this share of steps on the guard acts often."""


@dataclass(frozen=True)
class Layer:
    """What one region lost over a run.

    Attributes:
        lost: Share of its elements that did not count, over all steps.
    """

    name: str
    lost: float
    bound: float


@dataclass(frozen=True)
class Summary:
    """One run in figures. Shares are of this rank's steps; NaN where nothing is recorded.

    Attributes:
        workers: Number of workers; 0 where it is not recorded.
        steps: Number of steps.
        policies: Steps by policy.
        phases: Steps by phase.
        step_s: Median, 90th and 99th percentile, and maximum of a step's duration in seconds.
        waited: Share of the time in which nothing was left to compute.
        waited_s: Median of that time a step, in seconds.
        lost: Share of the elements that did not count.
        losing: Share of the steps that lost anything.
        layers: What each region lost, the most first.
        exceeded: Steps in which a region lost more than its bound.
        guards: Steps by what the guard did.
        resent: Share of the packets that were sent again.
        encoded: What the encodings sent of float32's bytes, the mean.
        bytes_s: An estimate: what a median step's bytes alone take at the recorded rate, in
            seconds.
        loss: The training loss at the end, the mean of the last tenth of the steps.
        slowest: The slowest steps, and why.
        missing: What is not there, one sentence each.
        advice: What to try, one sentence each.
    """

    name: str
    rank: int
    workers: int
    steps: int
    policies: dict[str, int]
    phases: dict[str, int]
    step_s: tuple[float, float, float, float]
    waited: float
    waited_s: float
    lost: float
    losing: float
    layers: tuple[Layer, ...]
    exceeded: int
    guards: dict[str, int]
    resent: float
    encoded: float
    bytes_s: float
    loss: float
    slowest: tuple[Why, ...]
    missing: tuple[str, ...]
    advice: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        values: dict[str, Any] = finite(asdict(self))
        return values

    def lines(self) -> list[tuple[str, str]]:
        """Returns it for people: what each line is about, and the line."""
        ranks = f"rank {self.rank} of {self.workers}" if self.workers else f"rank {self.rank}"
        phases = ", ".join(f"{number:,} {phase}" for phase, number in self.phases.items())
        median, p90, p99, longest = map(seconds, self.step_s)
        lines = [
            ("run", f"{count(self.steps, 'step')} of {ranks}, {', '.join(self.policies)}"),
            *(("not there", text) for text in self.missing),
            ("a step", f"{median} (median); 90 % in {p90}, 99 % in {p99}, the longest {longest}"),
            ("waiting", f"{seconds(self.waited_s)} (median), {share(self.waited)} of all time"),
            ("phases", phases),
            (
                "lost",
                f"{share(self.lost)} of this rank's elements, in {share(self.losing)} of steps",
            ),
        ]
        for layer in [layer for layer in self.layers if layer.lost > 0][:5]:
            text = f"{layer.name}: {share(layer.lost)}, of {share(layer.bound)} allowed"
            lines.append(("lost where", text))
        cost = f"{share(self.resent)} of the packets sent again"
        cost += f"; {count(self.exceeded, 'step')} beyond a bound"
        cost += "".join(f", {number:,} {guard}" for guard, number in self.guards.items())
        lines.append(("cost", cost))
        if not math.isnan(self.bytes_s):
            text = f"{seconds(self.bytes_s)} a step, an estimate from the rate that was recorded"
            lines.append(("bytes alone", f"{text}; {share(self.encoded)} of float32's bytes"))
        if not math.isnan(self.loss):
            lines.append(("training loss", f"{self.loss:.4g} at the end"))
        for each in self.slowest[:5]:
            lines.append(("slowest", f"step {each.step} ({seconds(each.took_s)}): {each.short}"))
        if not self.slowest:
            lines.append(("slowest", "no step took much longer than those around it"))
        return lines + [("to try", text) for text in self.advice]


def summarize(run: Run) -> Summary:
    records = run.records
    took = _known(each.took_s for each in records)
    timed = [each for each in records if not math.isnan(each.took_s)]
    waited = [each.waited_s for each in records]
    packets = sum(each.number("packets", 0) for each in records)
    again = sum(each.number("retransmissions", 0) for each in records)
    lost = [1 - each.number("delivered", 1.0) for each in records]
    estimates = _known(
        each.number("bytes") / (each.number("btlbw") or math.nan) for each in records
    )
    losses = _known(each.loss for each in records[-max(1, len(records) // 10) :])
    total = sum(each.took_s for each in timed)
    found = Summary(
        name=run.name,
        rank=run.rank,
        workers=int(max(each.number("workers", 0) for each in records)),
        steps=len(records),
        policies=dict(Counter(each.text("policy") for each in records)),
        phases=dict(Counter(each.text("phase") for each in records)),
        step_s=_percentiles(took),
        waited=min(1.0, sum(each.waited_s for each in timed) / total) if total else math.nan,
        waited_s=float(np.median(waited)),
        lost=float(np.mean(lost)),
        losing=float(np.mean(np.array(lost) > 0)),
        layers=_layers(records),
        exceeded=sum(bool(each.values.get("exceeded")) for each in records),
        guards=dict(Counter(guard for each in records if (guard := each.text("guard")))),
        resent=again / packets if packets else math.nan,
        encoded=float(np.mean([each.number("encoded_share", 1.0) for each in records])),
        bytes_s=float(np.median(estimates)) if len(estimates) else math.nan,
        loss=float(np.mean(losses)) if len(losses) else math.nan,
        slowest=tuple(slowest_steps(run)),
        missing=tuple(run.missing),
    )
    return Summary(**{**vars(found), "advice": tuple(_advice(found))})


def _known(values: Any) -> NDArray[np.float64]:
    found = np.fromiter(values, np.float64)
    return found[np.isfinite(found)]


def _percentiles(values: NDArray[np.float64]) -> tuple[float, float, float, float]:
    if not len(values):
        return (math.nan,) * 4
    median, p90, p99, longest = np.percentile(values, [50, 90, 99, 100])
    return float(median), float(p90), float(p99), float(longest)


def _layers(records: list[Record]) -> tuple[Layer, ...]:
    lost: dict[str, float] = defaultdict(float)
    bounds: dict[str, float] = defaultdict(float)
    steps: Counter[str] = Counter()
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.names].append(record)
    for names, of in groups.items():
        missing = np.sum([1 - each.delivered for each in of], axis=0)
        bound = np.max([each.bounds for each in of], axis=0)
        for name, gone, allowed in zip(names, missing, bound, strict=True):
            lost[name] += float(gone)
            bounds[name] = max(bounds[name], float(allowed))
            steps[name] += len(of)
    layers = [Layer(name, max(0.0, lost[name] / steps[name]), bounds[name]) for name in lost]
    return tuple(sorted(layers, key=lambda layer: -layer.lost))


def _advice(run: Summary) -> list[str]:
    """Says what to try, by the rules of docs/guides/reading-a-report.md, "What to make of it"."""
    if run.steps < FEWEST or math.isnan(run.waited):
        return [f"nothing can be said of fewer than {FEWEST} steps with a duration"]
    if run.waited < LITTLE:
        return [
            f"nothing: steps wait {share(run.waited)} of the time for the network, so computation "
            "takes it, and no transport helps"
        ]
    said = []
    causes = Counter((each.cause, each.who) for each in run.slowest)
    for (cause, who), times in causes.items():
        if times < max(SEVERAL, len(run.slowest) / 2):
            continue
        of = f"{times} of the {len(run.slowest)} slowest steps"
        if cause == "late rank":
            said.append(f"look at {who}, which began late in {of}; no policy helps against that")
        elif cause == "computing":
            said.append(f"look at what the script does in the slowest steps: {of} computed longer")
    acted = run.guards.get("resent", 0) + run.guards.get("skipped", 0) + run.exceeded
    if acted > OFTEN * run.steps:
        said.append(
            f"a smaller p, or policy='adaptive': {acted:,} steps lost more than a bound or floor= "
            "allows"
        )
    policy = next(iter(run.policies), "")
    loses = run.resent >= SOME_LOST or run.lost >= SOME_LOST
    if loses and policy != "adaptive":
        said.append(
            f"policy='adaptive': the network loses ({share(run.resent)} of the packets were sent "
            f"again), and {policy} {'waits for them' if run.lost == 0 else 'does not compress'}"
        )
    slow_path = run.bytes_s >= run.waited_s / 2
    if slow_path and run.encoded > 0.9 and policy != "adaptive":
        said.append("policy='adaptive', which compresses: the path is slow for so many bytes")
    elif slow_path and run.encoded <= 0.9:
        said.append("a larger batch or a faster path: the bytes, encoded already, take the time")
    return said or [
        "`gradwire doctor`, started as the job was: steps wait "
        f"{share(run.waited)} of the time, and the records do not say for what; ranks that share "
        "a machine have no network between them, and wait for its other work"
    ]
