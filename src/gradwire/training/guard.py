"""StepGuard: acts on a step that delivered too little, in the same way on all ranks.

The results of a guarded step wait until the ranks have agreed on the largest share that a worker
lost (`gradwire.training.consultation`). A step that delivered less than the floor is sent again
exactly, or skipped. A step with values that are not finite is never skipped; they reach the
optimizer, or the loss scaler, which handles them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from gradwire.core.agreed import Summary
from gradwire.core.errors import GradwireError
from gradwire.core.plan import TransferReport
from gradwire.core.saved_state import State
from gradwire.core.settings import Settings
from gradwire.policies import Policy
from gradwire.training.feedback.books import Books
from gradwire.training.step import Step, Transfer, is_finite
from gradwire.transport.communicator import Communicator, Handle

__all__ = ["StepGuard"]


class StepGuard:
    """Decides about guarded steps.

    Args:
        communicator: The communicator.
        policy: The policy.
        settings: The settings.
        books: The books of the buckets.
        settle: Updates a transfer's books by a report, once it is decided what is applied.
        attempt: Runs a part of a step's end; an exception fails the step.

    Attributes:
        floor: The share of a step that every worker must deliver, 0 for none.
    """

    def __init__(
        self,
        communicator: Communicator,
        policy: Policy,
        settings: Settings,
        books: Books,
        *,
        settle: Callable[[Transfer, TransferReport], None],
        attempt: Callable[[Step, Callable[[], None]], None],
    ) -> None:
        floor = settings.floor if settings.floor is not None else policy.floor
        self.floor = 0.0 if settings.guard == "off" else floor
        self._communicator = communicator
        self._policy = policy
        self._settings = settings
        self._books = books
        self._settle = settle
        self._attempt = attempt
        self._acted = 0  # guarded steps in a row
        self._skipped: list[torch.Tensor] = []
        self._mutex = threading.Lock()

    def state_dict(self) -> dict[str, object]:
        """Returns the number of guarded steps in a row."""
        return {"guarded": self._acted}

    def read(self, state: State) -> Callable[[], None]:
        """Checks a saved state, which may lack the number, and returns a function that restores it.

        Raises:
            ConfigError: The state is damaged.
        """
        acted = state.whole("guarded") if "guarded" in state.values else 0

        def take() -> None:
            self._acted = acted

        return take

    def take_skipped(self) -> list[torch.Tensor]:
        """Returns, once, the parameters of a step just reduced that the optimizer must skip."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def judge(self, step: Step, agreed: Summary, lost: float, conclude: Callable[[], None]) -> None:
        """Decides about a step by the largest share that a worker lost, the same on all ranks.

        Args:
            step: The step.
            agreed: The step's summary.
            lost: The share.
            conclude: Called once it is decided what is applied and the books are updated.

        Raises:
            GradwireError: The policy halts the training.
        """
        if 1.0 - lost >= step.floor - 1e-9:
            self._acted = 0
            self._settle_all(step)
            conclude()
            return
        self._acted += 1
        halt = self._policy.halt_after
        if halt and self._acted >= halt:
            raise GradwireError(
                f"rank {self._communicator.job_rank}, step {step.number}: {halt} steps running "
                f"delivered less than floor={step.floor:g} of a gradient (this one "
                f"{1.0 - lost:.3f}): policy {self._policy.name!r} halts (halt_after={halt})"
            )
        if self._settings.guard != "skip":
            self._resend(step, conclude)
            return
        if agreed.nonfinite or not all(is_finite(each.stage.host()) for each in step.transfers):
            self._settle_all(step)
        else:
            self._skip_step(step)
        conclude()

    def _settle_all(self, step: Step) -> None:
        for transfer in step.transfers:
            assert transfer.report is not None
            self._settle(transfer, transfer.report)

    def _resend(self, step: Step, conclude: Callable[[], None]) -> None:
        """Sends all buckets again, exactly, in their order."""
        step.action = "resent"
        left = len(step.transfers)

        def resent(transfer: Transfer, done: Handle) -> None:
            nonlocal left
            assert transfer.first is not None
            transfer.report = _both(transfer.first, done.report)
            with self._mutex:
                left -= 1
                over = left == 0
            if over:
                self._settle_all(step)
                conclude()

        def callback(transfer: Transfer) -> Callable[[Handle], None]:
            return lambda done: self._attempt(step, lambda: resent(transfer, done))

        for transfer in step.transfers:
            transfer.resent = transfer.plan.exact()
            self._books.restore_pruned(transfer)
            host = transfer.stage.host()
            np.copyto(host, self._books.sent(transfer))
            handle = self._communicator.all_reduce(host, transfer.resent, step=step.number)
            handle.add_done_callback(callback(transfer))

    def _skip_step(self, step: Step) -> None:
        """Applies nothing: all that was sent returns to the residuals, and the optimizer skips."""
        step.action = "skipped"
        for transfer in step.transfers:
            assert transfer.report is not None
            self._skipped.extend(transfer.parameters)
            none = np.zeros_like(transfer.report.counted)
            transfer.report = replace(
                transfer.report,
                counted=none,
                applied=none,
                withheld_chunks=np.zeros(0, np.uint32),
                withheld_values=np.zeros(0, np.float32),
                result_error=np.zeros(0, np.float32),
                delivered=(0.0,) * len(transfer.report.delivered),
            )
            transfer.stage.host().fill(0.0)
            self._settle(transfer, transfer.report)


def _both(first: TransferReport, second: TransferReport) -> TransferReport:
    """Makes the report of a bucket that was sent twice: its outcome, and the cost of both."""
    return replace(
        second,
        stats_sum=first.stats_sum,
        stats_max=first.stats_max,
        exceeded=first.exceeded,
        effective_bounds=first.effective_bounds,
        push_s=first.push_s + second.push_s,
        pull_s=first.pull_s + second.pull_s,
        total_s=first.total_s + second.total_s,
        bytes_sent=first.bytes_sent + second.bytes_sent,
        packets_sent=first.packets_sent + second.packets_sent,
        retransmissions=first.retransmissions + second.retransmissions,
        passes=first.passes,
    )
