"""One training step in progress: its buckets, and the results that wait until it is decided."""

import copy
import math
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.agreed import Ballot, Phase
from gradwire.core.errors import GradwireError
from gradwire.core.plan import TensorSlot, TransferPlan, TransferReport
from gradwire.training.loss_watch import Action
from gradwire.training.staging import Stage
from gradwire.transport.native import load_engine

__all__ = ["Answer", "Before", "Step", "Transfer", "is_finite", "square_norm", "tensor_squares"]

Before = list[tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Values in a bucket's books, each with a copy from before its step."""


class Step:
    """One training step in progress.

    Attributes:
        number: Number of the step.
        phase: Its phase.
        ballot: This worker's ballot.
        exact: Whether nothing may be left out.
        flushes: Whether it is exact because the user asked for it.
        action: What the guard did.
        floor: Share that every worker must deliver, else the guard acts; 0 for none.
        started: Time of its start, by the pipeline's clock.
        scaled: Whether a loss scaler skips it if a result is not finite.
        overflowed: Whether a result is not finite.
        exposed: Time of the start of its last bucket's transfer.
        transfers: Its buckets.
        complete: Whether its last bucket has begun.
        held: Buckets that are done, but not yet handed to DDP.
        layer_squares: Squared norms of the layers of this worker's fresh gradient.
    """

    def __init__(
        self,
        number: int,
        phase: Phase,
        ballot: Ballot,
        *,
        exact: bool,
        strict: bool,
        floor: float,
        started: float,
        scaled: bool = False,
        flushes: bool = False,
    ) -> None:
        self.number = number
        self.phase = phase
        self.ballot = ballot
        self.exact = exact
        self.flushes = flushes
        self.action: Action = "strict" if strict else ""
        self.floor = 0.0 if exact else floor
        self.started = started
        self.scaled = scaled
        self.overflowed = False
        self.exposed = started
        self.transfers: list[Transfer] = []
        self.complete = False
        self.held: list[Answer] = []
        self.layer_squares: dict[str, float] = {}

    @property
    def guarded(self) -> bool:
        """Whether its results wait for the guard's decision."""
        return self.floor > 0.0

    @property
    def lost(self) -> float:
        """The share of this worker's elements that did not count at the first attempt."""
        counted = elements = 0.0
        for transfer in self.transfers:
            if transfer.first is None:
                continue
            for region, share in zip(transfer.plan.regions, transfer.first.delivered, strict=True):
                counted += share * region.length
                elements += region.length
        return 1.0 - counted / elements if elements else 0.0

    def add_layers(self, slots: tuple[TensorSlot, ...], squares: Sequence[float]) -> None:
        """Adds the squared norms of a bucket's tensors; one that is not finite counts as 0."""
        for slot, square in zip(slots, squares, strict=True):
            known = self.layer_squares.get(slot.layer, 0.0)
            self.layer_squares[slot.layer] = known + (square if math.isfinite(square) else 0.0)


class Answer:
    """The answer to DDP for one bucket of a step.

    Attributes:
        step: The step.
        stage: The bucket's staging, which completes `result`.
        result: The future that DDP waits for.
        error: Why the bucket failed.
        done: Whether its transfer has ended.
        delivered: Set when `result` is complete.
    """

    def __init__(self, step: Step, stage: Stage) -> None:
        self.step = step
        self.stage = stage
        self.result: torch.futures.Future[torch.Tensor] | None = None
        self.error: BaseException | None = None
        self.done = False
        self.delivered = threading.Event()

    def value(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """Returns the averaged bucket, or raises its error; for `.then()` of the future.

        Raising here is the one safe way to fail, because an exception that is set on the future
        itself crashes DDP's backward pass.
        """
        if isinstance(self.error, GradwireError):
            raise copy.copy(self.error)  # a traceback may hold the frames of the backward pass
        if self.error is not None:
            raise self.error
        return self.stage.buffer


class Transfer(Answer):
    """The transfer of one bucket of one step.

    Attributes:
        index: Index among the step's buckets that have elements.
        slots: The bucket's tensors.
        parameters: The bucket's parameters, in order.
        plan: The plan of the first attempt.
        resent: The guard's exact plan, if it sent the bucket again.
        first: The report of the first attempt.
        report: The report of the attempt that was applied.
        kept: What was sent, for the guard.
        pruned: The elements that were pruned, and their values.
        unused: The ranges of unused tensors, and what is owed for them.
        bypasses: Whether the residuals are not involved.
        before: The bucket's books from before the step.
        applied_square: Squared norm of the applied gradient.
    """

    def __init__(
        self,
        step: Step,
        index: int,
        slots: tuple[TensorSlot, ...],
        parameters: list[torch.Tensor],
        stage: Stage,
        plan: TransferPlan,
    ) -> None:
        super().__init__(step, stage)
        self.index = index
        self.slots = slots
        self.parameters = parameters
        self.plan = plan
        self.resent: TransferPlan | None = None
        self.first: TransferReport | None = None
        self.report: TransferReport | None = None
        self.kept: NDArray[np.float32] | None = None
        self.pruned: tuple[NDArray[np.intp], NDArray[np.float32]] | None = None
        self.unused: list[tuple[slice, NDArray[np.float32]]] = []
        self.bypasses = False
        self.before: Before = []
        self.applied_square = 0.0


def layer_norms(sums: NDArray[np.float32], names: list[str], samples: int) -> Mapping[str, float]:
    """Returns the norms by layer, from sums of squares over `samples` steps of workers."""
    return {
        name: math.sqrt(max(float(square), 0.0) / samples)
        for name, square in zip(names, sums, strict=True)
    }


def square_norm(values: NDArray[np.float32]) -> float:
    """Returns the squared L2 norm of float32 values; not finite only if an element is not."""
    tensor = torch.from_numpy(values)
    square = float(torch.linalg.vector_norm(tensor)) ** 2
    if math.isfinite(square):
        return square
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def tensor_squares(slots: Sequence[TensorSlot], values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the squared L2 norm of each tensor of a bucket, float64."""
    starts = np.array([slot.offset for slot in slots], np.uint64)
    squares: NDArray[np.float64] = load_engine().square_sums(values, starts)
    return squares


def is_finite(values: NDArray[np.float32]) -> bool:
    """Returns whether no element is NaN or infinite."""
    return math.isfinite(square_norm(values))
