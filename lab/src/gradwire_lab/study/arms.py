"""An arm of the study is what carries the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ARMS", "BAD", "LOSSLESS", "POLICIES", "THIRDS", "Arm"]

OLDEST = 254
"""max_age as large as it goes: a chunk may starve for as many rounds; in the papers, for ever."""


@dataclass(frozen=True)
class Arm:
    """An arm is one way to carry gradients.

    Attributes:
        name: its name on the command line.
        policy: gradwire's policy; None for plain sums, without any transport.
        options: the options of `gradwire.attach`.
        calibrated: the policy gets the table that `gradwire.calibrate` makes on the fresh model.
        own_order: each worker leaves out chunks of its own (`own_order.OwnOrder` for "mlt").
        thirds: the thirds of training (0, 1, 2) in which all workers ask for the tolerant phase;
            in the others they ask for the critical one. Empty: the policy's detector decides.
        buckets: about so many, as DDP makes them for overlap with the backward pass.
    """

    name: str
    policy: str | None
    options: Mapping[str, object] = field(default_factory=dict)
    calibrated: bool = False
    own_order: bool = False
    thirds: tuple[int, ...] = ()
    buckets: int = 1


LOSSLESS = "lossless"
BAD = "bad"
"""The arm that is known to be bad; where it counts as good, the task is too easy."""

POLICIES = (
    Arm("reliable", "reliable"),
    Arm("mlt", "mlt"),
    Arm("dblp", "dblp"),
    Arm("dblp-vesting", "dblp", {"spend": "lost"}),
    Arm("ltp", "ltp", {"every": "epoch"}),
    Arm("plot", "plot", calibrated=True),
    Arm("optireduce", "optireduce"),
    Arm("netsenseml", "netsenseml"),
    Arm("adaptive", "adaptive"),
)
"""Every policy, as `gradwire.attach(…, optimizer=…)` sets it up."""

_PLAIN = {"p": 0.4, "error_feedback": False}
_CHOICES = (
    Arm("eager-40", "mlt", _PLAIN),
    Arm("eager-40-mean", "mlt", {**_PLAIN, "fill": "mean"}),
    Arm("eager-40-momentum", "mlt", {**_PLAIN, "fill": "momentum"}),
    Arm("eager-40-own", "mlt", _PLAIN, own_order=True),
    Arm("eager-40-own-mean", "mlt", {**_PLAIN, "fill": "mean"}, own_order=True),
    Arm("eager-40-feedback", "mlt", {**_PLAIN, "error_feedback": True}),
    Arm("eager-40-fixed-order", "mlt", {**_PLAIN, "order": "sequential"}),
    Arm("vesting-40", "mlt", {**_PLAIN, "spend": "lost"}),
    Arm("vesting-40-mean", "mlt", {**_PLAIN, "spend": "lost", "fill": "mean"}),
    Arm("vesting-40-feedback", "mlt", {**_PLAIN, "spend": "lost", "error_feedback": True}),
    Arm("mlt-priority", "mlt", {"priority": "both"}),
    Arm("priority-40", "mlt", {**_PLAIN, "priority": "both"}),
    Arm("priority-40-feedback", "mlt", {**_PLAIN, "priority": "both", "error_feedback": True}),
    Arm("eager-40-results", "mlt", {**_PLAIN, "priority": "results"}),
    Arm("adaptive-topk", "adaptive", {"compress": "topk", "error_feedback": True}),
    Arm("dblp-buckets", "dblp", buckets=3),
    Arm("dblp-zero", "dblp", {"fill": "zero"}),
    Arm("dblp-random", "dblp", {"priority": "none"}),
    Arm("dblp-random-momentum", "dblp", {"fill": "momentum", "priority": "none"}),
    Arm(
        "dblp-plain",
        "dblp",
        {"detector": "paper", "error_feedback": False, "priority": "none"},
    ),
)

THIRDS = {"early": (0,), "mid": (1,), "late": (2,), "mid-late": (1, 2)}
_MOTIVATION = tuple(
    Arm(
        f"{percent}-{when}",
        "dblp",
        {
            "p_low": 0.0,
            "p_high": percent / 100,
            "priority": "none",
            "max_age": OLDEST,
            "error_feedback": False,
        },
        thirds=thirds,
    )
    for percent in (40, 80)
    for when, thirds in THIRDS.items()
)

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(LOSSLESS, None),
        *POLICIES,
        *_CHOICES,
        *_MOTIVATION,
        Arm(BAD, "mlt", {**_PLAIN, "order": "sequential", "max_age": OLDEST}),
    )
}
