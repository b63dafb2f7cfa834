"""TransferPlan, what a transfer may leave out and when it ends, and TransferReport, its outcome.

A transfer is what users see of an op, one all-reduce of the engine. Policies write plans, and the
communicator carries them out. docs/design.md explains the terms region, bound, spend, schedule,
fill, order and pull.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gradwire.core.checks import is_number, is_whole
from gradwire.core.errors import ConfigError
from gradwire.core.hashed import HashedTuple
from gradwire.core.waits import NOTHING, Waits

__all__ = [
    "BY_BOUND",
    "CLOCKS",
    "CONTROLS",
    "ENCODINGS",
    "FILLS",
    "LARGEST_DATAGRAM",
    "ORDERS",
    "PRIORITY_CLASSES",
    "PULLS",
    "REMEMBERED",
    "SCOPES",
    "SMALLEST_BOUND",
    "SMALLEST_DATAGRAM",
    "SPENDS",
    "TOPK_SHARE",
    "TRANSFORMS",
    "CloseStep",
    "Region",
    "Regions",
    "TensorSlot",
    "TransferPlan",
    "TransferReport",
    "check_bound",
    "check_choice",
    "check_class_dscp",
    "check_control",
    "check_kept",
    "check_share",
    "encoded_share",
    "mix_seed",
]

SPENDS = ("nothing", "late", "lost", "anything")
FILLS = ("zero", "mean", "momentum")
ORDERS = ("shuffled", "sequential", "priority")
PULLS = ("exact", "committed", "none", "lossy")
CONTROLS = ("stream", "probe")
LARGEST_DATAGRAM = 8972
SMALLEST_DATAGRAM = 256
"""Smallest UDP payload, in bytes, that the engine can be set up for."""
CLOCKS = ("open", "first_arrival", "tail")
SCOPES = ("worker", "all")
TRANSFORMS = ("none", "hadamard")
ENCODINGS = ("f32", "f16", "bf16", "int8", "topk", "half")
_ENCODED_SHARES = {"f32": 1.0, "f16": 0.5, "bf16": 0.5, "half": 0.5, "int8": 0.25}
TOPK_SHARE = 6.0 / 4.0
"""Bytes of an element under top-k (a value and a 16-bit index) relative to those of a float32."""

PRIORITY_CLASSES = 8
"""Number of classes of order "priority"; class 0 goes first."""

REMEMBERED = 1024
"""How many buckets' regions are cached with their bounds.

A plan is written for every bucket of every step, and most repeat those of an earlier step."""

SMALLEST_BOUND = 1e-9
"""The smallest bound beside 0.

