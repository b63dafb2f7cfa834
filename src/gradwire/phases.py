"""Training phases: the agreed summary of a step, and the detector that reads it.

The detector of DBLP (arXiv 2605.01989): a phase is critical when the gradient's norm changed by at
least the share η since the last look, |prev - curr| / prev >= η; training starts critical. Two
inputs are offered:

"ours"   RMS over the steps since the last look of the norms of the workers' *fresh* gradients
         (before residuals are added and before anything is lost). Minibatch noise is averaged
         out and the detector does not see its own loss.
"paper"  the L2 norm of one step's averaged gradient as it was applied, what the paper looks at.
"layers" a phase per layer, after Accordion (MLSys 2021): each layer's norm is measured against its
         own last one. Ours: the norm is that of "ours", RMS over the steps, where Accordion takes
         the norm of the gradient accumulated over the epoch. The layers' norms take one small
         exact transfer of their own at each look.

As in Accordion, a drop of the learning rate counts as critical too (`RateWatch`). And a user may
vote by hand; a vote overrules the detector as long as it stands.

Every value that enters a decision has been folded by the aggregators, alike for all ranks, and
belongs to a step that is complete everywhere, so every rank decides the same without a message
of its own. The slots below say where each value travels.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradwire.errors import ConfigError
from gradwire.plans import check_choice
from gradwire.scalars import is_number, is_whole
from gradwire.states import State

__all__ = [
    "GAUGES",
    "LAST_EPOCH",
    "Ballot",
    "Every",
    "LayerDetector",
    "Phase",
    "PhaseDetector",
    "RateWatch",
    "Summary",
    "check_every",
    "make_detector",
    "scales_differ",
]

Phase = Literal["critical", "tolerant"]
Every = int | Literal["epoch"]

PHASES = ("critical", "tolerant")
DETECTORS = ("ours", "paper", "layers")


def check_every(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a cadence: a number of steps, or "epoch"."""
    named = isinstance(value, str) and value == "epoch"
    if not named and not (is_whole(value) and value >= 1):
        raise ConfigError.of(name, value, "a number of steps (1 or more) or 'epoch'")


GAUGES = ("lost", "rest", "rtprop", "slowness")
"""What the gauge slot carries, in turn: step s carries GAUGES[s % 4]."""

LAST_EPOCH = 1 << 32

_MARKS = 1 << 20
"""Values of a mark of the scale that a worker's gradients are multiplied by. Two slots that are
maximised carry a whole number in units of it and, below that, the mark or its complement: where the
ranks agree in both numbers, as they do but for moments, one has the largest mark and the other the
smallest, so all ranks see in the same step whether their scales are alike. Where they do not, both
marks are some rank's all the same, so no alarm is ever false."""

_UNKNOWN, _BROKEN, _KNOWN = 0, 1, 2
"""Squared norms on the wire: "of no gradient yet", "not finite", and from where on the known are
counted."""
_DROPPED_BITS = 31
"""Of a float64; what is left of a squared norm is exact to 2.4e-7 of it."""

PARTIAL_S = 1e9
"""A push time on the wire that stands for "not all of it arrived"."""

BROKEN_LOSS = 1e300
"""A loss on the wire that stands for "not finite": the sum of 65,536 is still a float64, and no sum
of losses below LARGEST_LOSS comes near."""
LARGEST_LOSS = 1e290

_COUNT = 1 << 17
"""Three counts of up to 65,536 workers share one float64 without rounding."""


