"""The messages between a host's leader and its followers, in the order of a bucket's way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradwire.core.agreed import Ballot
from gradwire.core.errors import Cause, GradwireError, TransferError
from gradwire.core.report import StepReport


@dataclass(frozen=True)
class MemoryRequest:
    """A follower needs memory for a bucket at this position in its step."""

    position: int
    elements: int


@dataclass(frozen=True)
class Memory:
    """The memory that comes along is for the bucket at this position, of so many elements."""

    position: int
    elements: int


@dataclass(frozen=True)
class RowReady:
    """A follower's row of a bucket is in the memory.

    Attributes:
        bucket: Number of the bucket, counted since the ranks met.
        ballot: With a step's first bucket, the follower's ballot; else None.
    """

    bucket: int
    elements: int
    ballot: Ballot | None


@dataclass(frozen=True)
class Sum:
    """All rows of a bucket are there, so each rank sums its shard."""

    bucket: int


@dataclass(frozen=True)
class Summed:
    """A follower has summed its shard of a bucket."""

    bucket: int


@dataclass(frozen=True)
class Working:
    """The leader has begun another transfer at a step's end, so its answer takes longer."""


@dataclass(frozen=True)
class End:
    """How a step ended.

    Attributes:
        skipped: Whether the optimizer must skip the step.
        owners: The optimizers of its parameters where a loss scaler may skip it, else none.
        overflowed: Those of whose parameters a result is not finite.
        flushes: Whether the step was exact because a user asked for it.
        kept: What the leader keeps of it that decides later steps, for the followers' states.
    """

    report: StepReport
    skipped: bool
    owners: set[int]
    overflowed: set[int]
    flushes: bool
    kept: dict[str, object]


@dataclass(frozen=True)
class Result:
    """The result of a bucket is in the memory.

    Attributes:
        end: How the step ended, with the result that was held back until then; else None.
    """

    bucket: int
    end: End | None


@dataclass(frozen=True)
class Failed:
    """A rank of the host has failed, so all of them stop.

    It holds no exception, since not every one can be pickled.

    Attributes:
        rank: As in TransferError; the same holds for step and cause.
        cause: The kind of failure; "" where the error is no TransferError.
    """

    text: str
    rank: int = -1
    step: int = -1
    cause: Cause | Literal[""] = ""

    @staticmethod
    def of(error: Exception) -> Failed:
        text = str(error) or type(error).__name__
        if isinstance(error, TransferError):
            return Failed(text, error.rank, error.step, error.cause)
        return Failed(text)

    @property
    def error(self) -> GradwireError:
        """The error as the other ranks of the host raise it."""
        if not self.cause:
            return GradwireError(self.text)
        return TransferError(self.text, rank=self.rank, step=self.step, cause=self.cause)