No transfer has as many chunks as a smaller bound needs before one of them may be lost."""

BY_BOUND = -1.0
"""The fraction of a CloseStep that stands for one minus the region's bound."""


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Checks that a value is one of the allowed names.

    Args:
        name: Name of the setting, for the error.
        value: The value.
        allowed: The allowed names.

    Raises:
        ConfigError: It is not; the error names the setting, the value and the allowed names.
    """
    if not isinstance(value, str) or value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ConfigError.of(name, value, f"allowed are {words}")


def check_control(control: str, spend: str) -> None:
    """Checks that a spend is possible under a control; raises ConfigError otherwise."""
    if control == "probe" and spend == "lost":
        raise ConfigError.of(
            "spend",
            "lost",
            "the sender learns what is missing only after each pass, so no chunk is "
            "ever declared lost; allowed are 'nothing', 'late', 'anything'",
            beside="with control='probe'",
        )


def check_bound(name: str, value: object) -> None:
    """Checks that a bound is a number in [0, 1) that some transfer could spend.

    Raises:
        ConfigError: It is not; the error names the setting and the value.
    """
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ConfigError.of(name, value, "a bound is a number in [0, 1)")
    if 0.0 < value < SMALLEST_BOUND:
        raise ConfigError.of(name, value, f"a bound is 0, or {SMALLEST_BOUND:g} at the least")


def check_share(name: str, value: object) -> None:
    """Checks that `value` is a number in [0, 1); raises ConfigError otherwise."""
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ConfigError.of(name, value, "a number in [0, 1)")


def encoded_share(encoding: str, kept: float) -> float:
    """Returns the bytes that an encoding sends relative to float32, without the chunks' headers.

    Args:
        encoding: One of ENCODINGS.
        kept: Share of the elements that "topk" keeps.
    """
    return _ENCODED_SHARES.get(encoding, TOPK_SHARE * kept)


def check_kept(name: str, value: object) -> None:
    """Checks that `value` is a number in (0, 1]; raises ConfigError otherwise."""
    if not is_number(value) or not 0.0 < value <= 1.0:
        raise ConfigError.of(name, value, "the share of elements kept is a number in (0, 1]")


def check_class_dscp(name: str, values: object) -> None:
    """Checks that `values` is a tuple of up to 8 DSCPs from 0 to 63 (RFC 2474).

    Raises:
        ConfigError: It is not; the error names the setting and the value.
    """
    if not isinstance(values, tuple) or len(values) > PRIORITY_CLASSES:
        raise ConfigError.of(name, values, f"a tuple of up to {PRIORITY_CLASSES} DSCPs")
    for value in values:
        if not is_whole(value) or not 0 <= value <= 63:
            raise ConfigError.of(name, values, "a DSCP is a whole number from 0 to 63")


@dataclass(frozen=True)
class TensorSlot:
    """The place of a parameter, or of a part of one, in a bucket.

    Attributes:
        name: Name of the parameter in the model.
        offset: Its first element in the bucket.
        length: Its number of elements.
        part: The rank whose shard the part is; None for all of the parameter.
    """

    name: str
    offset: int
    length: int
    part: int | None = None

    @functools.cached_property
    def key(self) -> str:
        """The name under which values of its elements are kept from step to step."""
        return self.name if self.part is None else f"{self.name}[{self.part}]"

    @functools.cached_property
    def layer(self) -> str:
        """The name of the module that owns the parameter, "" for a name without a dot."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Region:
    """A range of a bucket with one bound.

    Attributes:
        offset: Its first element in the bucket.
        length: Its number of elements.
        bound: Share of its elements that a worker's contribution may lack, in [0, 1).
        name: Name in reports and errors; it does not count when regions are compared.
    """

    offset: int
    length: int
    bound: float
    name: str = field(default="", compare=False)


class Regions(HashedTuple[Region]):
    """The regions of one bucket, in order, from element 0 on without gaps.

    They are checked once for all plans that they are in, when `elements` is first read.
    """

    @functools.cached_property
    def elements(self) -> int:
        """The number of elements that the regions cover.

        Raises:
            ConfigError: A bound lies outside [0, 1), or there is a gap; the error names the region.
        """
        at = 0
        for region in self:
            check_share(f"bound of region {region.name or region.offset!r}", region.bound)
            if region.offset != at or region.length <= 0:
                raise ConfigError.about(
                    f"plan region {region.name!r} covers [{region.offset}, "
                    f"{region.offset + region.length})",
                    "regions must follow each other from 0 without gaps; expected one that "
                    f"starts at {at}",
                    setting="regions",
                    value=region,
                )
            at += region.length
        return at

    @staticmethod
    def of(regions: Iterable[Region]) -> Regions:
        """Makes Regions of these, or returns them unchanged where they already are."""
        return regions if isinstance(regions, Regions) else Regions(regions)

    @functools.cached_property
    def cuts(self) -> HashedTuple[int]:
        """The first element of each region, which a chunk grid needs beside `elements`."""
        return HashedTuple(region.offset for region in self)

    @functools.cached_property
    def strict(self) -> Regions:
        """The same regions with bound 0."""
        return Regions(replace(region, bound=0.0) for region in self)


