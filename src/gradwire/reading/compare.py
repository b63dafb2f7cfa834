"""Whether one run is worse than another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradwire.core.words import seconds, share
from gradwire.reading.records import Record, Run, UnreadableError

FEWEST = 20
"""Steps that a run needs to be compared."""
CERTAIN = 1.96
"""So many standard deviations make an interval of 95 per cent."""

Verdict = Literal["worse", "no worse", "not judged"]


@dataclass(frozen=True)
class Measure:
    """One measure of two runs.

    Attributes:
        name: What is measured.
        a: The first run's, as text.
        change: The second one's over the first one's, minus 1; NaN where that says nothing.
        verdict: "worse" where the change exceeds the threshold and chance.
        note: What a reader needs beside the verdict; "" for nothing.
    """

    name: str
    a: str
    b: str
    change: float
    verdict: Verdict
    note: str = ""

    def text(self) -> str:
        """Returns it for people, without its name."""
        said = f"{self.a}, then {self.b}" if self.a else ""
        if self.verdict != "not judged":
            said += f" ({100 * self.change:+.1f} %), {self.verdict}"
        return said + (": " if said and self.note else "") + self.note


def compare(a: Run, b: Run, threshold: float) -> list[Measure]:
    """Compares two runs."""
    models = [{each.number("elements", 0) for each in run.records} for run in (a, b)]
    if 0 not in models[0] | models[1] and not models[0] & models[1]:
        sizes = " and ".join(f"{max(model):,.0f}" for model in models)
        raise UnreadableError(f"they are of different models: {sizes} elements")
    first, second = _times(a), _times(b)
    return [
        _quantile("median step", 0.5, first, second, threshold),
        _quantile("90 % of steps within", 0.9, first, second, threshold),
        *_losses(a, b, threshold),
        _beside("all steps", a, b, np.sum, lambda each: each.took_s, seconds),
        _beside("longest step", a, b, np.max, lambda each: each.took_s, seconds),
        _beside("waiting, median", a, b, np.median, lambda each: each.waited_s, seconds),
        _beside("delivered", a, b, np.mean, lambda each: each.number("delivered", 1.0), share),
    ]


def _times(run: Run) -> NDArray[np.float64]:
    taken = np.array([each.took_s for each in run.records], np.float64)
    taken = taken[np.isfinite(taken)]
    if len(taken) < FEWEST:
        text = f"{run.name}: {len(taken)} steps with a duration; {FEWEST} are needed"
        raise UnreadableError(text)
    return taken


def _beside(
    name: str,
    a: Run,
    b: Run,
    fold: Callable[[list[float]], Any],
    value: Callable[[Record], float],
    words: Callable[[float], str],
) -> Measure:
    found = ([value(each) for each in run.records] for run in (a, b))
    own, other = (
        words(float(fold([each for each in run if math.isfinite(each)]))) for run in found
    )
    return Measure(name, own, other, math.nan, "not judged")


def _quantile(
    name: str, q: float, a: NDArray[np.float64], b: NDArray[np.float64], threshold: float
) -> Measure:
    """Compares a quantile of two samples; steps count as independent of each other."""
    ends = []
    for values in (a, b):
        middle = len(values) * q
        spread = CERTAIN * math.sqrt(len(values) * q * (1 - q))
        ranks = np.clip([middle - spread, middle + spread], 0, len(values) - 1).astype(int)
        ends.append(np.sort(values)[ranks])
    own = [float(np.quantile(values, q)) for values in (a, b)]
    change = own[1] / own[0] - 1
    certain = float(ends[1][0]) > float(ends[0][1])
    verdict: Verdict = "worse" if change > threshold and certain else "no worse"
    few = min(len(a), len(b))
    chance = f"within chance, {few} steps are too few to tell"
    note = chance if change > threshold and not certain else ""
    return Measure(name, seconds(own[0]), seconds(own[1]), change, verdict, note)


def _losses(a: Run, b: Run, threshold: float) -> list[Measure]:
    """Compares the mean training losses of the last tenth of the steps that both have."""
    known = [{e.step: e.loss for e in run.records if math.isfinite(e.loss)} for run in (a, b)]
    common = sorted(known[0].keys() & known[1].keys())
    if len(common) < FEWEST:
        lacking = [
            f"of {run.name}" for run, losses in zip((a, b), known, strict=True) if not losses
        ]
        note = f"{len(common)} steps have one in both, {FEWEST} are needed"
        if lacking:
            note = f"not recorded{'' if len(lacking) == 2 else ' ' + lacking[0]}"
            note += "; the script gives it by attachment.loss(loss)"
        return [Measure("training loss", "", "", math.nan, "not judged", note)]
    last = common[-max(1, len(common) // 10) :]
    own, other = (float(np.mean([losses[step] for step in last])) for losses in known)
    change = other / own - 1 if own > 0 else math.nan  # a ratio to less says nothing
    worse: Verdict = "worse" if change > threshold else "no worse"
    verdict: Verdict = "not judged" if math.isnan(change) else worse
    return [Measure("training loss", f"{own:.4g}", f"{other:.4g}", change, verdict)]
