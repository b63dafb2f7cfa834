"""gradwire has contestants of its own in races, see `gradwire_lab.contest.contestants`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.core.plan import BY_BOUND, CloseStep, TransferPlan
from gradwire.core.regions import Region
from gradwire.core.settings import Settings
from gradwire.core.transfer_report import TransferReport
from gradwire.training.bucket import Bucket
from gradwire.training.hook import HookState
from gradwire.transport.communicator import Communicator
from gradwire_lab.contest.contestants import as_bfloats, upper_halves
from gradwire_lab.contest.serving import ServerThread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ROUND_TIMEOUT = 60.0
"""Seconds that a round may take where no setting says otherwise."""

_GRACE = 5.0
_ENCODING_ERROR = 0.02


def make_plan(
    elements: int, bound: float, spend: str, pull: str, seed: int, encoding: str = "f32"
) -> TransferPlan:
    """Make a plan of one region and bound; spend "anything" closes it eagerly."""
    return TransferPlan(
        elements,
        (Region(0, elements, bound, "all"),),
        spend=spend if bound else "nothing",
        schedule=(CloseStep(fraction=BY_BOUND),) if bound else (CloseStep(),),
        order="shuffled" if bound else "sequential",
        pull=pull,
        pull_bound=bound if pull == "committed" else 0.0,
        encoding=encoding,
        seed=seed,
    )


class _Rounds:
    """A contestant's rounds on a communicator are counted here.

    The engine is shared by this process's contestants: its counters are everybody's.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.step = 0
        self._sent = 0
        self._retransmissions = 0

    def run(self, buffer: torch.Tensor, plan: TransferPlan) -> TransferReport:
        allowed = self._communicator.timeout_s + _GRACE  # the engine fails earlier, with a reason
        report = self._communicator.all_reduce(buffer, plan, step=self.step).wait(allowed)
        self.step += 1
        self._sent += report.packets_sent
        self._retransmissions += report.retransmissions
        return report

    def report(self) -> dict[str, Any]:
        return {
            "engine": self._communicator.counters(),
            "packets_sent": self._sent,
            "retransmissions": self._retransmissions,
        }

    def close(self) -> None:
        self._communicator.close()


