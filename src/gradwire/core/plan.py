"""TransferPlan: what one all-reduce may leave out and when it ends, and TransferReport: what
became of it.

The words are those of docs/design.md: region, bound, spend, schedule, fill, order, pull. This
module is the bottom of the Python layers: policies write plans, the communicator carries them out.
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
"""UDP payload in bytes that the engine can be set up for."""
CLOCKS = ("open", "first_arrival", "tail")
SCOPES = ("worker", "all")
TRANSFORMS = ("none", "hadamard")
ENCODINGS = ("f32", "f16", "bf16", "int8", "topk")
_ENCODED_SHARES = {"f32": 1.0, "f16": 0.5, "bf16": 0.5, "int8": 0.25}
TOPK_SHARE = 6.0 / 4.0
"""Bytes of an element that top-k keeps (value and 16-bit index) over those of a float32."""

PRIORITY_CLASSES = 8
"""Classes of order "priority", from 0, which goes first."""

REMEMBERED = 1024
"""How many buckets' regions are remembered, with the bounds of each: a plan is written for every
bucket of every step."""

SMALLEST_BOUND = 1e-9
"""That may be set, beside 0: no transfer has as many chunks as a smaller one needs to lose one."""

BY_BOUND = -1.0
"""The fraction of a CloseStep that stands for "one minus the region's bound"."""


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises ConfigError unless `value` is one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ConfigError.of(name, value, f"allowed are {words}")


def check_control(control: str, spend: str) -> None:
    """Raises ConfigError for a control under which this spend can never be."""
    if control == "probe" and spend == "lost":
        raise ConfigError.of(
            "spend",
            "lost",
            "the sender hears what is missing after each pass only, so no chunk is "
            "ever declared lost; allowed are 'nothing', 'late', 'anything'",
            beside="with control='probe'",
        )


def check_bound(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number in [0, 1) that some transfer could spend."""
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ConfigError.of(name, value, "a bound is a number in [0, 1)")
    if 0.0 < value < SMALLEST_BOUND:
        raise ConfigError.of(name, value, f"a bound is 0, or {SMALLEST_BOUND:g} at the least")


