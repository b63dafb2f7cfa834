"""TransferPlan says what a transfer may leave out, and when it ends.

A transfer is what users see of an op, one all-reduce of the engine. Policies write plans, and the
communicator carries them out. docs/design.md explains the terms region, bound, spend, schedule,
fill, order and pull.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwire.core.checks import check_share, is_number, is_whole
from gradwire.core.errors import ConfigError
from gradwire.core.regions import Region, Regions

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
            regions=Regions.of(self.regions).exact,
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
