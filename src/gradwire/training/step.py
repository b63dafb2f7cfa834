"""One training step in progress: its buckets, and the results that wait until it is decided."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.agreed import Ballot, Phase, Summary
from gradwire.core.errors import GradwireError
from gradwire.core.plan import TensorSlot, TransferPlan, TransferReport
from gradwire.training.bucket import Scatter
from gradwire.training.staging import Stage, without_traceback
from gradwire.training.step_end import StepEnd
from gradwire.transport.native import load_engine

__all__ = [
    "Answer",
    "Asked",
    "Awaited",
    "Step",
    "Transfer",
    "is_finite",
    "square_norm",
    "tensor_squares",
]


class Step:
    """One training step in progress.

    Attributes:
        number: Number of the step.
        phase: Its phase.
        ballot: This worker's ballot.
        exact: Whether nothing may be left out.
        flushes: Whether it is exact because the user asked for it.
        strict: Whether it is exact because the loss rose.
        floor: Share that every worker must deliver, else the guard acts; 0 for none.
        started: Time of its start, by the pipeline's clock.
        scaled: Whether a loss scaler skips it if a result is not finite.
        owners: The optimizers of its parameters (`Optimizers.owners`), if it is scaled.
        overflowed: The optimizers of whose parameters a result is not finite, so that they skip it.
        exposed: Time of the start of its last bucket's transfer.
        transfers: Its buckets.
        end: How it ends.
        compared: Numbers that are the same on all ranks, or else their plans differ.
        agreed: Its summary, once the ballots are folded.
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
        compared: tuple[int, ...] = (),
    ) -> None:
        self.number = number
        self.compared = compared
        self.phase = phase
        self.ballot = ballot
        self.exact = exact
        self.flushes = flushes
        self.strict = strict
        self.floor = 0.0 if exact else floor
        self.started = started
        self.scaled = scaled
        self.owners: set[int] = set()
        self.overflowed: set[int] = set()
        self.exposed = started
        self.transfers: list[Transfer] = []
        self.end: StepEnd[Answer] = StepEnd(guarded=self.guarded)
        self.agreed: Summary | None = None
        self.layer_squares: dict[str, float] = {}

    @property
    def guarded(self) -> bool:
        """Whether its results wait for the guard's decision."""
        return self.floor > 0.0

    @property
    def action(self) -> str:
        """What the guard did ("resent", "skipped"), or "strict" after a risen loss; else ""."""
        verdict = self.end.verdict
        if verdict is None:
            return "strict" if self.strict else ""
        return {"resend": "resent", "skip": "skipped"}.get(verdict.choice, "")

    @property
    def finite(self) -> bool:
        """Whether no element of its results is NaN or infinite, as far as all ranks see them.

        Of a scattered sum each rank sees its own shard alone, so that the ballots decide.
        """
        seen = [each.stage.values for each in self.transfers if each.asked.scatter is None]
        return all(map(is_finite, seen))

    @property
    def lost(self) -> float:
        """The share of this worker's elements that did not count at the first attempt."""
        counted = elements = 0.0
        for transfer in self.transfers:
            first = transfer.returned.first
            if first is None:
                continue
            for region, share in zip(transfer.asked.plan.regions, first.delivered, strict=True):
                counted += share * region.length
                elements += region.length
        return 1.0 - counted / elements if elements else 0.0

    def add_layers(self, slots: tuple[TensorSlot, ...], squares: Sequence[float]) -> None:
        """Adds the squared norms of a bucket's tensors; one that is not finite counts as 0."""
        for slot, square in zip(slots, squares, strict=True):
            known = self.layer_squares.get(slot.layer, 0.0)
            self.layer_squares[slot.layer] = known + (square if math.isfinite(square) else 0.0)