@dataclass(frozen=True)
class Ballot:
    """What one worker sends with one bucket, in the engine's eight statistics slots.

    Summed over the workers: fresh_square, the bucket's squared L2 norm of the worker's fresh
    gradient (0 when it is not finite); nonfinite, it is not finite; falling, the learning rate
    was lowered since the last step; congested, as the worker's policy sees it; loss, the mean of
    the losses given since the last step (first bucket only; None where none was given, not finite
    when one of them was not); critical and tolerant, a manual vote.
    Maximum over the workers: push_s, how long this bucket's last push took, in seconds (0 not
    known, infinite when not all of it arrived); gauge, what GAUGES says for this step: the largest
    share of a step lost since last told, `Policy.rest`, RTprop in seconds, or seconds per byte at
    BtlBw (0 not known); applied_square, the squared norm of the last step's applied gradient (None
    before there is one); epoch, the newest epoch begun. With the last two goes a mark of scale, by
    which the worker's gradients are multiplied (`scales_differ`); None for a worker that has joined
    (`DistributedDataParallel.join`): it has no gradient, and leaves these two slots to the others.
    """

    fresh_square: float = 0.0
    nonfinite: bool = False
    loss: float | None = None
    critical: bool = False
    tolerant: bool = False
    applied_square: float | None = None
    epoch: int = -1
    falling: bool = False
    congested: bool = False
    push_s: float = 0.0
    gauge: float = 0.0
    scale: float | None = 1.0

    def slots(self) -> tuple[float, ...]:
        """The eight slots: four summed, then four maximised. All are finite."""
        loss = 0.0 if self.loss is None else self.loss
        marked = 0.0, 0.0
        if self.scale is not None:
            mark = _mark(self.scale)
            marked = (
                float(_count_square(self.applied_square) * _MARKS + _MARKS - 1 - mark),
                float((self.epoch + 1) * _MARKS + mark),
            )
        return (
            self.fresh_square,
            _pack(self.nonfinite, self.falling, self.congested),
            loss if abs(loss) < LARGEST_LOSS else BROKEN_LOSS,
            _pack(self.critical, self.tolerant, self.loss is not None),
            self.push_s if math.isfinite(self.push_s) else PARTIAL_S,
            self.gauge,
            *marked,
        )


def _pack(first: int, second: int, third: int) -> float:
    return float(first + second * _COUNT + third * _COUNT**2)


def _mark(scale: float) -> int:
    """The same number for the same scale, a float32; another one, as good as always, for others."""
    return zlib.crc32(struct.pack("<f", scale)) % _MARKS


def _count_square(square: float | None) -> int:
    """A squared norm as a whole number below 2^33 that grows with it."""
    if square is None:
        return _UNKNOWN
    if not math.isfinite(square):
        return _BROKEN
    (bits,) = struct.unpack("<Q", struct.pack("<d", abs(square)))
    return int(bits >> _DROPPED_BITS) + _KNOWN


def _applied_norm(count: int) -> float | None:
    if count < _KNOWN:
        return None if count == _UNKNOWN else 0.0
    (square,) = struct.unpack("<d", struct.pack("<Q", (count - _KNOWN) << _DROPPED_BITS))
    return math.sqrt(square)


def scales_differ(maxima: Iterable[Sequence[float]]) -> bool:
    """Whether some ranks multiply their gradients by other scales than others, from the maximised
    slots of a step's buckets; the same on all ranks."""
    marks = set()
    for slots in maxima:
        marks |= {_MARKS - 1 - int(slots[2]) % _MARKS, int(slots[3]) % _MARKS}
    return len(marks) > 1


def _mean_loss(total: float, losses: int) -> float | None:
    if not losses:
        return None
    return total / losses if abs(total) < BROKEN_LOSS / 2 else math.nan


def _unpack(packed: float) -> tuple[int, int, int]:
    whole = int(packed)
    return whole % _COUNT, whole // _COUNT % _COUNT, whole // _COUNT**2


