"""What all ranks agree on in a step: each worker's ballot, the summary of all, and the phase.

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
from typing import Literal

__all__ = ["GAUGES", "LAST_EPOCH", "PHASES", "Ballot", "Phase", "Summary", "scales_differ"]

Phase = Literal["critical", "tolerant"]
PHASES = ("critical", "tolerant")

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
