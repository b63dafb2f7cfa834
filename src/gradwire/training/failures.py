"""Failures: why a pipeline has stopped, and what every later use of it raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from gradwire.core.errors import GradwireError, TransferError


class Failures:
    """The first failure of a pipeline, which stops it for good.

    Attributes:
        first: The failure; None before one.
        when_stopped: Called once, on any thread, when a step has failed.
        explain: Returns what an error is told as.
    """

    def __init__(self) -> None:
        self.first: BaseException | None = None
        self.when_stopped: Callable[[], None] = lambda: None
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        self._step_lost = False  # the failure met a step, or a later one was refused

    def stopped(self, more: str = "") -> GradwireError | None:
        """Returns the error of every use of this pipeline after a failure; None before one."""
        failure = self.first
        if failure is None:
            return None
        text = f"gradwire stopped at an earlier failure: {str(failure) or repr(failure)}"
        text = f"{text}; {more}" if more else text
        if isinstance(failure, TransferError):
            return TransferError(text, rank=failure.rank, step=failure.step, cause=failure.cause)
        return GradwireError(text)

    def check(self, more: str = "") -> None:
        """Raises the error that `stopped` returns, if a step has failed.

        A rank that leaves between two steps stops the pipeline, and the step before is whole.
        """
        stopped = self.stopped(more) if self._step_lost else None
        if stopped is not None:
            raise stopped

    def explained(self, error: BaseException) -> BaseException:
        """Returns what `explain` makes of an error; the same one where that fails."""
        with contextlib.suppress(Exception):
            return self.explain(error)
        return error

    def note(self, error: BaseException, *, in_step: bool) -> None:
        """Notes the first failure, and whether a step fails by it; one thread at a time."""
        self.first = self.first or error
        if in_step and not self._step_lost:
            self._step_lost = True
            self.when_stopped()
