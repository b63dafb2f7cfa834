"""Policy "mlt": one fixed bound for every tensor, agreed before training (MLT, NSDI 2024).

From the paper: the bound, the bounded-loss receive, zeros for what was lost, and priorities for the
front layers and the large magnitudes, which a switch reads from the DSCP. control="probe" is the
software form of MLT that DBLP's paper (arXiv 2605.01989) compares with.

gradwire's own: how classes follow from layers and magnitudes (`MLT.priorities`), and their DSCPs.
The switch's load balancing is left out. In MLT lost *parameters* keep the last iteration's value;
in a gradient all-reduce a result that does not arrive is a zero gradient at that worker, which then
keeps its parameters (pull="lossy").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire.core.agreed import Phase
from gradwire.core.checks import check_bound
from gradwire.core.errors import ConfigError
from gradwire.core.plan import PRIORITY_CLASSES, TransferPlan, check_class_dscp
from gradwire.policies.base import PlanContext, Policy
from gradwire.policies.parts.priorities import (
    Chunks,
    LayerOrder,
    Priorities,
    by_size,
    check_priority,
    lowest,
)
from gradwire.policies.parts.probe_control import bounded_options
from gradwire.policies.parts.regions import pool

PRIORITIES = ("none", "layer", "magnitude", "both", "results")

CLASS_DSCP = (40, 32, 32, 24, 24, 16, 16, 8)
"""The DSCPs of class_dscp=True: the class selectors CS5 down to CS1 (RFC 2474).

They select the queues 5 to 1 in switches that know nothing else, all below the network's own
control traffic. gradwire's own."""


@dataclass
class MLT(Policy):
    """A fixed bound per tensor.

    Attributes:
        p: The bound; the paper's is 0.008 for EfficientNet-B0 and 0.024 for ResNet-50. Unit: share
            of the elements. Allowed: [0, 1).
        spend: Which missing chunks may be given up: "anything" closes a region as soon as 1 - p of
            it has arrived; "lost" gives up only what the network lost. Allowed: "anything", "lost".
        fill: What takes the place of a missing contribution. Allowed: "zero", "mean", "momentum".
        order: Order of the chunks within a push; None means "shuffled", or "sequential" with
            control="probe". Allowed: "shuffled", "sequential" or None.
        pull: How results come back: "exact", "committed", where all workers leave the same part
            out, or "lossy", under which replicas drift apart; None means "exact", or "lossy" with
            control="probe". Allowed: "exact", "committed", "lossy" (needs control="probe") or None.
        control: "stream", or "probe" for the published passes of probe, bitmap and stop. Allowed:
            "stream", "probe".
        priority: What goes first, and so is not left out: "layer" (front layers), "magnitude"
            (large gradients, this worker's own), "both", "results" (chunks whose last result was
            large, the same on all workers; gradwire's own), or "none" (`order` alone). Allowed:
            "none", "layer", "magnitude", "both", "results".
        class_dscp: DSCPs of the 8 classes for switches that know them; True for 40, 32, 32, 24, 24,
            16, 16 and 8, False for the setting `dscp` alone. Allowed: True, False or a list of 8
            numbers in [0, 63]; with a `priority` only.
    """

    name: ClassVar[str] = "mlt"
    resting_phase: ClassVar[Phase] = "tolerant"

    p: float = 0.008
    spend: str = "anything"
    fill: str = "zero"
    order: str | None = None
    pull: str | None = None
    control: str = "stream"
    priority: str = "none"
    class_dscp: bool | Sequence[int] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bound("p", self.p)
        self._answers()
        check_priority(self.priority, PRIORITIES, self.control, self.order, self.pull)
        if isinstance(self.class_dscp, list):
            self.class_dscp = tuple(self.class_dscp)
        if not isinstance(self.class_dscp, bool):
            check_class_dscp("class_dscp", self.class_dscp)
        if self.priority == "none" and self.class_dscp:
            raise ConfigError.of(
                "class_dscp",
                self.class_dscp,
                "there are no classes; set priority='layer', 'magnitude', 'both' or "
                "'results', or the setting dscp= for all traffic",
                beside="with priority='none'",
            )
        self._layers: LayerOrder | None = None

    def fit(self, tensors: Mapping[str, int] | None) -> None:
        """Notes the order of the layers; raises ConfigError where it is needed and not known."""
        if tensors is not None:
            self._layers = LayerOrder(tensors)
        elif self.priority in ("layer", "both"):
            raise ConfigError.of(
                "priority",
                self.priority,
                "needs the model, which knows its front layers: use attach, or HookState(model=…)",
            )

    @property
    def loosest_bound(self) -> float:
        """The bound, which is that of all regions."""
        return self.p

    def plan(self, context: PlanContext) -> TransferPlan:
        """Makes one region per tensor (small ones pooled), which closes at 1 - p."""
        answers = self._answers()
        if self.priority != "none":
            answers["order"] = "priority"
        return context.plan(
            pool(context.tensors, self.p, context.chunk_elements),
            class_dscp=self._table,
            **answers,
        )

    def options(self) -> dict[str, object]:
        """Returns the options, with order and pull decided, which the ranks compare."""
        answers = self._answers()
        return {**super().options(), "order": answers["order"], "pull": answers["pull"]}

    def _answers(self) -> dict[str, Any]:
        return bounded_options(self.control, self.spend, self.fill, self.order, self.pull)

    @property
    def ranks_results(self) -> bool:
        """Whether chunks are ranked by the magnitudes of their last results."""
        return self.priority == "results"

    @property
    def _table(self) -> tuple[int, ...]:
        return CLASS_DSCP if self.class_dscp is True else tuple(self.class_dscp or ())

    def priorities(
        self, context: PlanContext, gradient: NDArray[np.float32], chunks: Chunks
    ) -> Priorities | None:
        """Returns classes of equally many layers, of equally many chunks by magnitude, or of both.

        Under "both" the class is the sum of the layer's quarter and the magnitude's. The last class
        holds the chunks that the bound allows to leave out: in each tensor the share p with the
        smallest magnitudes.
        """
        if self.priority == "none":
            return None
        if self.priority == "layer":
            assert self._layers is not None
            return self._layers.classes(context.tensors, chunks, PRIORITY_CLASSES)
        order = np.argsort(chunks.mean_magnitudes(gradient), kind="stable")
        last = PRIORITY_CLASSES - 1
        if self.priority == "magnitude":
            classes = by_size(order, last)
        else:
            assert self._layers is not None
            classes = self._layers.classes(context.tensors, chunks, 4) + by_size(order, 4)
        classes[lowest(order, chunks, self.p)] = last
        return classes
