"""Books: residuals and ages of one attachment's buckets, before and after each transfer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire import transforms
from gradwire.communicator import Communicator
from gradwire.errors import ConfigError
from gradwire.feedback import AgeBook, ResidualBook, join_chunks, nonfinite_chunks
from gradwire.plans import TransferReport
from gradwire.settings import Settings
from gradwire.steps import Transfer, is_finite

__all__ = ["Books"]


@dataclass
class Books:
    """What did not count, kept for later (`gradwire.feedback`)."""

    communicator: Communicator
    settings: Settings

    def __post_init__(self) -> None:
        self._residuals = ResidualBook() if self.settings.feedback else None
        self._ages = AgeBook(self.settings.max_age)

    def open(self, transfer: Transfer, host: NDArray[np.float32]) -> None:
        """Adds what is owed to a bucket about to be sent, and keeps aside what is sent where the
        guard may have to send it again."""
        if self._residuals is not None:
            self._residuals.add_to(transfer.slots, host)
        elif transfer.step.guarded:
            transfer.kept = host.copy()

    def critical(
        self, transfer: Transfer, host: NDArray[np.float32], finite: bool
    ) -> NDArray[np.uint32] | None:
        """The chunks that have to count: those of full age, and those with a value that is not
        finite. finite: whether the fresh gradient is."""
        assert transfer.plan is not None
        grid = self.communicator.chunk_grid(transfer.plan)
        parts = [self._ages.due(transfer.slots, grid)]
        if not finite or (self._residuals is not None and not is_finite(host)):
            parts.append(nonfinite_chunks(grid, host))
        return join_chunks(parts)

    def settle(self, transfer: Transfer, report: TransferReport) -> None:
        """Leaves in the residuals what did not count, and ages the chunks."""
        plan = transfer.resent or transfer.plan
        assert plan is not None
        grid = self.communicator.chunk_grid(plan)
        if self._residuals is not None:
            keep_error = None
            if plan.encoding != "f32":
                keep_error = functools.partial(self.communicator.keep_encoding_error, plan)
            owed = bool(len(report.withheld_chunks) or len(report.result_error))
            turn = plan.transform != "none" and (owed or not report.counted.all())
            sent = self._residuals.sent(transfer.slots)
            if turn:  # what is owed is known by coefficient
                transforms.forward(sent, plan.seed)
            self._residuals.settle(transfer.slots, grid, report, plan.scale, keep_error)
            if turn:
                transforms.inverse(sent, plan.seed)
        self._ages.settle(transfer.slots, grid, report)

    def sent(self, transfer: Transfer) -> NDArray[np.float32]:
        """What this worker sent: the residual as it is before it is settled, or the copy."""
        if self._residuals is not None:
            return self._residuals.sent(transfer.slots)
        assert transfer.kept is not None
        return transfer.kept

    def rescale(self, factor: float) -> None:
        """Multiplies all residuals (a gradient scaler has changed its scale)."""
        if self._residuals is not None:
            self._residuals.rescale(factor)

    def state_dict(self) -> dict[str, object]:
        """Residuals and ages by parameter name, as tensors (this rank's own)."""
        residuals = {} if self._residuals is None else self._residuals.state_dict()
        return {
            "residuals": {name: torch.from_numpy(v) for name, v in residuals.items()},
            "ages": {name: torch.from_numpy(v) for name, v in self._ages.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restores what `state_dict` returned; other keys are left alone. Raises ConfigError."""
        residuals = _arrays(state["residuals"])
        ages = _arrays(state.get("ages", {}))
        if self._residuals is None and any(values.any() for values in residuals.values()):
            raise ConfigError(
                "gradwire state with residuals loaded with error_feedback off: their gradient "
                "would be lost; set error_feedback=True, or flush() before saving"
            )
        self._ages.load_state_dict(ages)
        if self._residuals is not None:
            self._residuals.load_state_dict(residuals)


def _arrays(tensors: object) -> dict[str, NDArray[Any]]:
    """Arrays by name from a state's tensors, wherever the loader mapped them to."""
    assert isinstance(tensors, dict)
    return {name: torch.as_tensor(values).cpu().numpy() for name, values in tensors.items()}
