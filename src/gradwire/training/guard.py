"""StepGuard: decides about a step that delivered too little, in the same way on all ranks.

The results of a guarded step wait until the ranks have agreed on the largest share that a worker
lost (`gradwire.training.consultation`). A step that delivered less than the floor is sent again
exactly, or skipped. A step with values that are not finite is never skipped; they reach the
optimizer, or the loss scaler, which handles them. The guard only decides, and the pipeline carries
it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from gradwire.core.agreed import Summary
from gradwire.core.errors import GradwireError
from gradwire.core.saved_state import State
from gradwire.core.settings import Settings
from gradwire.core.transfer_report import TransferReport
from gradwire.policies import Policy

if TYPE_CHECKING:
    from gradwire.training.step import Step

Choice = Literal["apply", "resend", "skip", "halt"]


@dataclass(frozen=True)
class Decision:
    """What becomes of a step.

    Attributes:
        choice: Its results are applied, or all buckets are sent again, or nothing is applied, or
            the training halts.
        error: Why it halts; None else.
    """

    choice: Choice
    error: GradwireError | None = None


class StepGuard:
    """Decides about guarded steps.

    Attributes:
        floor: The share of a step that every worker must deliver, 0 for none.
    """

    def __init__(self, policy: Policy, settings: Settings, rank: int) -> None:
        self.floor = floor_of(policy, settings)
        self._policy = policy
        self._settings = settings
        self._rank = rank
        self._acted = 0  # guarded steps in a row

    def state_dict(self) -> dict[str, object]:
        return {"guarded": self._acted}

    def load_state_dict(self, state: State) -> None:
        self._acted = state.whole("guarded") if "guarded" in state.values else 0

    def decide(self, step: Step, agreed: Summary, lost: float) -> Decision:
        """Decides about a step, the same on all ranks.

        Args:
            lost: The largest share of it that a worker lost.
        """
        if 1.0 - lost >= step.floor - 1e-9:
            self._acted = 0
            return Decision("apply")
        self._acted += 1
        halt = self._policy.halt_after
        if halt and self._acted >= halt:
            error = GradwireError(
                f"rank {self._rank}, step {step.number}: {halt} steps running "
                f"delivered less than floor={step.floor:g} of a gradient (this one "
                f"{1.0 - lost:.3f}): policy {self._policy.name!r} halts (halt_after={halt})"
            )
            return Decision("halt", error)
        if self._settings.guard != "skip":
            return Decision("resend")
        return Decision("apply" if agreed.nonfinite or not step.finite else "skip")


def floor_of(policy: Policy, settings: Settings) -> float:
    """Returns the share of a step that every worker must deliver; 0 where nothing is guarded."""
    floor = policy.floor if settings.floor is None else settings.floor
    return 0.0 if settings.guard == "off" else floor


def sent_twice(first: TransferReport, second: TransferReport) -> TransferReport:
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


def nothing_applied(report: TransferReport) -> TransferReport:
    """Makes the report of a bucket that a skipped step leaves out: nothing of it counted."""
    none = np.zeros_like(report.counted)
    return replace(
        report,
        counted=none,
        applied=none,
        withheld_chunks=np.zeros(0, np.uint32),
        withheld_values=np.zeros(0, np.float32),
        result_error=np.zeros(0, np.float32),
        delivered=(0.0,) * len(report.delivered),
    )
