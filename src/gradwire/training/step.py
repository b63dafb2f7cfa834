"""One training step on its way: its buckets, and what waits until the step is decided."""

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
"""Values in a bucket's books, and copies of what they were before its step."""


class Step:
    """One training step on its way."""

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
        self.flushes = flushes  # it is exact because somebody asked for that
        self.action: Action = "strict" if strict else ""
        self.floor = 0.0 if exact else floor  # delivered less than this, the guard acts
        self.started = started
        self.scaled = scaled  # a loss scaler skips it if a result is not finite
        self.overflowed = False  # one is not
        self.exposed = started  # since when its last bucket's transfer has been under way
        self.transfers: list[Transfer] = []
        self.complete = False  # its last bucket has begun
        self.held: list[Answer] = []  # done, but DDP has not been told
        self.layer_squares: dict[str, float] = {}  # of this worker's fresh gradient

    @property
    def guarded(self) -> bool:
        """Whether its results wait for the guard's verdict."""
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
        """Adds the squared norms of a bucket's tensors; a non-finite one counts as 0."""
        for slot, square in zip(slots, squares, strict=True):
            known = self.layer_squares.get(slot.layer, 0.0)
            self.layer_squares[slot.layer] = known + (square if math.isfinite(square) else 0.0)


class Answer:
    """What DDP is told of one bucket of a step, and when: `result` is completed by its stage."""

    def __init__(self, step: Step, stage: Stage) -> None:
        self.step = step
        self.stage = stage
        self.result: torch.futures.Future[torch.Tensor] | None = None
        self.error: BaseException | None = None
        self.done = False
        self.delivered = threading.Event()  # `result` is complete

    def value(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """For `.then()`: the averaged bucket. Raising here is the one safe way to fail: an
        exception set on the future itself crashes DDP's backward."""
        if isinstance(self.error, GradwireError):
            raise copy.copy(self.error)  # its traceback may hold whoever runs the backward pass
        if self.error is not None:
            raise self.error
        return self.stage.buffer


class Transfer(Answer):
    """One bucket of one step on its way.

    index: its place among the step's buckets that have elements. parameters: the bucket's, in
    order. first: the report of the first attempt; report: of the one
    that was applied.
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
        self.resent: TransferPlan | None = None  # the guard's exact plan, if it took one
        self.first: TransferReport | None = None
        self.report: TransferReport | None = None
        self.kept: NDArray[np.float32] | None = None  # what was sent, for the guard
        self.pruned: tuple[NDArray[np.intp], NDArray[np.float32]] | None = None  # where, what
        self.unused: list[tuple[slice, NDArray[np.float32]]] = []  # where, what was owed
        self.bypasses = False  # has nothing to do with the residuals
        self.before: Before = []
        self.applied_square = 0.0


def layer_norms(sums: NDArray[np.float32], names: list[str], samples: int) -> Mapping[str, float]:
    """Norms by layer from the sums of squares over `samples` worker steps."""
    return {
        name: math.sqrt(max(float(square), 0.0) / samples)
        for name, square in zip(names, sums, strict=True)
    }


def square_norm(values: NDArray[np.float32]) -> float:
    """The squared L2 norm; NaN or infinite only if an element is."""
    tensor = torch.from_numpy(values)
    square = float(torch.linalg.vector_norm(tensor)) ** 2
    if math.isfinite(square):
        return square
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def tensor_squares(slots: Sequence[TensorSlot], values: NDArray[np.float32]) -> NDArray[np.float64]:
    """The squared L2 norm of each tensor."""
    starts = np.array([slot.offset for slot in slots], np.uint64)
    squares: NDArray[np.float64] = load_engine().square_sums(values, starts)
    return squares


def is_finite(values: NDArray[np.float32]) -> bool:
    """Whether no element is NaN or infinite."""
    return math.isfinite(square_norm(values))
