"""GradwireBackend: the backend for one device of a group that has others for other devices.

torch takes Python backends from version 2.14 on, as in "cpu:gradwire,cuda:nccl".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ProcessGroupGloo

from gradwire.process_group.group import GradwireGroup

__all__ = ["GradwireBackend"]

OVER_GLOO = (
    "_allgather_base",
    "_get_sequence_number_for_group",
    "_set_default_timeout",
    "_set_sequence_number_for_group",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
    "set_timeout",
)
"""What Gloo does; some names are newer than others."""


class GradwireBackend(Backend):
    """Backend "gradwire" as a part of a group.

    Args:
        group: A group of the same members, which carries out everything.

    Attributes:
        settings: The settings.
    """

    def __init__(self, group: GradwireGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.settings = group.settings
        self._group = group
        self.allreduce = group.allreduce
        self.reduce_scatter = group.reduce_scatter
        self.reduce_scatter_single = group.reduce_scatter_single
        self._reduce_scatter_base = group.reduce_scatter_single

    def getBackendName(self) -> str:
        """Returns the backend's name."""
        return "gradwire"

    @property
    def options(self) -> Backend.Options:
        """Gloo's options, among them the time-out."""
        return self._group.gloo.options

    def shutdown(self) -> None:
        """Closes what the group has opened."""
        self._group.shutdown()

    def abort(self) -> None:
        """Ends the group's collectives with an error."""
        self._group.abort()


def _over_gloo(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> dist.Work | Any:
        return getattr(self._group.gloo, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name in OVER_GLOO:
    if hasattr(ProcessGroupGloo, _name):
        setattr(GradwireBackend, _name, _over_gloo(_name))
