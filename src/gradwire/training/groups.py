"""A torch process group as gradwire uses it: its store, its name there, and its members."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.transport.communicator import DEFAULT_TIMEOUT_S, Communicator
from gradwire.transport.meeting import Meeting
from gradwire.transport.store import Store

WHOLE = "world"
"""The name of a group of all ranks."""


@dataclass(frozen=True)
class HostRanks:
    """The ranks that a worker leads: its own alone, or all of its host.

    Attributes:
        ranks: Their ranks in the job, the worker's own first; empty where another rank speaks for
            this one.
        members: The ranks in the job of all workers and of those that they speak for, in order.
    """

    ranks: tuple[int, ...]
    members: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """The place of this process in a process group.

    Attributes:
        ranks: The members' ranks in the whole job.
        timeout_s: Time-out of the group's collectives in seconds.
    """

    store: Store
    name: str
    rank: int
    ranks: tuple[int, ...]
    timeout_s: float

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Group:
        """Returns this process's place in a group, None for the default one."""
        if not dist.is_initialized():
            raise ConfigError.about(
                "gradwire needs an initialised process group",
                "call torch.distributed.init_process_group first",
                setting="process_group",
            )
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        whole = len(ranks) == dist.get_world_size()
        return Group(
            dist.distributed_c10d._get_process_group_store(group),
            WHOLE if whole else "ranks-" + "-".join(map(str, ranks)),
            dist.get_rank(group),
            tuple(ranks),
            _timeout(group),
        )

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def job_rank(self) -> int:
        return self.ranks[self.rank]

    @property
    def whole(self) -> bool:
        return self.name == WHOLE

    def workers(self, hosts: Sequence[Sequence[int]]) -> Group:
        """Returns the group in which this process is a worker: the leaders, or itself alone."""
        leaders = [host[0] for host in hosts]
        if self.rank not in leaders:
            leaders = [self.rank]
        ranks = tuple(self.ranks[leader] for leader in leaders)
        return replace(
            self,
            name="leaders-" + "-".join(map(str, ranks)),
            rank=leaders.index(self.rank),
            ranks=ranks,
        )

    def meeting(self, topic: str, timeout_s: float, within: Meeting | None = None) -> Meeting:
        return Meeting(
            self.store,
            f"{self.name}/{topic}",
            endpoint=self.rank,
            workers=self.world_size,
            servers=0,
            timeout_s=timeout_s,
            ranks=self.ranks,
            within=within,
        )

    def communicator(
        self, settings: Settings, meeting: Meeting, leader: int | None = None
    ) -> Communicator:
        """Opens a communicator of the members, who agree in the meeting; collective.

        Args:
            leader: The rank in the job that leads this one's host; None where this one sends.
        """
        return Communicator(
            self.store,
            self.rank,
            self.world_size,
            settings,
            group=self.name,
            timeout_s=self.timeout_s,
            timeout_from="of the process group",
            meeting=meeting,
            ranks=self.ranks,
            leader=leader,
        )


def _timeout(group: dist.ProcessGroup) -> float:
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(timeout, datetime.timedelta):
            return timeout.total_seconds()
    return DEFAULT_TIMEOUT_S
