"""StepEnd: how a training step ends, as a state machine over its buckets.

Events go in, actions come out. The machine starts no transfer, holds no lock and looks into no
tensor, so its owner does what it asks for and reports what came of it:

    end = StepEnd(guarded=False)
    end.handle(Begun("a"))  # the owner sends bucket a
    end.handle(Begun("b", last=True))
    end.handle(Done("a"))  # [Deliver(("a",))]
    end.handle(Done("b"))  # [Fold()]
    end.handle(Folded())  # [Conclude()]
    end.handle(Concluded())  # [Deliver(("b",))]

A bucket whose end yields no action is held back. The last result of a step is held back until the
step is concluded, because DDP goes on with it. All results of a guarded step are held back, because
the guard may yet send them again or withdraw them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from gradwire.training.guard import Verdict

__all__ = ["Action", "Event", "State", "StepEnd"]

B = TypeVar("B", bound=Hashable)
"""A bucket, of which the machine only knows that it is the same one later."""

State = Literal[
    "running",
    "abandoned",
    "folding",
    "comparing",
    "consulting",
    "resending",
    "concluding",
    "over",
    "failed",
]


# ---------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Begun(Generic[B]):
    """A bucket begins, and with `last` no other one after it."""

    bucket: B
    last: bool = False


@dataclass(frozen=True)
class Done(Generic[B]):
    """A bucket's transfer has ended, well unless there is an error.

    A last bucket without elements has no transfer, and is done without having begun.
    """

    bucket: B
    last: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class Folded:
    """The ballots are folded.

    Attributes:
        scales_differ: Whether the ranks multiply their gradients by different scales.
        layers: Whether norms of layers have to be agreed on.
    """

    scales_differ: bool = False
    layers: bool = False


@dataclass(frozen=True)
class Consulted:
    """The consultation is answered; a guarded step has a verdict."""

    verdict: Verdict | None = None


@dataclass(frozen=True)
class Resent:
    """One of the buckets that were sent again has come back."""


@dataclass(frozen=True)
class Concluded:
    """The step is concluded: the policy has read its report."""


@dataclass(frozen=True)
class Abandoned:
    """Another step begins although this one has buckets to come, so it is never concluded."""


@dataclass(frozen=True)
class Failed:
    """A part of the step failed."""

    error: BaseException


Event: TypeAlias = Begun[B] | Done[B] | Folded | Consulted | Resent | Concluded | Abandoned | Failed

# ---------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Deliver(Generic[B]):
    """Hand these results to DDP."""

    buckets: tuple[B, ...]


@dataclass(frozen=True)
class Fold:
    """Fold the ballots of all buckets, and report `Folded`."""


@dataclass(frozen=True)
class CompareScales:
    """Find which ranks have which scale, and report `Failed` with that."""


@dataclass(frozen=True)
class Consult:
    """Start the consultation, and report `Consulted` with its answer."""


@dataclass(frozen=True)
class Resend:
    """Send all buckets again, exactly, and report each with `Resent`."""


@dataclass(frozen=True)
class Skip:
    """Apply nothing, and return all that was sent to the books."""


@dataclass(frozen=True)
class Settle:
    """Update the books of all buckets by what came back."""


@dataclass(frozen=True)
class Conclude:
    """Let the policy read the step's report, and report `Concluded`."""


@dataclass(frozen=True)
class Fail(Generic[B]):
    """Stop for good, and hand these results to DDP as failed."""

    error: BaseException
    buckets: tuple[B, ...]


Action: TypeAlias = (
    Deliver[B] | Fold | CompareScales | Consult | Resend | Skip | Settle | Conclude | Fail[B]
)


class StepEnd(Generic[B]):
    """The end of one step.

    Args:
        guarded: Whether its results wait for the guard's verdict.

    Attributes:
        guarded: See above.
        state: "running" until all buckets are done.
        verdict: The guard's verdict; None before there is one.
    """

    def __init__(self, *, guarded: bool) -> None:
        self.guarded = guarded
        self.state: State = "running"
        self.verdict: Verdict | None = None
        self._last = False  # whether the last bucket has begun
        self._open: set[B] = set()  # buckets that have begun and are not done
        self._sent = 0  # how many have begun
        self._left = 0  # how many of those that were sent again have not come back
        self._held: tuple[B, ...] = ()  # results that wait
        self._error: BaseException | None = None

    def handle(self, event: Event[B]) -> list[Action[B]]:
        """Takes an event, and returns what is to be done now, in order.

        A step that failed answers every later event with nothing but failed results.

        Raises:
            RuntimeError: The event does not belong to this state.
        """
        if isinstance(event, Failed):
            return self._fail(event.error)
        if self.state == "failed":
            return self._after_failure(event)
        if self.state in ("running", "abandoned"):
            return self._buckets(event)
        return self._decision(event)

    def _buckets(self, event: Event[B]) -> list[Action[B]]:
        """Handles an event while buckets come and go."""
        match event:
            case Begun(bucket, last):
                self._open.add(bucket)
                self._sent += 1
                self._last = last
                return []
            case Done(bucket, last, error):
                self._open.discard(bucket)
                self._last = self._last or last
                if error is not None:
                    return self._fail(error, bucket)
                if self.state == "running" and self._last and not self._open:
                    self._held = (*self._held, bucket)
                    self.state = "folding"
                    return [Fold()]
                if self.guarded:
                    self._held = (*self._held, bucket)
                    return []
                return [Deliver((bucket,))]
            case Abandoned():
                self.state = "abandoned"
                return []
        raise self._wrong(event)

    def _decision(self, event: Event[B]) -> list[Action[B]]:
        """Handles an event once all buckets are done."""
        match self.state, event:
            case "folding", Folded(scales_differ=True):
                self.state = "comparing"
                return [CompareScales()]
            case "folding", Folded(layers=layers):
                if not (layers or self.guarded):
                    return self._conclude()
                self.state = "consulting"
                return [Consult()]
            case "consulting", Consulted(None) if not self.guarded:
                return self._conclude()
            case "consulting", Consulted(Verdict() as verdict):
                return self._carry_out(verdict)
            case "resending", Resent():
                self._left -= 1
                return [] if self._left else [Settle(), *self._conclude()]
            case "concluding", Concluded():
                self.state = "over"
                return [Deliver(self._take_held())]
        raise self._wrong(event)

    def _carry_out(self, verdict: Verdict) -> list[Action[B]]:
        self.verdict = verdict
        match verdict.choice:
            case "apply":
                return [Settle(), *self._conclude()]
            case "skip":
                return [Skip(), *self._conclude()]
            case "resend":
                self.state = "resending"
                self._left = self._sent
                return [Resend()]
            case "halt":
                assert verdict.error is not None
                return self._fail(verdict.error)

    def _conclude(self) -> list[Action[B]]:
        self.state = "concluding"
        return [Conclude()]

    def _fail(self, error: BaseException, *buckets: B) -> list[Action[B]]:
        self.state = "failed"
        self._error = self._error or error
        return [Fail(error, (*self._take_held(), *buckets))]

    def _after_failure(self, event: Event[B]) -> list[Action[B]]:
        if not isinstance(event, Done):
            return []
        assert self._error is not None
        return [Fail(event.error or self._error, (event.bucket,))]

    def _take_held(self) -> tuple[B, ...]:
        held, self._held = self._held, ()
        return held

    def _wrong(self, event: Event[B]) -> RuntimeError:
        return RuntimeError(f"a step's end that is {self.state!r} takes no {event}")
