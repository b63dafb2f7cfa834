"""The published control of bounded-loss transfers: probe, bitmap and stop (docs/design.md).

DBLP and its baseline, a software MLT, use it: chunks go in sequential order and in passes, and the
pull may lose as the push may. control="probe" therefore means order="sequential" and pull="lossy"
unless these are given. Under "stream", the engine's own control, they are "shuffled" and "exact".
"""

from __future__ import annotations

from typing import Any

from gradwire.core.plan import CONTROLS, FILLS, SPENDS, CloseStep, check_choice, check_control
from gradwire.policies.base import SHARED_ORDERS

BOUNDED_PULLS = ("exact", "committed", "lossy")
"""The pulls of policies whose papers lose on the way back, too; "lossy" lets replicas differ."""

_MEANT = {"stream": ("shuffled", "exact"), "probe": ("sequential", "lossy")}


def bounded_options(
    control: str, spend: str, fill: str, order: str | None, pull: str | None
) -> dict[str, Any]:
    """Returns the fields of a plan that closes by its bound."""
    check_choice("control", control, CONTROLS)
    check_choice("spend", spend, SPENDS)
    check_choice("fill", fill, FILLS)
    check_control(control, spend)
    meant_order, meant_pull = _MEANT[control]
    order = meant_order if order is None else order
    pull = meant_pull if pull is None else pull
    check_choice("order", order, SHARED_ORDERS)
    check_choice("pull", pull, BOUNDED_PULLS)
    # In passes workers leave out different chunks, so none has to wait for the others to start.
    scope = "worker" if control == "probe" else "all"
    return {
        "control": control,
        "spend": spend,
        "schedule": (CloseStep(scope=scope),),
        "fill": fill,
        "order": order,
        "pull": pull,
    }