@dataclass(frozen=True)
class Summary:
    """The agreed summary of one step: the same values on every rank.

    fresh_norm: sqrt of the mean over workers of the squared L2 norm of the fresh gradient over
    all buckets. nonfinite: some worker's gradient was not finite. applied_norm: L2 norm of the
    averaged gradient applied in the step *before* (it is known only once that step is over), 0
    where it was not finite, None where there is none.
    vote: the phase that ranks ask for by hand (critical wins), None without a vote.
    epoch: the newest epoch any rank has begun, -1 for none. loss: the mean, over the workers that
    gave any, of each one's mean loss; NaN when a loss was not finite, None when none was given.
    falling: some rank lowered its learning rate. congested: some rank's policy says so.
    pushes: per bucket, how long its push took at the slowest worker in the step before, in
    seconds; 0 not known, infinite where not everything arrived. lost, rtprop_s, rest, btlbw
    (bytes/s): told by turns, None when not in this step or not known: the largest share of a step
    that a worker lost since last told, the largest RTprop, the largest share of a dense step that
    passes with something else than waiting for its transfer (`Policy.rest`), the smallest BtlBw
    of any rank.
    layers: the fresh norm per layer, RMS over workers and over the steps since the last look; None
    in a step whose end is no look of detector "layers".
    """

    step: int
    fresh_norm: float = 0.0
    nonfinite: bool = False
    applied_norm: float | None = None
    vote: Phase | None = None
    epoch: int = -1
    loss: float | None = None
    falling: bool = False
    congested: bool = False
    pushes: tuple[float, ...] = ()
    lost: float | None = None
    rtprop_s: float | None = None
    rest: float | None = None
    btlbw: float | None = None
    layers: Mapping[str, float] | None = None

    @staticmethod
    def fold(
        step: int,
        world_size: int,
        buckets: Iterable[tuple[Sequence[float], Sequence[float]]],
    ) -> Summary:
        """Folds each bucket's (summed slots, maximum slots), given in bucket order."""
        fresh = loss = 0.0
        nonfinite = falling = congested = critical = tolerant = losses = 0
        applied = _UNKNOWN
        epoch = -1
        pushes: list[float] = []
        gauge = 0.0
        for sums, maxima in buckets:
            fresh += sums[0]
            flags = _unpack(sums[1])
            nonfinite, falling, congested = (
                nonfinite + flags[0],
                falling + flags[1],
                congested + flags[2],
            )
            loss += sums[2]
            votes = _unpack(sums[3])
            critical, tolerant, losses = (
                critical + votes[0],
                tolerant + votes[1],
                losses + votes[2],
            )
            pushes.append(math.inf if maxima[0] >= PARTIAL_S else maxima[0])
            gauge = max(gauge, maxima[1])
            applied = max(applied, int(maxima[2]) // _MARKS)
            epoch = max(epoch, int(maxima[3]) // _MARKS - 1)
        mean_square = fresh / world_size
        told = GAUGES[step % len(GAUGES)]
        return Summary(
            step=step,
            fresh_norm=math.sqrt(mean_square) if mean_square >= 0 else math.nan,
            nonfinite=nonfinite > 0,
            applied_norm=_applied_norm(applied),
            vote="critical" if critical else "tolerant" if tolerant else None,
            epoch=epoch,
            loss=_mean_loss(loss, losses),
            falling=falling > 0,
            congested=congested > 0,
            pushes=tuple(pushes),
            lost=gauge if told == "lost" else None,
            rtprop_s=gauge if told == "rtprop" and gauge > 0 else None,
            rest=gauge if told == "rest" else None,
            btlbw=1.0 / gauge if told == "slowness" and gauge > 0 else None,
        )


class PhaseDetector:
    """Decides the phase of the next step from the agreed summaries of the steps before.

    eta: relative change of the norm that makes a phase critical, > 0. every: look every so many
    steps, or "epoch" for once an epoch (`attachment.epoch(n)`). source: "ours" or "paper".
    Zero and non-finite norms mean critical. `phase` is the phase of the next step.
    """

    def __init__(self, eta: float = 0.5, every: Every = 10, source: str = "ours") -> None:
        if not is_number(eta) or not eta > 0:
            raise ConfigError.of("eta", eta, "a relative change, a finite number above 0")
        check_every("every", every)
        check_choice("detector", source, DETECTORS)
        self.eta = float(eta)
        self.every: Every = every
        self.source = source
        self.phase: Phase = "critical"
        self.steps = 0
        self.critical_steps = 0.0
        self.looks = 0
        self.fired = 0
        self._detected: Phase = "critical"
        self._previous: float | None = None
        self._squares = 0.0
        self._count = 0
        self._epoch = -1
        self._hold = False

    @property
    def critical_share(self) -> float:
        """The share of the steps so far that were critical; 1 before the first."""
        return self.critical_steps / self.steps if self.steps else 1.0

    @property
    def verdict(self) -> str:
        """ "phases", or "fixed bound" for a run in which nothing fired after the start."""
        return "phases" if self.fired else "fixed bound"

    def due(self, summary: Summary) -> bool:
        """Whether `observe` will look at this summary's step."""
        if self.every == "epoch":
            return self._begins(summary)
        return (self.steps + 1) % self.every == 0

    def phase_of(self, layer: str) -> Phase:
        """The phase of the next step for one layer: the same for all, but for "layers"."""
        return self.phase

    def observe(self, summary: Summary) -> None:
        """Takes the summary of the step just completed and decides the phase of the next."""
        self.steps += 1
        self.critical_steps += self.phase == "critical"
        begins = self._begins(summary)
        if self.every == "epoch":
            if begins:
                self._epoch = summary.epoch
                if self.source == "paper":
                    self._gather(summary)
                self._look()
            if self.source == "ours":
                self._gather(summary)
        else:
            self._gather(summary)
            if self.steps % self.every == 0:
                self._look()
        if summary.nonfinite or summary.falling:
            self._fire()
            # The next window is cut short.
            self._hold = self._hold or (summary.falling and not begins)
        self.phase = summary.vote if summary.vote is not None else self._detected

    _KEPT: ClassVar[dict[str, str]] = {
        **{key: key for key in ("phase", "steps", "critical_steps", "looks", "fired")},
        **{key: f"_{key}" for key in ("detected", "previous", "squares", "count", "epoch", "hold")},
    }
    """The attribute that each key of a saved state stands for."""

    def state_dict(self) -> dict[str, object]:
        """Everything the next decision depends on, as plain values."""
        return {key: getattr(self, attribute) for key, attribute in self._KEPT.items()}

    def load_state_dict(self, state: object) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else, and changes
        nothing then."""
        read = State(state, "state['phases']['phases']")
        read.keys(sorted(self._KEPT))
        for key, value in self._read(read).items():
            setattr(self, self._KEPT[key], value)

    def _read(self, state: State) -> dict[str, object]:
        steps = state.whole("steps")
        return {
            "phase": state.word("phase", PHASES),
            "steps": steps,
            "critical_steps": state.number("critical_steps", 0.0, steps),
            "looks": state.whole("looks"),
            "fired": state.whole("fired"),
            "detected": state.word("detected", PHASES),
            "previous": state.optional("previous", state.magnitude),
            "squares": state.magnitude("squares"),
            "count": state.whole("count"),
            "epoch": state.whole("epoch", -1),
            "hold": state.flag("hold"),
        }

    def _begins(self, summary: Summary) -> bool:
        """Whether a window of whole epochs begins with this summary's step."""
        return self.every == "epoch" and summary.epoch > self._epoch

    def _gather(self, summary: Summary) -> None:
        if self.source == "paper":
            if summary.applied_norm is not None:
                self._squares, self._count = summary.applied_norm**2, 1
        elif not summary.nonfinite:
            self._squares += summary.fresh_norm**2
            self._count += 1

    def _look(self) -> None:
        if not self._count:
            return
        current = math.sqrt(self._squares / self._count)
        previous = self._previous
        self._squares, self._count = 0.0, 0
        self._previous = current
        self.looks += 1
        if previous is None:
            return
        if self._hold:
            self._hold = False
        elif changed(previous, current, self.eta):
            self._fire()
        else:
            self._detected = "tolerant"

    def _fire(self) -> None:
        self._detected = "critical"
        self.fired += 1


class LayerDetector(PhaseDetector):
    """A phase per layer. `phase` is critical while any layer is; `critical_share` counts layers.

    eta, every: as for PhaseDetector. A layer is critical until it has been looked at twice.
    """

    def __init__(self, eta: float = 0.5, every: Every = 10) -> None:
        super().__init__(eta, every, "layers")
        self._norms: dict[str, float] = {}
        self._settled: frozenset[str] = frozenset()  # the layers that are tolerant
        self._vote: Phase | None = None

    def phase_of(self, layer: str) -> Phase:
        """The phase of the next step for one layer."""
        if self._vote is not None:
            return self._vote
        return "tolerant" if layer in self._settled else "critical"

    def observe(self, summary: Summary) -> None:
        """Takes the summary of the step just completed and decides the phases of the next."""
        self.steps += 1
        if self._vote is not None or not self._norms:
            self.critical_steps += self.phase == "critical"
        else:
            self.critical_steps += 1.0 - len(self._settled) / len(self._norms)
        begins = self._begins(summary)
        self._epoch = max(self._epoch, summary.epoch)
        if summary.layers is not None:
            self._look_at(summary.layers)
        if summary.nonfinite or summary.falling:
            self._settled = frozenset()
            self._hold = self._hold or (summary.falling and not begins)
            self.fired += 1
        self._vote = summary.vote
        tolerant = bool(self._norms) and len(self._settled) == len(self._norms)
        self._detected = "tolerant" if tolerant else "critical"
        self.phase = self._vote if self._vote is not None else self._detected

    _KEPT: ClassVar[dict[str, str]] = {
        **PhaseDetector._KEPT,
        **{key: f"_{key}" for key in ("norms", "settled", "vote")},
    }

    def state_dict(self) -> dict[str, object]:
        """Everything the next decision depends on; sets as lists, which torch.load takes."""
        return {
            **super().state_dict(),
            "norms": dict(self._norms),
            "settled": sorted(self._settled),
        }

    def _read(self, state: State) -> dict[str, object]:
        settled = state.values["settled"]
        if not isinstance(settled, (list, tuple)) or not all(isinstance(n, str) for n in settled):
            raise state.wrong("settled", "a list of layers' names")
        vote = state.values["vote"]
        return {
            **super()._read(state),
            "norms": state.part("norms").by_name(),
            "settled": frozenset(settled),
            "vote": None if vote is None else state.word("vote", PHASES),
        }

    def _look_at(self, norms: Mapping[str, float]) -> None:
        self.looks += 1
        before, self._norms = self._norms, dict(norms)
        if self._hold:
            self._hold = False
            return
        fired = {layer for layer in norms if layer in before} & {
            layer
            for layer, norm in norms.items()
            if changed(before.get(layer, 0.0), norm, self.eta)
        }
        self.fired += bool(fired)
        self._settled = frozenset(layer for layer in norms if layer in before) - fired


class RateWatch:
    """Notices when a learning rate drops: to half of what it was, at once or bit by bit.

    Accordion counts any decay as critical; a rate that falls a little every step (cosine) would
    then be critical for ever, so this looks at halvings. Ours.
    """

    SHARE = 0.5

    def __init__(self) -> None:
        self.reference: list[float] = []

    def observe(self, rates: Sequence[float]) -> bool:
        """Takes the rates of all parameter groups before a step; whether one has dropped."""
        known = self.reference if len(self.reference) == len(rates) else list(rates)
        fell = [
            now <= self.SHARE * before < before for now, before in zip(rates, known, strict=True)
        ]
        self.reference = [
            now if drop else max(now, before)
            for now, before, drop in zip(rates, known, fell, strict=True)
        ]
        return any(fell)


def make_detector(eta: float, every: Every, source: str) -> PhaseDetector:
    """The detector of this source; raises ConfigError for what it cannot be."""
    check_choice("detector", source, DETECTORS)
    if source == "layers":
        return LayerDetector(eta, every)
    return PhaseDetector(eta, every, source)


def changed(before: float, now: float, eta: float) -> bool:
    """Whether a norm changed by the share eta or more; zero and non-finite ones count as that."""
    usable = math.isfinite(before) and math.isfinite(now) and before > 0 and now > 0
    return not usable or abs(before - now) / before >= eta
