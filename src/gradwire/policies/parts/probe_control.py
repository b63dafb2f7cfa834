"""The published control of bounded-loss transfers: probe, bitmap, stop (docs/design.md).

It is that of DBLP and of its baseline, a software MLT: chunks in sequential order and in passes, a
way down that loses as the way up does. control="probe" therefore means order="sequential" and
pull="lossy" unless they are given; under "stream", the engine's own, "shuffled" and "exact".
"""

from __future__ import annotations

from typing import Any

from gradwire.core.plan import (
    CONTROLS,
    FILLS,
    SPENDS,
    CloseStep,
    check_choice,
    check_control,
)
from gradwire.policies.base import SHARED_ORDERS

__all__ = ["BOUNDED_PULLS", "settle_options"]

BOUNDED_PULLS = ("exact", "committed", "lossy")
"""The pulls of policies whose papers lose on the way down too; "lossy" lets replicas differ."""

_MEANT = {"stream": ("shuffled", "exact"), "probe": ("sequential", "lossy")}


def settle_options(
    control: str, spend: str, fill: str, order: str | None, pull: str | None
) -> dict[str, Any]:
    """The fields of a plan that closes by its bound; order and pull are control's where None.

    Raises ConfigError naming the option, its value and what is allowed.
    """
    check_choice("control", control, CONTROLS)
    check_choice("spend", spend, SPENDS)
    check_choice("fill", fill, FILLS)
    check_control(control, spend)
    meant_order, meant_pull = _MEANT[control]
    order = meant_order if order is None else order
    pull = meant_pull if pull is None else pull
    check_choice("order", order, SHARED_ORDERS)
    check_choice("pull", pull, BOUNDED_PULLS)
    # In passes no two workers leave out the same chunks, so no worker waits for the others' start.
    scope = "worker" if control == "probe" else "all"
    return {
        "control": control,
        "spend": spend,
        "schedule": (CloseStep(scope=scope),),
        "fill": fill,
        "order": order,
        "pull": pull,
    }
