"""The base class of policies, which write plans and read reports and do nothing else."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire.core import callers
from gradwire.core.agreed import Phase
from gradwire.core.checks import plain
from gradwire.core.plan import FILLS, SPENDS, TransferPlan, check_choice
from gradwire.core.regions import Region, TensorSlot
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State
from gradwire.policies.parts.phases import Every, PhaseDetector
from gradwire.policies.parts.priorities import Chunks, Priorities

PATIENCE = 1000
"""Steps without any epoch after which a policy that goes by epochs warns."""

SHARED_ORDERS = ("shuffled", "sequential")
"""The orders that a user may ask for; "priority" is for policies that give classes."""
REPLICATED_PULLS = ("exact", "committed")
"""The pulls that give every replica the same result; a push alone cannot train."""


@dataclass(frozen=True)
class PlanContext:
    """What a plan may depend on; every field is the same on all ranks.

    Attributes:
        tensors: The bucket's parameters in order, covering [0, elements).
        elements: Number of elements of the bucket.
        step: The training step.
        phase: The phase of the step.
        world_size: Number of workers.
        seed: Seed of this step and bucket.
        chunk_elements: Number of elements in one datagram, in the encoding below.
        bucket: Index of the bucket in the step.
        encoding: The encoding that carries the bucket's elements unchanged, which takes the place
            of f32 in its plan (`TransferPlan.in_width_of`).
    """

    tensors: tuple[TensorSlot, ...]
    elements: int
    step: int
    phase: Phase
    world_size: int
    seed: int
    chunk_elements: int
    bucket: int = 0
    encoding: str = "f32"

    def plan(self, regions: tuple[Region, ...], *, pull: str, **answers: Any) -> TransferPlan:
        """Makes the bucket's plan of a mean over the workers.

        A pull that may lose keeps the strictest of the regions' bounds. Regions with bound 0 do
        not count there, for they are whole in any pull.

        Args:
            regions: The bucket's regions.
            pull: How the results come back.
            answers: Further fields of `TransferPlan`.

        Returns:
            The plan.
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


@dataclass(frozen=True)
class FeedbackNeed:
    """An option that makes sense with error feedback only.

    Attributes:
        option: Its name.
        value: Its value.
        why: What feedback does for it, as a sentence of an error.
        instead: What to set without feedback, as in "momentum=0".
    """

    option: str
    value: object
    why: str
    instead: str


def topk_needs_feedback(value: str, compressions: Sequence[str]) -> FeedbackNeed | None:
    """Returns the need of an option compress="topk"; None for another value.

    Args:
        value: Value of the option.
        compressions: All values of it.
    """
    if value != "topk":
        return None
    milder = " or ".join(repr(each) for each in compressions if each != "topk")
    why = "top-k leaves most elements out and only feedback returns them"
    return FeedbackNeed("compress", value, why, f"compress={milder}")