def check_share(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number in [0, 1)."""
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ConfigError.of(name, value, "a number in [0, 1)")


def encoded_share(encoding: str, kept: float) -> float:
    """What an encoding sends of float32's bytes; what each chunk adds is left out."""
    return _ENCODED_SHARES.get(encoding, TOPK_SHARE * kept)


def check_kept(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number in (0, 1]."""
    if not is_number(value) or not 0.0 < value <= 1.0:
        raise ConfigError.of(name, value, "the share of elements kept is a number in (0, 1]")


def check_class_dscp(name: str, values: object) -> None:
    """Raises ConfigError unless `values` is a tuple of up to 8 DSCPs (RFC 2474), 0 to 63."""
    if not isinstance(values, tuple) or len(values) > PRIORITY_CLASSES:
        raise ConfigError.of(name, values, f"a tuple of up to {PRIORITY_CLASSES} DSCPs")
    for value in values:
        if not is_whole(value) or not 0 <= value <= 63:
            raise ConfigError.of(name, values, "a DSCP is a whole number from 0 to 63")


@dataclass(frozen=True)
class TensorSlot:
    """One parameter's place in a bucket: `offset` and `length` in elements."""

    name: str
    offset: int
    length: int

    @functools.cached_property
    def layer(self) -> str:
        """The name of the module that owns the parameter ("" when there is no dot)."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Region:
    """A range of a bucket with one bound: `offset` and `length` in elements, bound in [0, 1)."""

    offset: int
    length: int
    bound: float
    name: str = field(default="", compare=False)


class Regions(HashedTuple[Region]):
    """The regions of one bucket, in order, from element 0 on without gaps.

    They are checked when `elements` is first asked for, once for all plans that they are in.
    """

    @functools.cached_property
    def elements(self) -> int:
        """That they cover; raises ConfigError naming the region for a bound outside [0, 1), and
        for a gap."""
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
        """These regions, as they are if they are some already."""
        return regions if isinstance(regions, Regions) else Regions(regions)

    @functools.cached_property
    def cuts(self) -> HashedTuple[int]:
        """Where each begins: what a chunk grid needs to know of them beside the elements."""
        return HashedTuple(region.offset for region in self)

    @functools.cached_property
    def strict(self) -> Regions:
        """The same with bound 0."""
        return Regions(replace(region, bound=0.0) for region in self)


@dataclass(frozen=True)
class CloseStep:
    """One line of a schedule: `delay_s` seconds after `clock`, `fraction` of the region is enough.

    clock: "open", of a worker's word that it has begun; "first_arrival", of a worker's first chunk;
    "tail", of its word that less than 1 % of its chunks follow. scope: "worker", a clock of each
    worker for its own contribution; "all", which runs from when that has come of the last worker. A
    fraction of BY_BOUND stands for one minus the region's bound.
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

    elements: float32 elements of the bucket. regions: in order, covering [0, elements).
    spend: which missing chunks may be given up. schedule: when a region may close.
    fill: "zero" leaves a missing contribution out of the sum, "mean" divides by the contributors
    that arrived; "momentum" does that, too, and what nobody contributed to comes from the
    optimizer (`gradwire.training.feedback.optimizer_moments`), unknown to the engine. order: of the
    chunks within the push; "shuffled" by `seed`, alike on all workers; "priority" by the classes
    that each worker gives its own chunks with the transfer
    (`Communicator.all_reduce(priorities=…)`), within a class by
    `seed`: under an eager close each worker so leaves out its own last chunks. class_dscp: with
    order "priority" the DSCP of the datagrams of each class, the last one for all further classes;
    () for the setting `dscp`.
    pull: "exact"; "committed" with up to `pull_bound` of the result left out alike on
    all workers; "lossy" with up to `pull_bound` of each region's results missing (zero) at each
    worker alone, so that replicas differ: for reproducing papers only.
    control: how what is missing is found and sent again: "stream", packet by packet, or "probe",
    in passes of the push and of a lossy pull (docs/design.md), not with order "priority".
    scale: multiplies each finished sum (1 / world size for an average).
    encoding: of the elements on the wire, pushed and pulled (docs/design.md, "Encodings"); under
    "topk" only the share `kept` of each chunk's elements travels, the largest magnitudes. What an
    encoding takes is no loss in the sense of the bounds: error feedback alone gives it back.
    transform: what is done to the gradient before it travels and undone after, from `seed`
    ("hadamard": `gradwire.transport.transforms`); the engine carries coefficients and knows nothing
    of it. pruned: the share of each tensor's elements, those of the smallest weights, that is held
    back before the push ("topk" only; `gradwire.training.feedback.pruning`), unknown to the engine
    as well. datagram: bytes of the datagrams that chunks are cut for; 0 for what the endpoints
    agreed on, which is also the most.

    Raises ConfigError naming the field, the value and what is allowed.
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
                "all chunks go in passes alike; allowed are 'shuffled', 'sequential'",
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
                "what is missing are coefficients then, of no element; use fill='zero' or 'mean'",
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
        """The same transfer with nothing left out or taken by an encoding, in an order that all
        workers share; the same regions, so the same chunk grid where the encoding was f32 before.
        """
        return replace(
            self,
            regions=Regions.of(self.regions).strict,
            spend="nothing",
            schedule=(CloseStep(),),
            fill="zero",
            order="shuffled" if self.order == "priority" else self.order,
            class_dscp=(),
            pull="exact",
            pull_bound=0.0,
            control="stream",
            encoding="f32",
            kept=1.0,
            transform="none",
            pruned=0.0,
        )

    @staticmethod
    def whole(elements: int, *, scale: float = 1.0) -> TransferPlan:
        """An exact sum of one region, what a plain collective means."""
        return TransferPlan(elements, (Region(0, elements, 0.0, "all"),), scale=scale)


@dataclass(frozen=True)
class TransferReport:
    """What became of one all-reduce, as this worker saw it. Times in seconds.

    counted, applied: per chunk of the grid, uint8; 1 where this worker's contribution counted,
    where a result was applied (of a lossy pull: at this worker). withheld_chunks (uint32) and
    withheld_values (float32, scaled, concatenated): a committed pull's results that this rank keeps
    as its residual.
    result_error (float32, scaled): what the encoding took from the results that this rank
    aggregated, for the elements from error_offset on; this rank keeps it as its residual.
    delivered: per region, the fraction of this worker's elements that counted. exceeded: the
    regions whose loss exceeded their bound (plans by time only). stats_sum and stats_max: the
    workers' statistics, folded alike everywhere. bytes_sent: UDP payload bytes of this worker.
    passes: that its push took, the most of any aggregator; 0 under control "stream".
    datagram: bytes of the longest datagram that all paths of the job carry, as known when the
    transfer began; the same on all workers. 0 where none was needed.
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


def mix_seed(*parts: int) -> int:
    """Mixes integers into one 64-bit seed (splitmix64's finaliser), alike on every machine."""
    state = 0
    for part in parts:
        state = (state + (part & 0xFFFFFFFFFFFFFFFF) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
