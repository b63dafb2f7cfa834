"""Books: the values kept for one attachment's buckets before and after each transfer.

They are residuals, velocities, the chunks' ages and the magnitudes of results.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core import callers
from gradwire.core.errors import ConfigError, suggestion
from gradwire.core.plan import TransferPlan
from gradwire.core.saved_state import State
from gradwire.core.settings import Settings
from gradwire.core.transfer_report import TransferReport
from gradwire.policies import Policy
from gradwire.training.feedback.chunked import ChunkBook
from gradwire.training.feedback.earlier import Earlier
from gradwire.training.feedback.flat import FlatBook
from gradwire.training.feedback.pruning import smallest_weights
from gradwire.training.feedback.residuals import (
    AgeBook,
    ResidualBook,
    join_chunks,
    nonfinite_chunks,
)
from gradwire.training.feedback.result_sizes import MagnitudeBook
from gradwire.training.feedback.velocity import VelocityBook
from gradwire.training.step import Transfer, is_finite
from gradwire.transport import transforms
from gradwire.transport.communicator import Communicator


@dataclass
class Books:
    """The values that error feedback and policies keep from step to step.

    These are the parts that did not count (`gradwire.training.feedback.residuals`), the momentum
    that a worker keeps (`gradwire.training.feedback.velocity`), and the magnitudes of results
    (`gradwire.training.feedback.result_sizes`).
    """

    communicator: Communicator
    policy: Policy
    settings: Settings

    def __post_init__(self) -> None:
        momentum = self.policy.momentum
        self._velocities = VelocityBook(momentum) if momentum else None
        self._residuals = ResidualBook() if self.settings.feedback else None
        self._ages = AgeBook(self.settings.max_age)
        self._magnitudes = MagnitudeBook() if self.policy.ranks_results else None
        self._sent = FlatBook()  # copies of what may be sent again, without residuals
        books = self._residuals, self._velocities
        self._earlier = [Earlier(book) for book in books if book is not None]
        self.finds_unused = False  # whether DDP looks for parameters that a step does not use
        self._selects = self.communicator.world_size > 1  # a single worker keeps everything

    def open(self, transfer: Transfer, host: NDArray[np.float32]) -> None:
        """Prepares a bucket that is about to be sent, in place.

        It adds the residuals, keeps a copy where the step may be sent again, and removes what the
        plan prunes.
        """
        unused = self._unused(transfer, host)
        if self._residuals is not None:
            transfer.bypasses = self._bypasses(transfer)
        if transfer.step.scaled:
            self._remember(transfer, host.size)
        if self._velocities is not None:
            self._velocities.advance(transfer.slots, host)
        if transfer.bypasses:
            return
        if self._residuals is not None:
            self._residuals.add_to(transfer.slots, host)
            sent = self.sent(transfer)
            for part in unused:
                transfer.unused.append((part, sent[part].copy()))
                sent[part] = host[part] = 0.0
            if transfer.plan.pruned and self._selects:
                self._prune(transfer, host)
        elif transfer.step.held_back:
            transfer.kept = self._sent.open(transfer.slots, host.size)
            np.copyto(transfer.kept, host)

    @property
    def empty(self) -> bool:
        """Whether it keeps nothing of any bucket, so that it reads no values."""
        return self._residuals is None and self._velocities is None and self._magnitudes is None

    def _bypasses(self, transfer: Transfer) -> bool:
        """Returns whether a bucket needs no residuals: there are none, and all of it will count."""
        assert self._residuals is not None
        plan = transfer.plan
        exact = not plan.lossy and plan.encoding == "f32" and not transfer.step.held_back
        return exact and self._residuals.clean(transfer.slots)

    def _remember(self, transfer: Transfer, elements: int) -> None:
        """Keeps copies of a bucket's books, for a step that a loss scaler may skip."""
        for earlier in self._earlier:
            if not (transfer.bypasses and earlier.book is self._residuals):
                earlier.keep(transfer.slots, elements)

    def undo(self, keys: Collection[str]) -> None:
        """Restores the books of these parameters to their values before gradients that are void.

        These are the gradients since `forget` was last called for the parameters.
        """
        for earlier in self._earlier:
            earlier.restore(keys)
        if self._residuals is not None:
            self._residuals.mark_changed(keys)

    def forget(self, keys: Collection[str]) -> None:
        """Notes that an optimizer has taken the gradients of these parameters."""
        for earlier in self._earlier:
            earlier.forget(keys)

    def critical(
        self, transfer: Transfer, host: NDArray[np.float32], finite: bool
    ) -> NDArray[np.uint32] | None:
        """Returns the chunks that have to count: overdue ones, and those that are not finite."""
        grid = self.communicator.chunk_grid(transfer.plan)
        parts = [self._ages.due(transfer.slots, grid)]
        if not finite or (self._residuals is not None and not is_finite(host)):
            parts.append(nonfinite_chunks(grid, host))
        return join_chunks(parts)

    def settle(self, transfer: Transfer, report: TransferReport) -> None:
        """Updates residuals and ages by a report: what did not count stays in the residuals."""
        plan = transfer.applied_plan
        grid = self.communicator.chunk_grid(plan)
        if self._residuals is not None and not transfer.bypasses:
            keep_error = None
            if plan.encoding != "f32":
                keep_error = functools.partial(self._keep_error, transfer, plan)
            owed = bool(len(report.withheld_chunks) or len(report.result_error))
            changed = keep_error is not None or owed or not report.counted.all()
            turn = plan.transform != "none" and changed
            sent = self._residuals.values(transfer.slots)
            if turn:  # the report is about coefficients
                for part in transfer.parts:
                    transforms.forward(sent[part], plan.seed)
            self._residuals.settle(transfer.slots, grid, report, plan.scale, keep_error)
            if turn:
                for part in transfer.parts:
                    transforms.inverse(sent[part], plan.seed)
            self._put_back(transfer)
        self._ages.settle(transfer.slots, grid, report)

    def close(self) -> None:
        self._sent.clear()
        for earlier in self._earlier:
            earlier.clear()

    def last_magnitudes(self, transfer: Transfer) -> NDArray[np.float32] | None:
        """Returns the mean magnitudes of the chunks' last results.

        It is None if the policy does not use them, or none is known.
        """
        if self._magnitudes is None or not self._selects:
            return None
        grid = self.communicator.chunk_grid(transfer.plan)
        return self._magnitudes.of(transfer.slots, grid)

    def note_result(
        self,
        transfer: Transfer,
        report: TransferReport,
        result: NDArray[np.float32],
        grad_scale: float,
    ) -> None:
        if self._magnitudes is not None and self._selects:
            grid = self.communicator.chunk_grid(transfer.applied_plan)
            self._magnitudes.note(transfer.slots, grid, report, result, grad_scale)

    def _prune(self, transfer: Transfer, host: NDArray[np.float32]) -> None:
        where = smallest_weights(
            transfer.slots,
            transfer.bucket.parameters,
            transfer.plan.pruned,
            self.policy.vectors,
        )
        where = where[np.isfinite(host[where])]  # values that are not finite are always sent
        transfer.pruned = where, host[where]
        self.sent(transfer)[where] = 0.0
        host[where] = 0.0

    def restore_pruned(self, transfer: Transfer) -> None:
        """Returns what was pruned to what is sent, for a transfer that sends everything."""
        if transfer.pruned is not None:
            where, values = transfer.pruned
            self.sent(transfer)[where] += values
            transfer.pruned = None

    def _unused(self, transfer: Transfer, host: NDArray[np.float32]) -> list[slice]:
        """Returns the ranges of tensors that the step did not use: their fresh gradient is zero.

        DDP ignores the results of tensors that no worker used, so the residual of such a tensor
        is not sent. This needs no agreement: the result of a tensor counts if any worker used it,
        and a worker that did not use it keeps its residual until it does.
        """
        if not self.finds_unused or self._residuals is None:
            return []
        parts = [slice(slot.offset, slot.offset + slot.length) for slot in transfer.slots]
        return [part for part in parts if not host[part].any()]

    def _put_back(self, transfer: Transfer) -> None:
        """Returns to the residuals what was excluded from the transfer."""
        self.restore_pruned(transfer)
        if transfer.unused and self._residuals is not None:
            self._residuals.mark_dirty(transfer.slots)
        for part, values in transfer.unused:
            self.sent(transfer)[part] += values
        transfer.unused = []

    def _keep_error(
        self,
        transfer: Transfer,
        plan: TransferPlan,
        sent: NDArray[np.float32],
        counted: NDArray[np.uint8],
    ) -> None:
        self.communicator.keep_encoding_error(plan, sent, counted)
        if plan.transform != "none":
            return  # these are coefficients, which belong to no single element
        self._put_back(transfer)
        if self._velocities is not None and plan.encoding == "topk" and self._selects:
            self._velocities.mask(transfer.slots, sent)

    def sent(self, transfer: Transfer) -> NDArray[np.float32]:
        """Returns what this worker sent: the residual before it is settled, or the copy."""
        if self._residuals is not None:
            return self._residuals.values(transfer.slots)
        assert transfer.kept is not None
        return transfer.kept

    def rescale(self, factor: float) -> None:
        for book in (self._residuals, self._velocities):
            if book is not None:
                book.rescale(factor)
        for earlier in self._earlier:
            earlier.rescale(factor)

    def state_dict(self) -> dict[str, object]:
        """Returns residuals, velocities, ages and magnitudes by parameter name, as tensors.

        They are this rank's own.
        """
        return {
            "residuals": _tensors(self._residuals),
            "velocities": _tensors(self._velocities),
            "ages": _tensors(self._ages),
            "magnitudes": _tensors(self._magnitudes),
        }

    @property
    def parts(self) -> list[object]:
        """All that `load_state_dict` changes."""
        books = self._residuals, self._velocities, self._ages, self._magnitudes
        return [each for each in (*books, *self._earlier) if each is not None]

    def load_state_dict(
        self, state: State, trained: Mapping[str, int] | None, *, strict: bool
    ) -> None:
        """Restores what `state_dict` returned.

        Args:
            trained: Number of elements of the model's parameters by name; None where no model is
                known.
            strict: Whether values of other parameters are an error; else they are dropped with a
                warning.
        """
        books: dict[str, FlatBook | ChunkBook] = {
            "residuals": self._residuals or ResidualBook(),
            "velocities": self._velocities or VelocityBook(0.0),
            "ages": self._ages,
            "magnitudes": self._magnitudes or MagnitudeBook(),
        }
        dropped: set[str] = set()
        for key, book in books.items():
            if key != "residuals" and key not in state.values:
                continue
            arrays = _arrays(state.part(key))
            filled = any(values.any() for values in arrays.values())
            if filled and key == "residuals" and self._residuals is None:
                raise ConfigError.about(
                    f"{state.at(key)}",
                    "residuals loaded with error_feedback off: their gradient would be lost; "
                    "set error_feedback=True, or flush() before saving",
                    setting=state.at(key),
                )
            if filled and key == "velocities" and self._velocities is None:
                raise ConfigError.about(
                    f"{state.at(key)}",
                    "velocities loaded without a momentum memory: they would be lost; attach "
                    "with the momentum= of the state, or load it without them",
                    setting=state.at(key),
                )
            if trained is not None:
                unknown = [name for name in arrays if name not in trained]
                if unknown and strict:
                    raise ConfigError.about(
                        f"{state.at(key)}[{unknown[0]!r}]",
                        f"the model trains no such parameter{suggestion(unknown[0], trained)}; "
                        "load_state_dict(state, strict=False) drops values of other parameters",
                        setting=f"{state.at(key)}[{unknown[0]!r}]",
                    )
                dropped.update(unknown)
                arrays = {name: values for name, values in arrays.items() if name in trained}
            book.load_state_dict(arrays)
            if trained is not None:
                _check_sizes(state.at(key), key, arrays, trained)
        if dropped:
            callers.warn(
                f"gradwire state: dropped what is kept of {', '.join(sorted(set(dropped)))}, which "
                "the model does not train",
            )
        for each in self._earlier:
            each.clear()


def _tensors(book: FlatBook | ChunkBook | None) -> dict[str, torch.Tensor]:
    state: Mapping[str, NDArray[Any]] = {} if book is None else book.state_dict()
    return {name: torch.from_numpy(values) for name, values in state.items()}


def _check_sizes(
    where: str, key: str, arrays: Mapping[str, NDArray[Any]], trained: Mapping[str, int]
) -> None:
    for name, values in arrays.items():
        elements = int(values[:, 0].sum()) if key in ("ages", "magnitudes") else values.size
        if elements != trained[name]:
            raise ConfigError.about(
                f"{where}[{name!r}] is of {elements} elements, the parameter has {trained[name]}",
                "the state is of another model",
                setting=f"{where}[{name!r}]",
                value=elements,
            )


def _arrays(part: State) -> dict[str, NDArray[Any]]:
    """Returns arrays by name from a state's tensors, on whatever device the loader put them."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, values in part.values.items():
        if not isinstance(name, str) or not isinstance(values, (torch.Tensor, np.ndarray)):
            raise part.wrong(name, "a tensor by a parameter's name")
        tensor = torch.as_tensor(values).detach().cpu()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        arrays[name] = tensor.numpy()
    return arrays
