"""One training step in progress, and the transfers of its buckets."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.agreed import Ballot, Phase
from gradwire.core.errors import TransferError
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import TensorSlot
from gradwire.core.transfer_report import TransferReport
from gradwire.training.bucket import Bucket
from gradwire.training.guard import Decision
from gradwire.training.staging import Stage
from gradwire.transport.communicator import Communicator
from gradwire.transport.native import load_engine
from gradwire.transport.transfer import Handle

T = TypeVar("T")
Ending: TypeAlias = Generator[Handle, Any, T]
"""A part of a step's end, which yields each transfer that it waits for."""


@dataclass(eq=False)
class Step:
    """One training step in progress.

    Attributes:
        started: Time of its start, by the pipeline's clock.
        exact: Whether nothing may be left out.
        after_rise: Whether it is exact because the loss rose.
        flushes: Whether it is exact because the user asked for it.
        way: What carries its transfers.
        returns: Whether it may be sent again over the host's network.
        confirmed: Whether its end was confirmed (`GradientPipeline.confirm_end`).
        floor: Share that every worker must deliver, else the guard acts; 0 for none.
        scaled: Whether a loss scaler skips it if a result is not finite.
        compared: Numbers that are the same on all ranks, or else their plans differ.
        owners: The optimizers of its parameters (`Optimizers.owners`), if it is scaled.
        overflowed: The optimizers of whose parameters a result is not finite, so that they skip it.
        exposed: Time of the start of its last bucket's transfer.
        layer_squares: Squared norms of the layers of this worker's fresh gradient.
        open: The stages of buckets that have begun and are not done.
        last: Whether the last bucket has begun.
        held: The stages of results that wait for the end of the step.
        abandoned: Whether another step has begun before its last bucket, so that it never ends.
    """

    number: int
    phase: Phase
    ballot: Ballot
    started: float
    way: Communicator
    exact: bool = False
    after_rise: bool = False
    flushes: bool = False
    returns: bool = False
    confirmed: bool = False
    floor: float = 0.0
    scaled: bool = False
    compared: tuple[int, ...] = ()
    owners: set[int] = field(default_factory=set)
    overflowed: set[int] = field(default_factory=set)
    exposed: float = field(init=False)
    transfers: list[Transfer] = field(default_factory=list)
    layer_squares: dict[str, float] = field(default_factory=dict)
    open: set[Stage] = field(default_factory=set)
    last: bool = False
    held: list[Stage] = field(default_factory=list)
    abandoned: bool = False
    failed: bool = False
    decision: Decision | None = None

    def __post_init__(self) -> None:
        self.exposed = self.started

    @property
    def complete(self) -> bool:
        return self.last and not self.open and not self.abandoned

    def take_held(self) -> list[Stage]:
        held, self.held = self.held, []
        return held

    @property
    def guarded(self) -> bool:
        """Whether its results wait for the guard's decision."""
        return self.floor > 0.0

    @property
    def held_back(self) -> bool:
        """Whether its results wait for its end, because it may be sent again."""
        return self.guarded or self.returns

    @property
    def action(self) -> str:
        """What the guard did ("resent", "skipped"), or "strict" after a risen loss; else ""."""
        if self.decision is None:
            return "strict" if self.after_rise else ""
        return {"resend": "resent", "skip": "skipped"}.get(self.decision.choice, "")

    @property
    def finite(self) -> bool:
        """Whether no element of its results is NaN or infinite, as far as all ranks see them.

        Of a scattered sum each rank sees its own shard alone, so that the ballots decide.
        """
        seen = [each.stage.values for each in self.transfers if each.bucket.scatter is None]
        return all(map(is_finite, seen))

    @property
    def lost(self) -> float:
        """The share of this worker's elements that did not count at the first attempt."""
        counted = elements = 0.0
        for transfer in self.transfers:
            first = transfer.first
            if first is None:
                continue
            for region, share in zip(transfer.plan.regions, first.delivered, strict=True):
                counted += share * region.length
                elements += region.length
        return 1.0 - counted / elements if elements else 0.0

    def add_layers(self, slots: tuple[TensorSlot, ...], squares: Sequence[float]) -> None:
        """Adds the squared norms of a bucket's tensors; one that is not finite counts as 0."""
        for slot, square in zip(slots, squares, strict=True):
            known = self.layer_squares.get(slot.layer, 0.0)
            self.layer_squares[slot.layer] = known + (square if math.isfinite(square) else 0.0)


@dataclass(eq=False)
class Transfer:
    """The transfer of one bucket of one step.

    Attributes:
        owners: Who holds the parameter of each slot (`Optimizers.owners`); empty where no loss
            scaler skips the step.
        bypasses: Whether the residuals are not involved.
        kept: What was sent, where it may be sent again.
        stats: Its statistics.
        pruned: The elements that were pruned before the bucket was sent, and their values.
        lost: Why the engine did not carry it, where its step may be sent again.
        unused: The ranges of unused tensors, and their residuals.
        report: The report of the attempt that was applied.
        applied_square: Squared norm of the applied gradient.
    """

    step: Step
    index: int
    bucket: Bucket
    slots: tuple[TensorSlot, ...]
    plan: TransferPlan
    owners: tuple[int, ...]
    stage: Stage
    bypasses: bool = False
    kept: NDArray[np.float32] | None = None
    stats: tuple[float, ...] = ()
    lost: TransferError | None = None
    pruned: tuple[NDArray[np.intp], NDArray[np.float32]] | None = None
    unused: list[tuple[slice, NDArray[np.float32]]] = field(default_factory=list)
    first: TransferReport | None = None
    report: TransferReport | None = None
    resent: TransferPlan | None = None
    applied_square: float = 0.0

    @property
    def parts(self) -> list[slice]:
        """The parts of the bucket that are transformed apart: its shards where it is scattered."""
        return [slice(None)] if self.bucket.scatter is None else self.bucket.scatter.parts

    @property
    def own(self) -> slice:
        return slice(None) if self.bucket.scatter is None else self.bucket.scatter.own

    @property
    def overflowed(self) -> set[int]:
        values = self.stage.values
        if is_finite(values):
            return set()
        pairs = zip(self.slots, self.owners, strict=True)
        return {
            owner
            for slot, owner in pairs
            if not is_finite(values[slot.offset : slot.offset + slot.length])
        }

    @property
    def applied_plan(self) -> TransferPlan:
        return self.resent or self.plan


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
    starts = np.array([slot.offset for slot in slots], np.uint64)
    squares: NDArray[np.float64] = load_engine().square_sums(values, starts)
    return squares


def is_finite(values: NDArray[np.float32] | torch.Tensor) -> bool:
    return math.isfinite(square_norm(values))
