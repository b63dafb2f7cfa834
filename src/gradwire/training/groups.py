"""A torch process group as gradwire sees it: its store, its name there, and its members."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.transport import rendezvous
from gradwire.transport.communicator import DEFAULT_TIMEOUT_S, Communicator

__all__ = ["Group"]


WHOLE = "world"
"""The name of a group of all ranks."""


@dataclass(frozen=True)
class Group:
    """The place of this process in a process group. rank: in the group. ranks: the members' in the
    whole job. timeout_s: of one of its collectives."""

    store: rendezvous.Store
    name: str
    rank: int
    ranks: tuple[int, ...]
    timeout_s: float

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Group:
        """The place in `group`, None for the default one; raises ConfigError without any."""
        if not dist.is_initialized():
            raise ConfigError.about(
                "gradwire needs an initialised process group",
                "call torch.distributed.init_process_group first",
                setting="process_group",
                value=None,
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
        """How many members there are."""
        return len(self.ranks)

    @property
    def job_rank(self) -> int:
        """This process's rank in the whole job."""
        return self.ranks[self.rank]

    @property
    def whole(self) -> bool:
        """Whether all ranks of the job are members."""
        return self.name == WHOLE

    def meeting(self, topic: str, timeout_s: float) -> rendezvous.Meeting:
        """A meeting of the members."""
        return rendezvous.Meeting(
            self.store,
            f"{self.name}/{topic}",
            endpoint=self.rank,
            workers=self.world_size,
            servers=0,
            timeout_s=timeout_s,
            ranks=self.ranks,
        )

    def communicator(self, settings: Settings, meeting: rendezvous.Meeting) -> Communicator:
        """A communicator of the members, who agree in the meeting on what they open; collective."""
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
        )


def _timeout(group: dist.ProcessGroup) -> float:
    """The process group's time-out in seconds; torch's default where it does not tell."""
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(timeout, datetime.timedelta):
            return timeout.total_seconds()
    return DEFAULT_TIMEOUT_S