class GradwireAllReduce:
    """This contestant is an all-reduce over the sharded route; bound 0 is exact."""

    def __init__(
        self,
        bound: float = 0.0,
        spend: str = "nothing",
        pull: str = "exact",
        encoding: str = "f32",
        bfloats: bool = False,
    ) -> None:
        """Choose the plan, see `make_plan`, or take the buffer's memory as bfloat16."""
        self._bfloats = bfloats
        self._bound, self._spend, self._pull = bound, spend, pull
        self._encoding = encoding
        self._delivered: list[float] = []
        self._rounds: _Rounds | None = None

    def setup(self, rank: int, world: int, store: Store) -> None:
        """Open the engine and meet the other ranks."""
        self._rounds = _Rounds(
            Communicator(store, rank, world, Settings.build({}), timeout_s=_ROUND_TIMEOUT)
        )

    def run_round(self, buffer: torch.Tensor) -> None:
        """Sum the buffer over all ranks."""
        assert self._rounds is not None
        if self._bfloats:
            self._rounds.run(
                as_bfloats(buffer), TransferPlan.whole(2 * buffer.numel(), encoding="bf16")
            )
            return
        plan = make_plan(
            buffer.numel(), self._bound, self._spend, self._pull, self._rounds.step, self._encoding
        )
        self._delivered.append(min(self._rounds.run(buffer, plan).delivered))

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check the exact sum, or that each element is the sum of some contributions."""
        total = sum(inputs.values())
        if self._bfloats:
            buffer = upper_halves(buffer)
        if self._encoding != "f32":
            if not bool(((buffer - total).abs() <= _ENCODING_ERROR * total).all()):
                raise ValueError(f"gradwire {self._encoding}: the sum is not about {total}")
            return
        values = np.unique(buffer.numpy())
        sums = {0.0}
        for value in inputs.values():
            sums |= {each + value for each in sums}
        allowed = sums if self._bound else {total}
        if not set(values.tolist()) <= allowed:
            raise ValueError(f"gradwire: values {values[:8]} where the sum is {total}")

    def report(self) -> dict[str, Any]:
        """Return the counters of the engine and what was delivered."""
        assert self._rounds is not None
        delivered = self._delivered or [1.0]
        return {
            **self._rounds.report(),
            "delivered_mean": sum(delivered) / len(delivered),
            "delivered_min": min(delivered),
        }

    def close(self) -> None:
        """Close the engine."""
        if self._rounds is not None:
            self._rounds.close()


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
            bound: the bound of the whole buffer.
            spend: what may be given up.
            schedule: seconds after a worker's first arrival, and the share that is enough then: so
                the bound is spent. Without a bound nothing is given up at any time.
            control: "stream", or "probe" for the papers' passes.
            options: settings besides the route.
            group: the group of endpoints; contestants of different groups share no engine.
        """
        self._control, self._group = control, group
        self._bound, self._spend = bound, spend
        self._schedule = tuple(
            CloseStep("first_arrival", "worker", seconds, share) for seconds, share in schedule
        )
        self._settings = Settings.build({**(options or {}), "route": "server", "servers": 1})
        self._rounds: _Rounds | None = None
        self._server: ServerThread | None = None

    def setup(self, rank: int, world: int, store: Store) -> None:
        """Open the engine: the server's on the last rank."""
        settings = self._settings
        if rank == world - 1:
            self._server = ServerThread(
                store, workers=world - 1, index=0, settings=settings, group=self._group
            )
            return
        self._rounds = _Rounds(
            Communicator(
                store, rank, world - 1, settings, group=self._group, timeout_s=_ROUND_TIMEOUT
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
        """Return the counters of the worker's engine."""
        return {} if self._rounds is None else self._rounds.report()

    def close(self) -> None:
        """Close the engine or stop the server."""
        if self._rounds is not None:
            self._rounds.close()
        if self._server is not None:
            self._server.close()


def counters_of(report: TransferReport) -> dict[str, Any]:
    """Return a transfer's counters, those of its round."""
    passes = getattr(report, "passes", 0)
    return {
        **({"passes": passes} if passes else {}),
        "delivered": list(report.delivered),
        "bytes": report.bytes_sent,
        "packets": report.packets_sent,
        "retransmissions": report.retransmissions,
        "push_s": report.push_s,
    }


class GradwireAdaptive:
    """In this contestant a bucket goes through the policy "adaptive", as DDP's hook would do."""

    def __init__(self) -> None:
        """Start without a state; each size of bucket gets one of its own."""
        self._states: dict[int, tuple[HookState, torch.nn.Parameter]] = {}

    def setup(self, rank: int, world: int, store: Store) -> None:
        """Make the process group; states open at their first round."""
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def run_round(self, buffer: torch.Tensor) -> None:
        """Average the buffer over all ranks, as the only bucket of a step."""
        if buffer.numel() not in self._states:
            model = torch.nn.Module()
            layer = model.layer = torch.nn.Parameter(torch.empty(1, buffer.numel()))
            state = HookState("adaptive", model=model, hosts=False)
            self._states[buffer.numel()] = (state, layer)
        state, layer = self._states[buffer.numel()]
        state.pipeline.reduce(Bucket(0, True, buffer, [layer])).wait()

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check nothing, because the policy decides how exact it is."""

    def report(self) -> dict[str, Any]:
        """Return the counters of the engine, which all states share."""
        for state, _ in self._states.values():
            return {"engine": state.pipeline.communicator.counters()}
        return {}

    def close(self) -> None:
        """Close the engine and the group."""
        for state, _ in self._states.values():
            state.deactivate()
        dist.destroy_process_group()
