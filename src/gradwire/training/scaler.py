"""SkipWatch: notices that a loss scaler skipped the step that has just been reduced.

A pipeline sees in its own results that a step is not finite. A scaler also skips because of others:
another module under the same optimizer, or parameters outside of DDP. In that case its scale falls
although the optimizer has not stepped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["SkipWatch"]


class SkipWatch:
    """Reverts a step once its scaler has skipped it.

    Args:
        scaler: The loss scaler, None for none.
        watched: Whether `stepped` is called at the optimizer's steps; without it nothing is ever
            reverted.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, *, watched: bool) -> None:
        self._scaler = scaler if watched else None
        self._undo: Callable[[], None] | None = None
        self._scale = 1.0
        self._stepped = False

    def keep(self, scale: float, undo: Callable[[], None]) -> None:
        """Notes how to revert the step that was just reduced at this scale."""
        if self._scaler is not None:
            self._scale, self._undo, self._stepped = scale, undo, False

    def forget(self) -> None:
        """Makes the last step final."""
        self._undo = None

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the optimizer steps; a fused one does nothing where `found_inf` is set."""
        void = getattr(optimizer, "found_inf", None)
        self._stepped = self._stepped or void is None or not float(void)

    def check(self) -> None:
        """Reverts the last step if it was skipped."""
        undo = self._undo
        if undo is None or self._scaler is None or self._stepped:
            return
        if self._scaler.get_scale() < self._scale:
            self._undo = None
            undo()
