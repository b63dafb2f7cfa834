"""LossWatch: makes steps exact after the training loss rose.

It decides by agreed values only, so all ranks do the same in the same step.
"""

from __future__ import annotations

import math

from gradwire.core import callers
from gradwire.core.agreed import Summary
from gradwire.core.saved_state import State

PATIENCE = 1000
"""Steps without any loss after which it warns."""


class LossWatch:
    """Asks for exact steps after the training loss rose.

    The mean is exponential over about ten losses, and no loss is compared with it before it has
    seen ten. A loss that is not finite counts as a rise from the first step on, and never enters
    the mean. A warning appears once where losses are expected and none comes.

    Args:
        rise: Share by which the agreed loss must exceed its running mean, above 0.

    Attributes:
        losses: Number of losses in it.
        left: Number of exact steps to come.
    """

    WEIGHT = 0.1
    ENOUGH = 10

    def __init__(self, rise: float, strict_steps: int) -> None:
        self.rise = rise
        self.strict_steps = strict_steps
        self.mean = 0.0
        self.losses = 0
        self.left = 0
        self._waited: int | None = 0  # steps without a loss; None after the first loss

    @property
    def exact(self) -> bool:
        return self.left > 0

    def observe(self, summary: Summary) -> None:
        self.left = max(0, self.left - 1)
        loss = summary.loss
        if loss is None:
            self._wait()
            return
        self._waited = None
        if not math.isfinite(loss):
            self.left = self.strict_steps
            return
        if self.losses >= self.ENOUGH and loss - self.mean > self.rise * abs(self.mean):
            self.left = self.strict_steps
        self.losses += 1
        weight = max(self.WEIGHT, 1.0 / self.losses)
        self.mean += weight * (loss - self.mean)

    def _wait(self) -> None:
        if self._waited is None:
            return
        self._waited += 1
        if self._waited == PATIENCE:
            callers.warn(
                f"loss_rise={self.rise:g}: {PATIENCE} steps have passed without any loss to watch: "
                "call attachment.loss(loss) with each step's training loss, or leave loss_rise out",
            )

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "losses": self.losses, "left": self.left}

    def load_state_dict(self, state: State) -> None:
        state.keys(("mean", "losses", "left"))
        self.mean = state.number("mean")
        self.losses, self.left = state.whole("losses"), state.whole("left")
