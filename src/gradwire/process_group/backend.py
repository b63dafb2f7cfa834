"""GradwireBackend: the backend for one device of a group that has others for other devices.

torch takes Python backends from version 2.14 on, as in "cpu:gradwire,cuda:nccl".
"""

from __future__ import annotations

from torch._C._distributed_c10d import Backend, ProcessGroupGloo

from gradwire.process_group.delegation import COLLECTIVES, delegate
from gradwire.process_group.group import GradwireGroup

OVER_GLOO = (
    *COLLECTIVES,
    "_get_sequence_number_for_group",
    "_set_default_timeout",
    "_set_sequence_number_for_group",
    "set_timeout",
)
"""What Gloo does; some names are newer than others."""


class GradwireBackend(Backend):
    """Backend "gradwire" as a part of a group.

    Args:
        group: A group of the same members, which carries out everything.
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
        return "gradwire"

    @property
    def options(self) -> Backend.Options:
        """Gloo's options, among them the time-out."""
        return self._group.gloo.options

    def shutdown(self) -> None:
        self._group.shutdown()

    def abort(self) -> None:
        self._group.abort()


delegate(GradwireBackend, OVER_GLOO, ProcessGroupGloo, lambda backend: backend._group.gloo)
