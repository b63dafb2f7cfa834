"""Consultation: one small exact transfer at a step's end, for what the ballots do not carry.

Three things need it: a phase per layer, in the steps in which the detector decides; the guard, in
every step that it may have to resend; and different scales of the gradients, which end the job.
It starts when the last bucket of its step is done, before DDP has that result, so it comes between
the same two steps of its attachment on all ranks. Buckets of other modules in the same backward
pass may start before or after it, since attachments have no common order
(`Communicator.take_number`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from gradwire.core.agreed import Summary
from gradwire.core.errors import TransferError
from gradwire.core.names import ranks_as_text
from gradwire.core.plan import TransferPlan, mix_seed
from gradwire.core.saved_state import State
from gradwire.core.settings import Settings
from gradwire.policies import Policy
from gradwire.training.step import Ending, Step, layer_norms
from gradwire.transport.communicator import Communicator
from gradwire.transport.transfer import Handle

SCALES = (1 << 32) + 1
"""The index, in the seed, of the transfer that compares scales; it is behind every bucket's."""

END = (1 << 32) + 2
"""The index of the transfer that stands for the end of a step's buckets."""

COMMIT = (1 << 32) + 3
"""The index of the transfer by which all ranks commit a step."""

BACK = (1 << 32) + 4
"""The index of the transfer by which the ranks ask for the way back to an engine."""


class Consultation:
    """Agrees on the layers' norms and on the largest share that a worker lost."""

    def __init__(
        self,
        communicator: Communicator,
        policy: Policy,
        settings: Settings,
        number: int,
        members: tuple[int, ...],
    ) -> None:
        self._communicator = communicator
        self._members = members
        self._policy = policy
        self._settings = settings
        self._number = number
        self._layer_squares: dict[str, float] = {}  # since the detector last decided
        self._layer_steps = 0

    def note(self, step: Step, grad_scale: float) -> None:
        """Adds the norms of a step's layers, if it has any, to those since the last decision."""
        if not step.layer_squares:
            return
        for name, square in step.layer_squares.items():
            known = self._layer_squares.get(name, 0.0)
            self._layer_squares[name] = known + square / grad_scale**2
        self._layer_steps += 1

    def state_dict(self) -> dict[str, object]:
        return {"layer_steps": self._layer_steps, "layer_squares": dict(self._layer_squares)}

    def load_state_dict(self, state: State) -> None:
        """Restores the sums, which start anew where an earlier version saved none."""
        self._layer_steps = state.whole("layer_steps") if "layer_steps" in state.values else 0
        self._layer_squares = {}
        if "layer_squares" in state.values:
            self._layer_squares = state.part("layer_squares").by_name()

    def layers_due(self, summary: Summary) -> list[str]:
        phases = self._policy.phases
        if phases is None or phases.source != "layers" or not phases.due(summary):
            return []
        return sorted(self._layer_squares)  # in the same order on all ranks

    def agree(self, step: Step, summary: Summary) -> Ending[tuple[Summary, float]]:
        """Agrees on the norms of layers that are due, and on the largest share that a worker lost.

        Returns:
            The summary with the layers' norms, and the share.
        """
        names = self.layers_due(summary)
        sums = np.array([self._layer_squares[name] for name in names] or [0.0], np.float32)
        stats = (0.0, 0.0, 0.0, 0.0, step.lost)
        done = yield self._exact(step, sums, len(step.transfers), stats)
        lost = done.report.stats_max[0]
        if names:
            samples = self._layer_steps * self._communicator.world_size
            self._layer_squares, self._layer_steps = {}, 0
            summary = replace(summary, layers=layer_norms(sums, names, samples))
        return summary, lost

    def refuse_scales(self, step: Step, scales: Mapping[int, float | None]) -> Ending[NoReturn]:
        """Finds which ranks multiply their gradients by which scale, since these differ.

        Args:
            scales: The scale of each rank that this worker leads; None for a rank that has none.

        Raises:
            TransferError: Names each scale and its ranks; it is the same on all ranks.
        """
        sums = np.zeros(len(self._members), np.float32)
        for rank, scale in scales.items():
            sums[self._members.index(rank)] = scale or 0.0
        (yield self._exact(step, sums, SCALES)).wait()
        ranks: dict[float, list[int]] = {}
        for rank, scale in zip(self._members, sums.tolist(), strict=True):
            if scale:
                ranks.setdefault(scale, []).append(rank)
        first, *others = ranks.items()
        verb = "multiplies its" if len(first[1]) == 1 else "multiply their"
        named = [f"{ranks_as_text(first[1])} {verb} gradients by {first[0]:.9g}"]
        named += [f"{ranks_as_text(theirs)} by {scale:.9g}" for scale, theirs in others]
        odd = min(reversed(ranks.values()), key=len)
        raise TransferError(
            f"step {step.number}: {', '.join(named)}: the loss scale must be the same on all "
            "ranks; start their scalers alike (init_scale, saved state), and give "
            "attach(scaler=…) on each rank",
            rank=odd[0],
            step=step.number,
            cause="plan",
        )

    def confirm_end(self, step: Step) -> Handle:
        """Starts the transfer that stands where another rank may have a further bucket."""
        return self._exact(step, np.zeros(1, np.float32), END)

    def commit(self, step: Step) -> Handle:
        """Starts the transfer that ends only once all ranks have all results of a step."""
        return self._exact(step, np.zeros(1, np.float32), COMMIT)

    def ask(self, step: Step, *, ready: bool) -> Handle:
        """Starts the transfer by which the ranks ask whether all can leave the host's network.

        The first maximum of its statistics is 0 where all are ready.
        """
        own = 0.0 if ready else 1.0
        return self._exact(step, np.zeros(1, np.float32), BACK, (0.0, 0.0, 0.0, 0.0, own))

    def undo(self, kept: tuple[Mapping[str, float], int]) -> None:
        """Restores what `kept` was, for a step that is agreed on again."""
        squares, self._layer_steps = kept
        self._layer_squares = dict(squares)

    @property
    def kept(self) -> tuple[Mapping[str, float], int]:
        """The sums since the last decision, and of how many steps they are."""
        return dict(self._layer_squares), self._layer_steps

    def _exact(
        self, step: Step, values: NDArray[np.float32], index: int, stats: tuple[float, ...] = ()
    ) -> Handle:
        seed = mix_seed(self._settings.seed, self._number, step.number, index)
        plan = replace(TransferPlan.whole(values.size), seed=seed)
        return step.way.all_reduce(values, plan, step=step.number, stats=stats)
