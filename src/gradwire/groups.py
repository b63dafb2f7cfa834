"""A torch process group as gradwire sees it: its store, its name there, and its members."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradwire import rendezvous
from gradwire.communicator import DEFAULT_TIMEOUT_S, Communicator
from gradwire.errors import ConfigError
from gradwire.settings import Settings

__all__ = ["Group"]


@dataclass(frozen=True)
class Group:
    """The place of this process in a process group. timeout_s: of one of its collectives."""

    store: rendezvous.Store
    name: str
    rank: int
    world_size: int
    timeout_s: float

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Group:
        """The place in `group`, None for the default one; raises ConfigError without any."""
        if not dist.is_initialized():
            raise ConfigError(
                "gradwire needs an initialised process group: call "
                "torch.distributed.init_process_group first"
            )
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        whole = len(ranks) == dist.get_world_size()
        return Group(
            dist.distributed_c10d._get_process_group_store(group),
            "world" if whole else "ranks-" + "-".join(map(str, ranks)),
            dist.get_rank(group),
            len(ranks),
            _timeout(group),
        )

    def communicator(self, settings: Settings) -> Communicator:
        """A communicator of the members, over the group's own store; collective."""
        return Communicator(
            self.store,
            self.rank,
            self.world_size,
            settings,
            group=self.name,
            timeout_s=self.timeout_s,
        )

    def agree(
        self,
        topic: str,
        configuration: Mapping[str, object],
        failure: ConfigError | None,
        timeout_s: float,
    ) -> None:
        """Checks, before anything is opened, that all members come with the same configuration.

        Collective. failure: why this one cannot; it is raised here and told to the others. Raises
        RendezvousError naming a rank that failed, the first rank and field that differ from
        rank 0, or the ranks that did not come within `timeout_s` seconds.
        """
        if self.world_size > 1:
            rendezvous.agree(self._meeting(topic, timeout_s), configuration, failure)
        elif failure is not None:
            raise failure

    def tell_failure(self, topic: str, error: Exception) -> None:
        """Tells the others, who are about to `agree` on the topic, that this member cannot."""
        if self.world_size > 1:
            self._meeting(topic, 0.0).tell_failure("configuration", str(error))

    def _meeting(self, topic: str, timeout_s: float) -> rendezvous.Meeting:
        return rendezvous.Meeting(
            self.store,
            f"{self.name}/{topic}",
            endpoint=self.rank,
            workers=self.world_size,
            servers=0,
            timeout_s=timeout_s,
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