@dataclass(frozen=True)
class CloseStep:
    """One line of a schedule: from `delay_s` after `clock` on, `fraction` of a region is enough.

    Attributes:
        clock: The event that starts the delay: "open", a worker announces that it has begun;
            "first_arrival", a worker's first chunk arrives; "tail", a worker announces that less
            than 1 % of its chunks follow.
        scope: "worker", each worker's event starts the delay for its own contribution; "all", the
            event of the last worker starts it for all.
        delay_s: The delay in seconds.
        fraction: The fraction in [0, 1], or BY_BOUND for one minus the region's bound.

    Raises:
        ConfigError: A field is not as above; the error names it, the value and what is allowed.
    """

    clock: str = "open"
    scope: str = "all"
    delay_s: float = 0.0
    fraction: float = BY_BOUND

    def __post_init__(self) -> None:
        check_choice("schedule clock", self.clock, CLOCKS)
        check_choice("schedule scope", self.scope, SCOPES)
        if not (math.isfinite(self.delay_s) and self.delay_s >= 0):
            raise ConfigError.about(
                f"schedule delay={self.delay_s!r}",
                "seconds, 0 or more",
                setting="delay_s",
                value=self.delay_s,
            )
        if self.fraction != BY_BOUND and not 0.0 <= self.fraction <= 1.0:
            raise ConfigError.about(
                f"schedule fraction={self.fraction!r}",
                f"a number in [0, 1], or {BY_BOUND:g} for one minus the bound",
                setting="fraction",
                value=self.fraction,
            )