class Policy(ABC):
    """Base of the policies. Subclasses are dataclasses, whose fields are the policy's options.

    `plan` must be a pure function of the configuration, the context and the agreed part of the
    observed reports (`report.agreed`), so that all ranks write the same plan.
    """

    name: ClassVar[str]
    """The name by which `attach(policy=…)` finds it."""
    resting_phase: ClassVar[Phase] = "critical"
    """The phase that is reported where the policy has no phases."""
    feedback: ClassVar[bool | None] = None
    """The meaning of error_feedback="auto" for it; None leaves it to the optimizer's family."""
    halt_after: int = 0
    """The number of guarded steps in a row after which training halts; 0 for never."""

    fill: str | None = "zero"
    """How missing contributions are filled, one of `gradwire.core.plan.FILLS`.

    None leaves it to the optimizer; `gradwire.training.configure` then decides it."""

    fill_was_open: bool = False
    """Whether `fill` was None and has been decided since."""

    momentum: float = 0.0
    """Momentum that each worker keeps (`gradwire.training.feedback.velocity`); 0 for none."""

    every: Every | None = None
    """Steps between two decisions, or "epoch"; None for a policy that decides by each step."""

    vectors: frozenset[str] = frozenset()
    """Names of the model's tensors of fewer than two dimensions, which `prepare` notes."""

    servers: int = 0
    """Number of servers that sum the gradients, 0 on the sharded route; `prepare` notes it."""

    scattered: bool = False
    """Whether each rank gets its shard of the results alone, as under fully_shard."""

    phases: PhaseDetector | None = None
    """The detector that decides the phase; None for a policy without phases."""

    def __post_init__(self) -> None:
        """Replaces numpy's and torch's scalars among the options by the numbers that they hold."""
        for name in option_names(type(self)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                value = {key: plain(inner) for key, inner in value.items()}
            elif type(value) in (list, tuple):
                value = type(value)(plain(inner) for inner in value)
            setattr(self, name, plain(value))

    @abstractmethod
    def plan(self, context: PlanContext) -> TransferPlan:
        """Writes the plan of one bucket's transfer."""

    def prepare(
        self,
        tensors: Mapping[str, int] | None,
        *,
        vectors: frozenset[str] = frozenset(),
        servers: int = 0,
    ) -> None:
        """Makes it ready for a model and a route, before the ranks meet.

        Args:
            tensors: Number of elements of each parameter by name; None where no model is known
                (the bare hook).
            vectors: Names of the model's tensors of fewer than two dimensions.
            servers: Number of servers that sum the gradients, 0 on the sharded route.

        Raises:
            ConfigError: The configuration does not fit the model.
        """
        self.vectors, self.servers = vectors, servers
        self.fit(tensors)

    def fit(self, tensors: Mapping[str, int] | None) -> None:  # noqa: B027, most need none
        """Checks the configuration against the model; `vectors` and `servers` are known here.

        Args:
            tensors: Number of elements of each parameter by name; None where no model is known.

        Raises:
            ConfigError: The configuration names tensors that the model lacks, or does not fit it.
        """

    def priorities(
        self, context: PlanContext, gradient: NDArray[np.float32], chunks: Chunks
    ) -> Priorities | None:
        """Returns this worker's class of each chunk.

        It is called after `plan`, for plans with order "priority" only and not with
        `ranks_results`, in the thread that starts the transfer. Unlike a plan the classes may
        differ between ranks, so they may depend on the gradient.

        Args:
            context: The context of the plan.
            gradient: float32, one value per element: what will be sent, residual included, and
                transformed where the plan has a transform. It must not be changed.
            chunks: The chunk grid of the plan.

        Returns:
            uint8 for each chunk, from 0, which goes first, to 7; None where all are of one class.
        """
        return None

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return self.phases.phase if self.phases is not None else self.resting_phase

    @property
    def fill_beside_adam(self) -> str:
        """The fill that None stands for beside an optimizer of Adam's family, without feedback."""
        return "zero"

    @property
    def awaits_epochs(self) -> bool:
        """Whether it decides by epochs, which the user has to begin (`attachment.epoch(n)`)."""
        return self.every == "epoch"

    @property
    def loosest_bound(self) -> float:
        """The share that each region may lack in the phase that allows most.

        It is 0 where regions have bounds of their own, or close by time.
        """
        return 0.0

    def needs_feedback(self) -> FeedbackNeed | None:
        """Returns what an option of it needs error feedback for; None where it can do without."""
        if not self.momentum:
            return None
        return FeedbackNeed(
            "momentum",
            self.momentum,
            "velocities that are not sent stay in the residuals",
            "momentum=0",
        )

    @property
    def ranks_results(self) -> bool:
        """Whether plans of order "priority" rank chunks by the magnitudes of their last results.

        These are the same on all replicas (`gradwire.training.feedback.result_sizes`).
        """
        return False

    @property
    def congested(self) -> bool:
        """Whether this worker's last step met a congested network; all ranks learn it."""
        return False

    @property
    def compares_encodings(self) -> bool:
        """Whether it goes by the processor's time for an encoding, which is measured then."""
        return False

    @property
    def floor(self) -> float:
        """The share of a step that every worker must deliver, else the guard acts; 0 for none."""
        return 0.0

    def observe(self, report: StepReport) -> None:
        """Reads the report of the step just completed, before the next step's plans.

        It warns once where the policy goes by epochs and none has begun.
        """
        if self.phases is not None:
            self.phases.observe(report.agreed)
        waits = self.awaits_epochs and report.agreed.epoch < 0
        if waits and report.step + 1 == PATIENCE:
            callers.warn(
                f"policy {self.name!r} with every='epoch': {PATIENCE} steps have passed and no "
                "epoch has begun: call attachment.epoch(n) when one begins, or give every= as a "
                "number of steps",
            )

    def options(self) -> dict[str, object]:
        """Returns the configuration as plain values, which the ranks compare before they start."""
        return {name: getattr(self, name) for name in option_names(type(self))}

    def state_dict(self) -> dict[str, object]:
        """Returns everything that a resumed run needs to decide as this one would."""
        return {} if self.phases is None else {"phases": self.phases.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        A failed call may leave a policy half loaded; an attachment therefore tries a copy first.

        Raises:
            ConfigError: The state is damaged, or of another policy.
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
    """Returns the names of a policy's options, the fields of its dataclass."""
    if not dataclasses.is_dataclass(policy):
        return ()
    return tuple(field.name for field in dataclasses.fields(policy) if field.init)


def check_transfer_options(spend: str, fill: str, order: str, pull: str) -> None:
    """Checks the options common to lossy policies; raises ConfigError for an unknown value."""
    check_choice("spend", spend, SPENDS)
    check_choice("fill", fill, FILLS)
    check_choice("order", order, SHARED_ORDERS)
    check_choice("pull", pull, REPLICATED_PULLS)
