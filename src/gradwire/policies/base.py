"""What every policy is: a pure writer of plans, fed with reports."""

from __future__ import annotations

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire.core.agreed import Phase
from gradwire.core.checks import plain
from gradwire.core.plan import FILLS, SPENDS, Region, TensorSlot, TransferPlan, check_choice
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State
from gradwire.policies.parts.phases import PhaseDetector
from gradwire.policies.parts.priorities import Chunks, Priorities

__all__ = ["PlanContext", "Policy", "check_transfer_options", "option_names"]


PATIENCE = 1000
"""Steps without any epoch before a warning, where a policy goes by epochs."""

SHARED_ORDERS = ("shuffled", "sequential")
"""The orders that a user may ask for: "priority" is for policies that give classes."""
REPLICATED_PULLS = ("exact", "committed")
"""The pulls that give every replica the same result; a push alone is no way to train."""


@dataclass(frozen=True)
class PlanContext:
    """What a plan may depend on; every field is the same on all ranks.

    tensors: the bucket's parameters in order, covering [0, elements). seed: of this step and
    bucket. chunk_elements: float32 elements that one datagram carries. bucket: its index in the
    step.
    """

    tensors: tuple[TensorSlot, ...]
    elements: int
    step: int
    phase: Phase
    world_size: int
    seed: int
    chunk_elements: int
    bucket: int = 0

    def plan(self, regions: tuple[Region, ...], *, pull: str, **answers: Any) -> TransferPlan:
        """The bucket's plan: the workers' mean, of regions whose strictest bound a pull keeps too.

        answers: the policy's own, fields of `TransferPlan`. Regions with bound 0 are whole in any
        pull, so it keeps the strictest of the others.
        """
        bounds = [region.bound for region in regions if region.bound]
        pull_bound = min(bounds, default=0.0) if pull in ("committed", "lossy") else 0.0
        return TransferPlan(
            self.elements,
            regions,
            pull=pull,
            pull_bound=pull_bound,
            scale=1.0 / self.world_size,
            seed=self.seed,
            **answers,
        )