@dataclass(frozen=True)
class TransferPlan:
    """One transfer as all ranks agree on it.

    Attributes:
        elements: Number of elements of the bucket.
        regions: The regions in order, covering [0, elements).
        spend: Which missing chunks may be given up (docs/design.md).
        schedule: When a region may close.
        fill: "zero" leaves a missing contribution out of the sum; "mean" divides by the number of
            contributions that arrived; "momentum" does so too, and elements without any
            contribution come from the optimizer
            (`gradwire.training.feedback.optimizer_moments`), unknown to the engine.
        order: Order of the chunks within the push: "sequential"; "shuffled" by `seed`, alike on all
            workers; "priority", by the classes that each worker gives its own chunks
            (`Communicator.all_reduce(priorities=…)`), within a class by `seed`. Under an eager
            close each worker thereby leaves out its own last chunks.
        pull: "exact"; "committed", which leaves up to `pull_bound` of the result out alike on all
            workers; "lossy", where each worker alone may miss up to `pull_bound` of each region's
            results (they are zero), so that replicas differ, for reproducing papers only; "none".
        pull_bound: Share of the results that the pull may leave out, in [0, 1).
        control: How missing chunks are found and sent again: "stream", packet by packet, or
            "probe", in passes of the push and of a lossy pull (docs/design.md), which excludes
            order "priority".
        scale: Factor of each finished sum; 1 / world size for an average.
        seed: Seed of the shuffled order and of the transform, in [0, 2^64).
        encoding: Encoding of the elements on the wire, pushed and pulled (docs/design.md,
            "Encodings"). The error of an encoding does not count against the bounds; only error
            feedback returns it.
        kept: Share of each chunk's elements, those of the largest magnitudes, that encoding "topk"
            sends.
        transform: What is applied to the gradient before it travels and inverted after: "none" or
            "hadamard" (`gradwire.transport.transforms`), from `seed`, unknown to the engine.
        class_dscp: DSCPs of the datagrams of each class under order "priority", the last one for
            all further classes; () for the setting `dscp`.
        pruned: Share of each tensor's elements, those of the smallest weights, that is held back
            before the push (`gradwire.training.feedback.pruning`), unknown to the engine; encoding
            "topk" only.
        datagram: Size in bytes of the datagrams that chunks are cut for; 0 for the size that the
            endpoints agreed on, which is also the largest.
        shards: Number of elements that each aggregator sums, in order; () for even shares, which
            end at the nearest chunk.

    Raises:
        ConfigError: A field is not as above; the error names it, the value and what is allowed.
    """

    elements: int
    regions: tuple[Region, ...]
    spend: str = "nothing"
    schedule: tuple[CloseStep, ...] = (CloseStep(),)
    fill: str = "zero"
    order: str = "sequential"
    pull: str = "exact"
    pull_bound: float = 0.0
    control: str = "stream"
    scale: float = 1.0
    seed: int = 0
    encoding: str = "f32"
    kept: float = 1.0
    transform: str = "none"
    class_dscp: tuple[int, ...] = ()
    pruned: float = 0.0
    datagram: int = 0
    shards: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.elements <= 0:
            raise ConfigError.about(
                f"plan elements={self.elements!r}",
                "1 or more",
                setting="elements",
                value=self.elements,
            )
        regions = Regions.of(self.regions)
        object.__setattr__(self, "regions", regions)
        if regions.elements != self.elements:
            raise ConfigError.about(
                f"plan regions cover {regions.elements} elements",
                f"must be all {self.elements}",
                setting="regions",
                value=self.regions,
            )
        check_choice("spend", self.spend, SPENDS)
        check_choice("fill", self.fill, FILLS)
        check_choice("order", self.order, ORDERS)
        check_choice("pull", self.pull, PULLS)
        check_share("pull_bound", self.pull_bound)
        if self.pull not in ("committed", "lossy") and self.pull_bound:
            raise ConfigError.of(
                "pull_bound",
                self.pull_bound,
                "only pull='committed' and 'lossy' may leave a part of the result out",
                beside=f"with pull={self.pull!r}",
            )
        check_choice("control", self.control, CONTROLS)
        check_control(self.control, self.spend)
        if self.control == "probe" and self.order == "priority":
            raise ConfigError.of(
                "order",
                "priority",
                "every pass goes through all chunks; allowed are 'shuffled', 'sequential'",
                beside="with control='probe'",
            )
        if not self.schedule:
            raise ConfigError.about(
                "schedule=()",
                "at least one step is needed",
                setting="schedule",
                value=self.schedule,
            )
        if not math.isfinite(self.scale):
            raise ConfigError.of("scale", self.scale, "a finite number")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError.of("seed", self.seed, "an integer in [0, 2**64)")
        check_choice("encoding", self.encoding, ENCODINGS)
        check_kept("kept", self.kept)
        check_choice("transform", self.transform, TRANSFORMS)
        if self.fill == "momentum" and self.transform != "none":
            raise ConfigError.of(
                "fill",
                "momentum",
                "under a transform the missing values are coefficients, which belong to no single "
                "element; use fill='zero' or 'mean'",
                beside=f"with transform={self.transform!r}",
            )
        check_class_dscp("class_dscp", self.class_dscp)
        if self.datagram and not SMALLEST_DATAGRAM <= self.datagram <= LARGEST_DATAGRAM:
            allowed = f"bytes, {SMALLEST_DATAGRAM} to {LARGEST_DATAGRAM}, or 0"
            raise ConfigError.of("datagram", self.datagram, allowed)
        if self.class_dscp and self.order != "priority":
            raise ConfigError.of(
                "class_dscp",
                self.class_dscp,
                "only order='priority' has classes",
                beside=f"with order={self.order!r}",
            )
        if self.encoding != "topk" and self.kept != 1.0:
            raise ConfigError.of(
                "kept",
                self.kept,
                "only encoding='topk' keeps less than all",
                beside=f"with encoding={self.encoding!r}",
            )
        if self.shards and (min(self.shards) < 0 or sum(self.shards) != self.elements):
            raise ConfigError.of(
                "shards", self.shards, f"one number for each worker, together {self.elements}"
            )
        check_share("pruned", self.pruned)
        if self.pruned and (self.encoding != "topk" or self.transform != "none"):
            raise ConfigError.of(
                "pruned",
                self.pruned,
                "only encoding='topk' without a transform selects among elements",
                beside=f"with encoding={self.encoding!r}, transform={self.transform!r}",
            )

    @property
    def lossy(self) -> bool:
        """Whether anything may be left out, on the way to the aggregators or back."""
        return self.pull_bound > 0 or (
            self.spend != "nothing"
            and (
                any(region.bound > 0 for region in self.regions)
                or any(step.fraction not in (BY_BOUND, 1.0) for step in self.schedule)
            )
        )

    @property
    def bound(self) -> float:
        """The largest bound of its regions."""
        return max(region.bound for region in self.regions)

    def exact(self) -> TransferPlan:
        """Returns the same transfer with nothing left out and nothing lost to an encoding.

        The order becomes one that all workers share. The regions stay, and so does the chunk grid
        where the encoding was f32 before. A push alone stays one.
        """
        return replace(
            self,
            regions=Regions.of(self.regions).strict,
            spend="nothing",
            schedule=(CloseStep(),),
            fill="zero",
            order="shuffled" if self.order == "priority" else self.order,
            class_dscp=(),
            pull="none" if self.pull == "none" else "exact",
            pull_bound=0.0,
            control="stream",
            encoding="f32",
            kept=1.0,
            transform="none",
            pruned=0.0,
        )

    def in_width_of(self, encoding: str) -> TransferPlan:
        """Returns the same transfer of a bucket whose elements this encoding carries unchanged.

        Where they are of a type of two bytes ("half", "bf16"), they travel in that type instead of
        f32, and instead of f16, which is no smaller. A transform's coefficients travel as f16,
        since they may exceed the type's range.
        """
        if encoding == "f32" or self.encoding not in ("f32", "f16"):
            return self
        return replace(self, encoding=encoding if self.transform == "none" else "f16")

    @staticmethod
    def whole(
        elements: int, *, scale: float = 1.0, encoding: str = "f32", seed: int = 0
    ) -> TransferPlan:
        """Returns the plan of an exact sum over one region, as a plain collective computes it.

        Args:
            elements: Number of elements.
            scale: Factor of the finished sum.
            encoding: The encoding that carries the elements unchanged.
            seed: The seed.
        """
        whole = (Region(0, elements, 0.0, "all"),)
        return TransferPlan(elements, whole, scale=scale, encoding=encoding, seed=seed)


