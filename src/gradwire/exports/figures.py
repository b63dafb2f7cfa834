"""The figures of a step, under one name in every log, dashboard and callback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gradwire.core.report import StepReport


class Figure(NamedTuple):
    """One figure of a step.

    Attributes:
        meaning: What it is, as a sentence without its full stop.
        of: Returns its value; NaN where it is not known.
    """

    meaning: str
    of: Callable[[StepReport], float]


FIGURES = {
    "delivered": Figure("Share of this worker's elements that counted", lambda r: r.delivered),
    "bound": Figure("Largest share that any region might lose", lambda r: r.bound),
    "megabytes": Figure("UDP payload sent, in megabytes", lambda r: r.bytes / 1e6),
    "comm_s": Figure("Seconds from the first bucket to the last result", lambda r: r.comm_s),
    "exposed_s": Figure(
        "Seconds from the start of the last bucket, with nothing left to compute, to the end",
        lambda r: r.exposed_s,
    ),
    "period_s": Figure(
        "Seconds between the starts of the step before and of this one", lambda r: r.period_s
    ),
    "push_s": Figure("Seconds of the slowest bucket's push", lambda r: r.push_s),
    "pull_s": Figure("Seconds of the slowest bucket's pull", lambda r: r.pull_s),
    "rtprop_s": Figure("Smallest round-trip time seen, in seconds", lambda r: r.rtprop_s),
    "btlbw": Figure(
        "Rate of the path in bytes per second, 0 while it is not known", lambda r: r.btlbw
    ),
    "encoded_share": Figure(
        "Bytes that the encodings sent, relative to float32", lambda r: r.encoded_share
    ),
    "critical": Figure(
        "Whether the step's phase was critical, as 1 or 0", lambda r: float(r.phase == "critical")
    ),
    "loss": Figure(
        "Mean of the training losses that the workers gave",
        lambda r: math.nan if r.agreed.loss is None else r.agreed.loss,
    ),
}
"""Every figure by its name; in logs the name follows "gradwire/"."""


LOGGED = ("delivered", "bound", "megabytes", "comm_s", "exposed_s")
"""What callbacks of frameworks log."""


def figures(report: StepReport, names: Iterable[str] = tuple(FIGURES)) -> dict[str, float]:
    """Returns figures of a step under the names of logs, those that are known.

    Args:
        report: The step's report.
        names: The figures, of FIGURES.

    Returns:
        The values, such as {"gradwire/delivered": 1.0}.
    """
    values = ((name, float(FIGURES[name].of(report))) for name in names)
    return {f"gradwire/{name}": value for name, value in values if math.isfinite(value)}