class Policy(ABC):
    """Base of the policies. Subclasses are dataclasses: their fields are the policy's options.

    `plan` must be a pure function of the configuration, the context and the agreed part of the
    reports observed (`report.agreed`), so that all ranks write the same plan.
    """

    name: ClassVar[str]
    """The name `attach(policy=…)` knows it by."""
    resting_phase: ClassVar[Phase] = "critical"
    """The phase that is reported when the policy has no phases."""
    feedback: ClassVar[bool | None] = None
    """What error_feedback="auto" means for it; None leaves it to the optimizer's family."""
    halt_after: int = 0
    """After so many guarded steps running training halts; 0 for never."""

    fill: str | None = "zero"
    """What becomes of missing contributions: one of `gradwire.core.plan.FILLS`, or None, which
    leaves it to the optimizer (`gradwire.training.configure` decides it then)."""

    fill_was_open: bool = False
    """Whether it was None and has been decided."""

    momentum: float = 0.0
    """Of the momentum memory that each worker keeps (`gradwire.training.feedback.velocity`); 0 for
    none."""

    vectors: frozenset[str] = frozenset()
    """The model's tensors of fewer than two dimensions; set before `prepare`."""

    servers: int = 0
    """How many servers sum the gradients, 0 on the sharded route; set before `prepare`."""

    phases: PhaseDetector | None = None
    """Decides the phase; None for a policy without phases."""

    def __post_init__(self) -> None:
        """Takes numpy's and torch's scalars among the options for the numbers that they hold."""
        for name in option_names(type(self)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                value = {key: plain(inner) for key, inner in value.items()}
            elif type(value) in (list, tuple):
                value = type(value)(plain(inner) for inner in value)
            setattr(self, name, plain(value))

    @abstractmethod
    def plan(self, context: PlanContext) -> TransferPlan:
        """Writes the plan of one bucket's all-reduce."""

    def prepare(self, tensors: Mapping[str, int] | None) -> None:  # noqa: B027, most need none
        """Checks the configuration against the model, before the ranks meet.

        tensors: elements of each parameter by name, None when no model is known (the bare hook).
        Raises ConfigError for names or sizes that the model does not have.
        """

    def priorities(
        self, context: PlanContext, gradient: NDArray[np.float32], chunks: Chunks
    ) -> Priorities | None:
        """This worker's class of each chunk, uint8, from 0, which goes first, to 7.

        Asked after `plan`, for plans with order "priority" only, in the thread that starts the
        transfer. gradient: what will be sent, flat: with the residual, and transformed if the plan
        has a transform; not to be changed. Unlike a plan the classes may differ between ranks, so
        they may depend on the gradient. None: all alike. Not asked with `ranks_results`.
        """
        return None

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return self.phases.phase if self.phases is not None else self.resting_phase

    @property
    def fill_beside_adam(self) -> str:
        """What a fill of None is where the optimizer is of Adam's family, without feedback."""
        return "zero"

    @property
    def ranks_results(self) -> bool:
        """Whether plans of order "priority" go by how large each chunk's last result was, the same
        on all replicas (`gradwire.training.feedback.result_sizes`)."""
        return False

    @property
    def congested(self) -> bool:
        """Whether this worker's last step found its network congested; travels to all ranks."""
        return False

    def rest(self, elapsed_s: float) -> float:
        """The share of this worker's last steps that would not be waiting for a transfer if
        transfers were dense; 1 while that is not known. The largest of all ranks' is agreed, by
        turns. elapsed_s: since the start of the last step."""
        return 1.0

    @property
    def floor(self) -> float:
        """The share of a step that every worker must deliver, else the guard acts; 0 for none."""
        return 0.0

    def observe(self, report: StepReport) -> None:
        """Reads the report of the step just completed, before the next step's plans; warns,
        once, where epochs are waited for and none begins."""
        if self.phases is not None:
            self.phases.observe(report.agreed)
        waits = getattr(self, "every", None) == "epoch" and report.agreed.epoch < 0
        if waits and report.step + 1 == PATIENCE:
            warnings.warn(
                f"policy {self.name!r} with every='epoch': {PATIENCE} steps have passed and no "
                "epoch has begun: call attachment.epoch(n) when one does, or give every= as a "
                "number of steps",
                RuntimeWarning,
                stacklevel=2,
            )

    def options(self) -> dict[str, object]:
        """The configuration as plain values; ranks compare it before they start."""
        return {name: getattr(self, name) for name in option_names(type(self))}

    def state_dict(self) -> dict[str, object]:
        """What a resumed run needs to decide as this one would."""
        return {} if self.phases is None else {"phases": self.phases.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else.

        A failed call may leave a policy half loaded: an attachment tries a copy first.
        """
        self._read(state)

    def _read(self, state: object, *more: str) -> State:
        """Checks the keys of a state, those of the phases and `more`, and loads the phases."""
        phases = () if self.phases is None else ("phases",)
        read = State(state, "state['phases']")
        read.keys((*phases, *more))
        if self.phases is not None:
            self.phases.load_state_dict(read.values["phases"])
        return read


def option_names(policy: type) -> tuple[str, ...]:
    """The options of a policy: the fields of its dataclass."""
    if not dataclasses.is_dataclass(policy):
        return ()
    return tuple(field.name for field in dataclasses.fields(policy) if field.init)


def check_transfer_options(spend: str, fill: str, order: str, pull: str) -> None:
    """Raises ConfigError unless the four words common to lossy policies are known."""
    check_choice("spend", spend, SPENDS)
    check_choice("fill", fill, FILLS)
    check_choice("order", order, SHARED_ORDERS)
    check_choice("pull", pull, REPLICATED_PULLS)
