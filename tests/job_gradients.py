"""What tests of jobs in virtual time (gradwire.sim.job) share: gradients, and ratios to send."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.core.plan import encoded_share
from gradwire.policies import Policy
from gradwire.policies.adaptive import ENCODINGS


def normal(
    elements: int, step: int, world: int = 3, scale: float = 1.0
) -> list[NDArray[np.float32]]:
    """The ranks' gradients of a step: standard normal, and the same however often they are made."""
    chance = np.random.default_rng(step)
    return [(scale * chance.standard_normal(elements)).astype(np.float32) for _ in range(world)]


def set_ratio(policy: Policy, ratio: float) -> None:
    """Has the next step sent with at most this share of the dense bytes, as after a restart."""
    state: dict[str, Any] = policy.state_dict()
    if policy.name == "adaptive":
        fits = [encoded_share(*each) <= ratio for each in ENCODINGS]
        state["trials"].update(current=fits.index(True), untried=[])
    else:
        state["ladder"]["ratio"] = ratio
    policy.load_state_dict(state)