class Awaited:
    """The answer to DDP for one bucket.

    Attributes:
        stage: The bucket's staging, which completes `result`.
        result: The future that DDP waits for.
        error: Why the bucket failed.
        delivered: Set when `result` is complete.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.result: torch.futures.Future[torch.Tensor] | None = None
        self.error: BaseException | None = None
        self.delivered = threading.Event()

    def value(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """Returns the averaged bucket, or raises its error; for `.then()` of the future.

        Raising here is the one safe way to fail, because an exception that is set on the future
        itself crashes DDP's backward pass.
        """
        if isinstance(self.error, GradwireError):
            raise without_traceback(self.error)
        if self.error is not None:
            raise self.error
        return self.stage.result

    def deliver(self) -> None:
        """Completes the future with the bucket, or with the error."""
        assert self.result is not None
        try:
            self.stage.deliver(self.result)
        except Exception as error:
            self.error = self.error or error
            if not self.result.done():
                self.result.set_result(self.stage.result)
        finally:
            self.delivered.set()


class Answer(Awaited):
    """The answer to DDP for one bucket of a step.

    Attributes:
        step: The step.
    """

    def __init__(self, step: Step, stage: Stage) -> None:
        super().__init__(stage)
        self.step = step


@dataclass(frozen=True)
class Asked:
    """What is to be sent of one bucket.

    Attributes:
        index: Index among the step's buckets that have elements.
        slots: The bucket's tensors.
        parameters: The bucket's parameters, in order.
        plan: The plan of the first attempt.
        scatter: What becomes of the sum where each worker gets its shard; None where all get all.
        owners: Who holds the parameter of each slot (`Optimizers.owners`); empty where no loss
            scaler skips the step.
    """

    index: int
    slots: tuple[TensorSlot, ...]
    parameters: Sequence[torch.Tensor]
    plan: TransferPlan
    scatter: Scatter | None = None
    owners: tuple[int, ...] = ()


@dataclass
class Sent:
    """What the books did to a bucket before it was sent.

    Attributes:
        kept: What was sent, for the guard.
        pruned: The elements that were pruned, and their values.
        unused: The ranges of unused tensors, and what is owed for them.
        bypasses: Whether the residuals are not involved.
    """

    kept: NDArray[np.float32] | None = None
    pruned: tuple[NDArray[np.intp], NDArray[np.float32]] | None = None
    unused: list[tuple[slice, NDArray[np.float32]]] = field(default_factory=list)
    bypasses: bool = False


@dataclass
class Returned:
    """What came back of a bucket.

    Attributes:
        first: The report of the first attempt.
        report: The report of the attempt that was applied.
        resent: The exact plan of the second attempt, if there was one.
        applied_square: Squared norm of the applied gradient.
    """

    first: TransferReport | None = None
    report: TransferReport | None = None
    resent: TransferPlan | None = None
    applied_square: float = 0.0


class Transfer(Answer):
    """The transfer of one bucket of one step.

    Attributes:
        asked: What is to be sent; the pipeline decides it when the bucket begins.
        sent: What the books did to it before it was sent.
        returned: What came back; the pipeline notes it.
    """

    def __init__(self, step: Step, stage: Stage, asked: Asked) -> None:
        super().__init__(step, stage)
        self.asked = asked
        self.sent = Sent()
        self.returned = Returned()

    @property
    def parts(self) -> list[slice]:
        """The parts of the bucket that are transformed apart: its shards where it is scattered."""
        return [slice(None)] if self.asked.scatter is None else self.asked.scatter.parts

    @property
    def own(self) -> slice:
        """The part of the bucket whose result this worker gets."""
        return slice(None) if self.asked.scatter is None else self.asked.scatter.own

    @property
    def overflowed(self) -> set[int]:
        """The optimizers of whose parameters this worker's result is not finite."""
        values = self.stage.values
        if is_finite(values):
            return set()
        pairs = zip(self.asked.slots, self.asked.owners, strict=True)
        return {
            owner
            for slot, owner in pairs
            if not is_finite(values[slot.offset : slot.offset + slot.length])
        }

    @property
    def applied_plan(self) -> TransferPlan:
        """The plan of the attempt that is applied."""
        return self.returned.resent or self.asked.plan


def layer_norms(sums: NDArray[np.float32], names: list[str], samples: int) -> Mapping[str, float]:
    """Returns the norms by layer, from sums of squares over `samples` steps of workers."""
    return {
        name: math.sqrt(max(float(square), 0.0) / samples)
        for name, square in zip(names, sums, strict=True)
    }


def square_norm(values: NDArray[np.float32] | torch.Tensor) -> float:
    """Returns the squared L2 norm of values; not finite only if an element is not."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    square = float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2
    if math.isfinite(square):
        return square
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def tensor_squares(slots: Sequence[TensorSlot], values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the squared L2 norm of each tensor of a bucket, float64."""
    starts = np.array([slot.offset for slot in slots], np.uint64)
    squares: NDArray[np.float64] = load_engine().square_sums(values, starts)
    return squares


def is_finite(values: NDArray[np.float32] | torch.Tensor) -> bool:
    """Returns whether no element is NaN or infinite."""
    return math.isfinite(square_norm(values))