@dataclass(frozen=True)
class TransferReport:
    """The outcome of one transfer as this worker saw it.

    Attributes:
        op: Number of the op in its lane, -1 where no network was needed.
        step: Training step.
        counted: uint8 for each chunk of the grid; 1 where this worker's contribution counted.
        applied: uint8 for each chunk of the grid; 1 where a result was applied, in a lossy pull at
            this worker.
        withheld_chunks: uint32, the chunks whose results a committed pull left out and this rank
            keeps as its residual.
        withheld_values: float32, scaled; the results of those chunks, concatenated.
        delivered: For each region, the fraction of this worker's elements that counted.
        effective_bounds: For each region, its bound rounded down to whole chunks.
        exceeded: Indices of the regions whose loss exceeded their bound (plans by time only).
        stats_sum: The summed statistics of all workers, the same on all ranks.
        stats_max: The maximised statistics of all workers, the same on all ranks.
        push_s: Duration of the push in seconds.
        pull_s: Duration of the pull in seconds.
        total_s: Duration of the transfer in seconds.
        bytes_sent: UDP payload that this worker sent, in bytes.
        packets_sent: Datagrams that this worker sent.
        retransmissions: Those of them that were sent again.
        rtprop_s: Smallest round-trip time seen, in seconds.
        btlbw: Bandwidth of the bottleneck in bytes per second, 0 while it is not known.
        result_error: float32, scaled; the error of the encoding in the results that this rank
            aggregated, which it keeps as its residual.
        error_offset: The first element that `result_error` covers.
        passes: Passes of the push, the most of any aggregator; 0 under control "stream".
        datagram: Size in bytes of the longest datagram that all paths of the job carried when the
            transfer began, the same on all workers; 0 where it was not needed.
        waits: What it waited for.
    """

    op: int
    step: int
    counted: NDArray[np.uint8]
    applied: NDArray[np.uint8]
    withheld_chunks: NDArray[np.uint32]
    withheld_values: NDArray[np.float32]
    delivered: tuple[float, ...]
    effective_bounds: tuple[float, ...]
    exceeded: tuple[int, ...]
    stats_sum: tuple[float, ...]
    stats_max: tuple[float, ...]
    push_s: float
    pull_s: float
    total_s: float
    bytes_sent: int
    packets_sent: int
    retransmissions: int
    rtprop_s: float
    btlbw: float
    result_error: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    error_offset: int = 0
    passes: int = 0
    datagram: int = 0
    waits: Waits = NOTHING


def mix_seed(*parts: int) -> int:
    """Mixes integers into one 64-bit seed, alike on every machine.

    The mixing function is the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014).
    """
    state = 0
    for part in parts:
        state = (state + (part & 0xFFFFFFFFFFFFFFFF) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
