"""Any policy of gradwire is a contestant in the lab's races."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gradwire.core.report import ReportWriter, StepReport
from gradwire.sim.job import model_of
from gradwire.training.bucket import Bucket, ParameterNames
from gradwire.training.configure import configure
from gradwire.training.pipeline import GradientPipeline
from gradwire.transport.communicator import Communicator
from gradwire_lab.contest.serving import ServerThread
from gradwire_lab.scenario.work import layer_sizes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = 60.0


_ROUNDING = 0.01
"""Relative error that the coarsest encoding may make."""


class PolicyAllReduce:
    """This contestant is a policy: the training pipeline, on a buffer cut into equal layers.

    With route="server" the last `servers` ranks sum for the others.
    """

    def __init__(
        self, policy: str, options: Mapping[str, object], elements: int, layers: int, group: str
    ) -> None:
        """Choose the policy.

        Args:
            layers: how many equal layers the buffer is cut into.
            group: name of the group of endpoints, which shares an engine with no other.
        """
        self._group = group
        self._policy, self._settings = configure(policy, options)
        self._sizes = layer_sizes(elements, layers)
        self._pipeline: GradientPipeline | None = None
        self._communicator: Communicator | None = None
        self._server: ServerThread | None = None
        self._parameters: list[torch.nn.Parameter] = []
        self._workers = 1

    def setup(self, rank: int, world: int, store: Store) -> None:
        settings, group = self._settings, self._group
        self._workers = workers = world - settings.server_count
        if rank >= workers:
            self._server = ServerThread(
                store, workers=workers, index=rank - workers, settings=settings, group=group
            )
        else:
            self._communicator = Communicator(
                store, rank, workers, settings, group=group, timeout_s=_TIMEOUT
            )
            self._pipeline = self._open(self._communicator)

    def _open(self, communicator: Communicator) -> GradientPipeline:
        model = model_of(self._sizes)
        self._parameters = list(model.parameters())
        self._policy.prepare(self._sizes, servers=self._settings.server_count)
        return GradientPipeline(
            communicator,
            self._policy,
            self._settings,
            ParameterNames(model),
            communicator.take_number(communicator.meeting("number")),
            writer=ReportWriter.open(self._settings.report, communicator.rank),
        )

    def run_round(self, buffer: torch.Tensor) -> Mapping[str, Any] | None:
        if self._server is not None:
            self._server.check()
            return None
        assert self._pipeline is not None
        self._pipeline.reduce(Bucket(0, True, buffer, self._parameters)).wait()
        return counters_of(self._pipeline.report())

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        if self._server is not None:
            return
        total = sum(inputs[rank] for rank in range(self._workers)) / self._workers
        low = total if self._policy.name == "reliable" else 0.0
        if float(buffer.min()) < low * (1 - _ROUNDING) or float(buffer.max()) > total * (
            1 + _ROUNDING
        ):
            raise ValueError(
                f"{self._policy.name}: values from {float(buffer.min())} to "
                f"{float(buffer.max())} where the mean is {total}"
            )

    def report(self) -> dict[str, Any]:
        return {} if self._communicator is None else {"engine": self._communicator.counters()}

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()  # a pipeline only lets its communicator go
        if self._pipeline is not None:
            self._pipeline.close()
        if self._server is not None:
            self._server.close()


def counters_of(report: StepReport) -> dict[str, Any]:
    """Return a step's counters, those of its round."""
    return {
        "passes": report.passes,
        "delivered": statistics.fmean([each.delivered for each in report.regions] or [1.0]),
        "layers": {each.name: each.delivered for each in report.regions},
        "bytes": report.bytes,
        "packets": report.packets,
        "retransmissions": report.retransmissions,
        "push_s": report.push_s,
    }
