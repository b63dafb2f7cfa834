"""Policy "adaptive": bounds by phase and layer, spent on losses and delays; gradwire's own.

It combines ideas of several systems: the phases of DBLP (arXiv 2605.01989), vesting as in its
follow-up, layers of different tolerance as in PLOT, a phase per layer as in Accordion (MLSys
2021), and compression only where it shortens steps
(`gradwire.policies.parts.trials`). A tensor's bound is p_low in its layer's critical phases and
p_high elsewhere, times its tolerance:

- With a calibration (`table`, made by `gradwire calibrate`) p_high is the tensor's bound in the
  table, and p_low is at most that.
- Without one the tolerance depends on shape, name and place: 0 for tensors of one dimension (norm
  layers and biases) and those named like them, half for the front tenth of the model, else 1.

Time-outs are learned (`gradwire.policies.parts.lateness`). As long as a push takes no longer than
pushes usually do, all of it is waited for, and lost chunks are sent again. Once it takes longer, a
region closes as soon as it is within its bound, whatever the cause of the delay. While the usual
times are not known, a chunk is given up only when loss detection declares it lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gradwire.core.checks import check_bound
from gradwire.core.errors import ConfigError
from gradwire.core.plan import BY_BOUND, CloseStep, TransferPlan, check_choice, encoded_share
from gradwire.core.report import StepReport
from gradwire.policies.base import (
    FeedbackNeed,
    PlanContext,
    Policy,
    check_transfer_options,
    option_names,
    topk_needs_feedback,
)
from gradwire.policies.parts.compression import INT8, encoding_for
from gradwire.policies.parts.fragile import is_fragile
from gradwire.policies.parts.lateness import PushHistory
from gradwire.policies.parts.phases import Every, make_detector
from gradwire.policies.parts.regions import regions_by_tensor
from gradwire.policies.parts.trials import Encoding, Trials
from gradwire.policies.plot import PLOT

FRONT, FRONT_TOLERANCE = 0.1, 0.5

TOPK = 0.75 * INT8
"""Top-k's share of the dense bytes: an eighth of the elements, which is 3/16 of the bytes.

