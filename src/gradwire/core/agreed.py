"""What all ranks agree on in a step: each worker's ballot, the summary of all, and the phase.

The aggregators fold the ballots of all workers into values that are the same on every rank. Only
these enter a decision, and only once their step is complete everywhere. So every rank decides the
same without a message of its own.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["critical", "tolerant"]
PHASES = ("critical", "tolerant")

GAUGES = ("lost", "pace", "pace", "slowness", "pace", "rtprop")
"""What the gauge value of a ballot holds: in step s it is GAUGES[s % 6]."""

_LEVELS = (1 << 9) - 1
_TIME_BITS = 31
"""On the wire a share of a pace has so many levels above 0, and its time is a positive float32."""

LAST_EPOCH = 1 << 32

_MARKS = 1 << 20
"""Number of marks of a scale, by which a worker multiplies its gradients (the loss scaler's).

Each of the last two values of a ballot is `number * _MARKS + mark`; in the first of them the mark
is replaced by its complement. Where all ranks send the same two numbers, which is usual, the
maxima yield the largest mark of any rank and the smallest, and these differ exactly where the
scales do. Where the numbers differ, both marks are still those of some rank, so equal scales are
never reported as different."""

_UNKNOWN, _BROKEN, _KNOWN = 0, 1, 2
"""Squared norms on the wire: no gradient yet, not finite, and the first value of a known norm."""
_DROPPED_BITS = 31
"""Low bits of a float64 that are dropped; a squared norm keeps a relative precision of 2.4e-7."""

PARTIAL_S = 1e9
"""The push time on the wire of a push of which not everything arrived, in seconds."""
FLUSH_S = 1e10
"""What a worker adds to the push time on the wire to ask for an exact step.

The largest one then is that of such a worker, and says nothing of the push times of the others."""

BROKEN_LOSS = 1e300
"""The loss on the wire that stands for one that is not finite.

The sum of 65,536 such losses is still a float64, and no sum of losses below LARGEST_LOSS comes near
one of them."""
LARGEST_LOSS = 1e290

_COUNT = 1 << 17
"""Three counts of up to 65,536 workers share one float64 without rounding."""


@dataclass(frozen=True)
class Pace:
    """How long a step took, and how much of it depends on the encoding.

    Attributes:
        step_s: Duration of the step in seconds, computation included.
        network: Share of the step in which nothing was left to compute and the network held it up,
            in [0, 1].
        coding: Share of the step that the processor takes to encode and decode its gradients, or
            would take if they were encoded, in [0, 1].
    """

    step_s: float
    network: float = 0.0
    coding: float = 0.0

    def gauge(self) -> float:
        """Returns a number whose maximum over the workers belongs to the one that waited least.

        Workers that compute longer than others wait less, so what the others wait for them is not
        held against the network.
        """
        (time,) = struct.unpack("<I", struct.pack("<f", self.step_s))
        waited, coded = (round(share * _LEVELS) for share in (self.network, self.coding))
        return float(((_LEVELS - waited) * (_LEVELS + 1) + coded) << _TIME_BITS | time)

    @staticmethod
    def from_gauge(value: float) -> Pace | None:
        """Returns the pace of which `gauge` made a number; None for 0, where it is not known."""
        shares, time = divmod(int(value), 1 << _TIME_BITS)
        (step_s,) = struct.unpack("<f", struct.pack("<I", time))
        if step_s <= 0.0:
            return None
        waited, coded = divmod(shares, _LEVELS + 1)
        return Pace(step_s, 1.0 - waited / _LEVELS, coded / _LEVELS)


@dataclass(frozen=True)
class Ballot:
    """The values that one worker adds to one bucket, in the engine's eight statistics values.

    Attributes:
        fresh_square: Squared L2 norm of the bucket of the worker's fresh gradient, 0 when it is
            not finite; summed over the workers, as all down to `tolerant` are.
        nonfinite: Whether that gradient is not finite.
        falling: Whether the learning rate was lowered since the last step.
        congested: Whether the worker's policy sees congestion.
        loss: Mean of the losses given since the last step, in the first bucket only; None where
            none was given, not finite when one of them was not. Where ranks of one host sum among
            themselves, it is the sum of their means.
        losses: Number of ranks that `loss` is the sum of.
        critical: Whether the user voted for phase "critical".
        tolerant: Whether the user voted for phase "tolerant".
        flush: Whether the user asked for an exact step, in the first bucket only.
        push_s: Duration of this bucket's last push in seconds; 0 when it is not known, infinite
            when not everything arrived. The maximum over the workers counts, as of all that follow.
        gauge: The value that GAUGES names for this step: the pace of the step before
            (`Pace.gauge`), the inverse of BtlBw in seconds per byte, RTprop in seconds, or the
            largest share of a step that was lost since this was last sent; 0 when it is not known.
        applied_square: Squared norm of the last step's applied gradient; None before there is one.
        epoch: The newest epoch that this worker has begun, -1 for none.
        scale: What the worker's gradients are multiplied by (`scales_differ`). None for a worker
            that has joined (`DistributedDataParallel.join`): it has no gradient, and sends neither
            `applied_square` nor `epoch`.
        other_scales: The same of the other ranks of the host that this worker speaks for.
    """

    fresh_square: float = 0.0
    nonfinite: bool = False
    loss: float | None = None
    losses: int = 1
    critical: bool = False
    tolerant: bool = False
    applied_square: float | None = None
    epoch: int = -1
    falling: bool = False
    congested: bool = False
    flush: bool = False
    push_s: float = 0.0
    gauge: float = 0.0
    scale: float | None = 1.0
    other_scales: tuple[float | None, ...] = ()

    def with_others(self, others: Sequence[Ballot]) -> Ballot:
        """Returns the ballot of a worker that speaks for other ranks of its host, too.

        Args:
            others: The ballots of the other ranks, in order.
        """
        if not others:
            return self
        ballots = (self, *others)
        losses = [each.loss for each in ballots if each.loss is not None]
        return replace(
            self,
            loss=sum(losses) if losses else None,
            losses=len(losses),
            critical=any(each.critical for each in ballots),
            tolerant=any(each.tolerant for each in ballots),
            falling=any(each.falling for each in ballots),
            congested=any(each.congested for each in ballots),
            flush=any(each.flush for each in ballots),
            epoch=max(each.epoch for each in ballots),
            other_scales=tuple(each.scale for each in others),
        )

    def slots(self) -> tuple[float, ...]:
        """Returns the eight values: four to be summed, then four to be maximised, all finite."""
        loss = 0.0 if self.loss is None else self.loss
        marked = 0.0, 0.0
        marks = [_mark(scale) for scale in (self.scale, *self.other_scales) if scale is not None]
        if marks:
            marked = (
                float(_count_square(self.applied_square) * _MARKS + _MARKS - 1 - min(marks)),
                float((self.epoch + 1) * _MARKS + max(marks)),
            )
        return (
            self.fresh_square,
            _pack(self.nonfinite, self.falling, self.congested),
            loss if abs(loss) < LARGEST_LOSS else BROKEN_LOSS,
            _pack(self.critical, self.tolerant, 0 if self.loss is None else self.losses),
            min(self.push_s, PARTIAL_S) + self.flush * FLUSH_S,
            self.gauge,
            *marked,
        )


def _pack(first: int, second: int, third: int) -> float:
    return float(first + second * _COUNT + third * _COUNT**2)


def _mark(scale: float) -> int:
    """Returns the same number for equal scales (float32), and most likely another for others."""
    return zlib.crc32(struct.pack("<f", scale)) % _MARKS


def _count_square(square: float | None) -> int:
    """Returns a squared norm as a whole number below 2^33 that grows with it."""
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


def nonfinite(sums: Sequence[float]) -> bool:
    """Returns whether some worker's gradient of a bucket was not finite, by its summed values."""
    return _unpack(sums[1])[0] > 0


def scales_differ(maxima: Iterable[Sequence[float]]) -> bool:
    """Returns whether the ranks multiply their gradients by different scales.

    Args:
        maxima: The maximised values of each bucket of one step.

    Returns:
        True where the scales differ; the same on all ranks.
    """
    marks = set()
    for slots in maxima:
        marks |= {_MARKS - 1 - int(slots[2]) % _MARKS, int(slots[3]) % _MARKS}
    return len(marks) > 1


def _mean_loss(total: float, losses: int) -> float | None:
    if not losses:
        return None
    return total / losses if abs(total) < BROKEN_LOSS / 2 else math.nan


def _push_time(largest: float) -> float:
    """Returns the push time of the slowest worker; 0 where none is known."""
    if largest >= FLUSH_S:
        return 0.0
    return math.inf if largest >= PARTIAL_S else largest


def _unpack(packed: float) -> tuple[int, int, int]:
    whole = int(packed)
    return whole % _COUNT, whole // _COUNT % _COUNT, whole // _COUNT**2


@dataclass(frozen=True)
class Summary:
    """The agreed summary of one step: the same values on every rank.

    Attributes:
        step: The step that is summarised.
        fresh_norm: Square root of the mean over the workers of the squared L2 norm of the fresh
            gradient over all buckets.
        nonfinite: Whether some worker's gradient was not finite.
        applied_norm: L2 norm of the averaged gradient that was applied in the step *before*, for
            it is known only once that step is over; 0 where it was not finite, None where there is
            none.
        vote: The phase that ranks ask for by hand ("critical" wins), None without a vote.
        epoch: The newest epoch that any rank has begun, -1 for none.
        loss: Mean of the mean losses of the workers that gave any; NaN when a loss was not finite,
            None when none was given.
        falling: Whether some rank lowered its learning rate.
        congested: Whether some rank's policy sees congestion.
        flush: Whether some rank's user asked for an exact step, which the next one is.
        pushes: For each bucket, the duration of its push at the slowest worker in the step before,
            in seconds; 0 when it is not known, infinite where not everything arrived.
        lost: Largest share of a step that a worker lost since this was last sent. This and the
            next three take turns (GAUGES) and are None in other steps and when not known.
        rtprop_s: Largest RTprop of any rank in seconds.
        pace: The pace of the step before, at the worker that waited least for the network.
        btlbw: Smallest BtlBw of any rank in bytes per second.
        layers: Fresh norm of each layer, as the root of the mean square over the workers and over
            the steps since the detector "layers" last decided; None in steps in which it does not.
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
    flush: bool = False
    pushes: tuple[float, ...] = ()
    lost: float | None = None
    rtprop_s: float | None = None
    pace: Pace | None = None
    btlbw: float | None = None
    layers: Mapping[str, float] | None = None

    @staticmethod
    def fold(
        step: int,
        world_size: int,
        buckets: Iterable[tuple[Sequence[float], Sequence[float]]],
    ) -> Summary:
        """Folds the folded values of a step's buckets into its summary.

        Args:
            step: The step.
            world_size: Number of workers.
            buckets: Each bucket's summed and maximised values, in bucket order.

        Returns:
            The summary, the same on every rank.
        """
        fresh = loss = 0.0
        nonfinite = falling = congested = critical = tolerant = losses = 0
        applied = _UNKNOWN
        epoch = -1
        flush = False
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
            flush = flush or maxima[0] >= FLUSH_S
            pushes.append(_push_time(maxima[0]))
            gauge = max(gauge, maxima[1])
            applied = max(applied, int(maxima[2]) // _MARKS)
            epoch = max(epoch, int(maxima[3]) // _MARKS - 1)
        mean_square = fresh / world_size
        name = GAUGES[step % len(GAUGES)]
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
            flush=flush,
            pushes=tuple(pushes),
            lost=gauge if name == "lost" else None,
            rtprop_s=gauge if name == "rtprop" and gauge > 0 else None,
            pace=Pace.from_gauge(gauge) if name == "pace" else None,
            btlbw=1.0 / gauge if name == "slowness" and gauge > 0 else None,
        )
