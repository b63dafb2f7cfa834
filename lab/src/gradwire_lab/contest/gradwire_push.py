"""A push of gradwire without a pull is a contestant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gradwire.core.plan import CloseStep
from gradwire.core.settings import Settings
from gradwire.transport.communicator import Communicator
from gradwire_lab.contest.gradwire_rounds import ROUND_TIMEOUT, Rounds, counters_of, make_plan
from gradwire_lab.contest.serving import ServerThread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class GradwirePush:
    """In this contestant all ranks but the last push to a server on the last; nothing is pulled."""

    def __init__(
        self,
        bound: float = 0.0,
        spend: str = "nothing",
        schedule: Sequence[Sequence[float]] = (),
        control: str = "stream",
        options: Mapping[str, object] | None = None,
        group: str = "world",
    ) -> None:
        """Choose the plan: see `make_plan`.

        Args:
            schedule: seconds after a worker's first arrival, and the share that is enough then: so
                the bound is spent. Without a bound nothing is given up at any time.
            control: "stream", or "probe" for the papers' passes.
            group: the group of endpoints; contestants of different groups share no engine.
        """
        self._control, self._group = control, group
        self._bound, self._spend = bound, spend
        self._schedule = tuple(
            CloseStep("first_arrival", "worker", seconds, share) for seconds, share in schedule
        )
        self._settings = Settings.build({**(options or {}), "route": "server", "servers": 1})
        self._rounds: Rounds | None = None
        self._server: ServerThread | None = None

    def setup(self, rank: int, world: int, store: Store) -> None:
        settings = self._settings
        if rank == world - 1:
            self._server = ServerThread(
                store, workers=world - 1, index=0, settings=settings, group=self._group
            )
            return
        self._rounds = Rounds(
            Communicator(
                store, rank, world - 1, settings, group=self._group, timeout_s=ROUND_TIMEOUT
            )
        )

    def run_round(self, buffer: torch.Tensor) -> Mapping[str, Any] | None:
        """Push the buffer; done when the server has summed all of it from everybody."""
        if self._rounds is None:
            assert self._server is not None
            self._server.check()
            return None
        plan = make_plan(buffer.numel(), self._bound, self._spend, "none", self._rounds.step)
        if self._schedule:
            plan = replace(plan, spend="late", schedule=self._schedule, order="shuffled")
        # Each worker closes by itself, since no two leave out the same chunks.
        if self._control == "probe":
            passes: dict[str, Any] = {"control": "probe", "order": "sequential"}
            plan = replace(plan, schedule=(CloseStep(scope="worker"),), **passes)
        return counters_of(self._rounds.run(buffer, plan))

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check nothing, because no sums come back."""

    def report(self) -> dict[str, Any]:
        return {} if self._rounds is None else self._rounds.report()

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        if self._server is not None:
            self._server.close()