No encoding of this policy is smaller. docs/accuracy.md, "Choices", compares other shares."""

ENCODINGS = tuple(encoding_for(share) for share in (1.0, 0.5, INT8, TOPK))
TRIED = {"never": 1, "auto": 3, "topk": 4}
"""What may be sent, from the mildest to the strongest, and how many of them by `compress`."""


@dataclass
class Adaptive(Policy):
    """Bounds by phase and layer, and the encoding under which steps are shortest.

    Attributes:
        p_low: Bound of critical phases before a tensor's tolerance. Unit: share of the elements.
            Allowed: [0, 1).
        p_high: Bound of tolerant phases before a tensor's tolerance. Unit: share of the elements.
            Allowed: [0, 1), `p_low` or more; left out beside `table`.
        table: File of `gradwire calibrate`, or bounds by tensor-name pattern (as for the policy
            "plot"), in place of p_high; None for bounds by shape, name and place. Allowed: the name
            of a file, a table or None.
        eta: Relative change of the gradient's norm that makes a phase critical. Unit: share.
            Allowed: above 0.
        every: Time between two decisions of the detector: a number of steps, or "epoch" for each
            `attachment.epoch(n)`. Unit: steps. Allowed: 1 or more, or "epoch".
        detector: What the detector of phases looks at: "ours" is the mean norm of the workers' own
            gradients, "paper" the norm of one applied gradient, and "layers" the first of these for
            each layer, which has a phase of its own. Allowed: "ours", "paper", "layers".
        compress: "auto" takes f16 or int8 where it shortens steps; "topk" tries top-k as well, 3/16
            of the bytes, which needs error feedback and is left out where there are servers;
            "never" stays dense. Allowed: "auto", "topk", "never".
        fill: What takes the place of a missing contribution. Allowed: "zero", "mean", "momentum".
        order: Order of the chunks within a push. Allowed: "shuffled", "sequential".
        pull: How results come back: "exact", or "committed", where all workers leave the same part
            out. Allowed: "exact", "committed".
    """

    name: ClassVar[str] = "adaptive"
    compressions: ClassVar[tuple[str, ...]] = ("auto", "topk", "never")

    p_low: float = 0.008
    p_high: float = 0.408
    table: str | dict[str, float] | None = None
    eta: float = 0.5
    every: Every = 10
    detector: str = "layers"
    compress: str = "auto"
    fill: str = "zero"
    order: str = "shuffled"
    pull: str = "exact"
    _front: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bound("p_low", self.p_low)
        check_bound("p_high", self.p_high)
        if self.table is None and self.p_high < self.p_low:
            raise ConfigError.of(
                "p_high",
                self.p_high,
                "the bound of tolerant phases must be p_low or more",
                beside=f"is below p_low={self.p_low!r}",
            )
        if self.table is not None and not isinstance(self.table, (str, Path, Mapping)):
            raise ConfigError.of(
                "table",
                self.table,
                "the file of a calibration (`gradwire calibrate` makes one), or bounds by "
                "tensor-name pattern; None for bounds by shape, name and place",
            )
        if self.table is not None and self.p_high != type(self).p_high:
            raise ConfigError.of(
                "p_high",
                self.p_high,
                "the table holds the bounds of tolerant phases; leave p_high out",
                beside="beside table=…",
            )
        check_choice("compress", self.compress, self.compressions)
        check_transfer_options("lost", self.fill, self.order, self.pull)
        self._bounds = None if self.table is None else PLOT(table=self.table)
        self._known: dict[str, tuple[float, float]] = {}
        self._trials = Trials.from_half(ENCODINGS[: TRIED[self.compress]])
        self._pushes = PushHistory()
        self._sent = 1.0  # bytes of the last step relative to float32
        self.phases = make_detector(self.eta, self.every, self.detector)

    @property
    def encoding(self) -> Encoding:
        """The encoding of the next step, and the share of the elements that it keeps."""
        return self._trials.encoding

    @property
    def compares_encodings(self) -> bool:
        """Whether there is more than one encoding to choose from."""
        return len(self._trials.encodings) > 1

    def options(self) -> dict[str, object]:
        """Returns the options with the contents of the table, which the ranks compare."""
        values = {name: getattr(self, name) for name in option_names(type(self))}
        if self._bounds is not None:
            values["table"] = self._bounds.options()["table"]
        return values

    def fit(self, tensors: Mapping[str, int] | None) -> None:
        """Checks the table against the model, and notes which tensors are in its front.

        Raises:
            ConfigError: No model is known, or the table does not fit it.
        """
        if tensors is None:
            raise ConfigError.of(
                "policy",
                "adaptive",
                "it needs the tensors' names: give the hook HookState(model=…), or choose another "
                "policy",
                beside="(the default) without a model",
            )
        if self._bounds is not None:
            self._bounds.fit(tensors)
        names = list(tensors)
        self._known = {}
        if self.servers:  # servers keep no residuals, so what top-k leaves out would be lost
            self._trials = Trials.from_half(self._trials.encodings[: TRIED["auto"]])
        self._front = frozenset(names[: int(len(names) * FRONT)])

    def needs_feedback(self) -> FeedbackNeed | None:
        """Returns the need of top-k; see Policy."""
        return topk_needs_feedback(self.compress, self.compressions) or super().needs_feedback()

    def bounds_of(self, tensor: str) -> tuple[float, float]:
        """Returns a tensor's bounds in critical and in tolerant phases."""
        known = self._known.get(tensor)
        if known is None:
            known = self._known[tensor] = self._find_bounds(tensor)
        return known

    def _find_bounds(self, tensor: str) -> tuple[float, float]:
        if self._bounds is not None:
            most = self._bounds.bound_of(tensor)
            return min(self.p_low, most), most
        fragile = tensor in self.vectors or is_fragile(tensor)
        tolerance = 0.0 if fragile else 1.0
        if tensor in self._front:
            tolerance *= FRONT_TOLERANCE
        return tolerance * self.p_low, tolerance * self.p_high

    def plan(self, context: PlanContext) -> TransferPlan:
        """Makes one region per tensor (small ones pooled), in the encoding of the moment."""
        phases = self.phases
        assert phases is not None
        encoding, kept = self.encoding
        own = encoded_share(context.encoding, 1.0)
        share = min(encoded_share(encoding, kept), own)  # as f32 and f16 travel in their own width
        low, high = zip(*(self.bounds_of(slot.name) for slot in context.tensors), strict=True)
        now = [
            strict if self._critical(slot.layer, context) else loose
            for slot, strict, loose in zip(context.tensors, low, high, strict=True)
        ]
        regions = regions_by_tensor(
            context.tensors,
            now,
            [strict or loose for strict, loose in zip(low, high, strict=True)],
            int(context.chunk_elements * own / share),
        )
        late = self._pushes.late_after(context.bucket, share)
        spend: dict[str, Any] = {"spend": "lost"}
        if late is not None:
            schedule = (_since_first(0.0, 1.0), _since_first(late, BY_BOUND))
            spend = {"spend": "late", "schedule": schedule}
        return context.plan(
            regions,
            **spend,
            fill=self.fill,
            order=self.order,
            pull=self.pull,
            encoding=encoding,
            kept=kept,
        )

    def observe(self, report: StepReport) -> None:
        """Updates phases, encoding and push times by what was agreed."""
        super().observe(report)
        self._trials.observe(report)
        self._pushes.observe(report.agreed, self._sent)
        self._sent = report.encoded_share

    def state_dict(self) -> dict[str, object]:
        """Returns phases, push times, and the times of encodings."""
        return {
            **super().state_dict(),
            "trials": self._trials.state_dict(),
            "pushes": self._pushes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else."""
        trials = state.get("trials", {"untried": None})
        if "phases" in state and isinstance(trials, Mapping) and "untried" in trials:
            raise ConfigError.about(
                "state['phases'] of policy 'adaptive' was saved by an earlier version, which chose "
                "encodings by another rule",
                "start the policy anew, and load the model and the optimizer without this state",
                setting="state['phases']['trials']",
                value=state.get("trials"),
            )
        self._read(state, "trials", "pushes")
        self._trials.load_state_dict(state["trials"])
        self._pushes.load_state_dict(state["pushes"])

    def _critical(self, layer: str, context: PlanContext) -> bool:
        if self.detector != "layers" or self.phases is None:
            return context.phase == "critical"
        return self.phases.phase_of(layer) == "critical"


def _since_first(delay_s: float, fraction: float) -> CloseStep:
    """Starts the clock at a worker's first arrival, so that no worker is late by computing."""
    return CloseStep("first_arrival", "worker", delay_s, fraction)
