"""This program is one of several ranks on a host, which all-reduces in each contestant's way.

Its argument is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import gradwire
from gradwire.training.bucket import Bucket
from gradwire_lab.contest.rank_program import Commands, meet, obey
from gradwire_lab.contest.ranks import Message


class Worker:
    """A worker is a rank that takes part in all-reduces."""

    def __init__(self, config: Message) -> None:
        """Meet the other ranks; config: the size of each rank's buffer, in bytes."""
        rank, _ = meet(config)
        layer = torch.nn.Parameter(torch.full((config["size"] // 4,), float(rank)))
        self._bucket = Bucket(0, True, layer.detach().clone(), [layer])
        self._states = {
            "gradwire flat": gradwire.HookState("reliable", hosts=False),
            "gradwire hosts": gradwire.HookState("reliable", hosts="auto"),
        }
        for name in ("gloo", *self._states):
            self.sum(name, 2)

    def sum(self, name: str, rounds: int) -> Message:
        """All-reduce; return the seconds of each round, from the last rank's start on."""
        run = self._gloo if name == "gloo" else partial(self._gradwire, self._states[name])
        seconds = []
        for _ in range(rounds):
            dist.barrier()
            start = time.monotonic()
            run()
            seconds.append(time.monotonic() - start)
        return {"seconds": seconds}

    def close(self) -> Message:
        for state in self._states.values():
            state.deactivate()
        dist.destroy_process_group()
        return {}

    def _gloo(self) -> None:
        """All-reduce as DDP does without a hook."""
        self._bucket.values.mul_(1.0 / dist.get_world_size())
        dist.all_reduce(self._bucket.values)

    def _gradwire(self, state: gradwire.HookState) -> None:
        state.pipeline.reduce(self._bucket).wait()


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Set the rank up; nobody waits for news of single rounds."""
    worker = Worker(config)
    return {}, {"sum": worker.sum, "close": worker.close}


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
