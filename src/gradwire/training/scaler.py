"""SkipWatch: whether a loss scaler skipped the step that has just been reduced.

A pipeline knows by its own results that a step is not finite. A scaler skips for others' sake, too:
of another module under the same optimizer, of parameters outside of DDP. Then its scale falls
although the optimizer has not stepped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["SkipWatch"]


class SkipWatch:
    """Takes a step back as soon as its scaler has skipped it. scaler: None for none. watched:
    whether `stepped` hears of the optimizer's steps; nothing is ever taken back otherwise."""

    def __init__(self, scaler: torch.amp.GradScaler | None, *, watched: bool) -> None:
        self._scaler = scaler if watched else None
        self._undo: Callable[[], None] | None = None
        self._scale = 1.0
        self._stepped = False

    def keep(self, scale: float, undo: Callable[[], None]) -> None:
        """Notes how to take back the step that was just reduced at this scale."""
        if self._scaler is not None:
            self._scale, self._undo, self._stepped = scale, undo, False

    def forget(self) -> None:
        """Lets the last step stand."""
        self._undo = None

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the optimizer steps; a fused one is told to do nothing where it must not."""
        void = getattr(optimizer, "found_inf", None)
        self._stepped = self._stepped or void is None or not float(void)

    def look(self) -> None:
        """Takes the last step back if it was skipped."""
        undo = self._undo
        if undo is None or self._scaler is None or self._stepped:
            return
        if self._scaler.get_scale() < self._scale:
            self._undo = None
            undo()
