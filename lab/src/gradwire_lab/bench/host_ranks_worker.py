"""This program is one of several ranks on a host, which all-reduces in each contestant's way.

Its argument is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import gradwire
from gradwire_lab.contest.rank_program import Commands, obey
from gradwire_lab.contest.ranks import Message


class Worker:
    """A worker is a rank that takes part in all-reduces."""

    def __init__(self, config: Message) -> None:
        """Meet the other ranks.

        Args:
            config: rank, world, store (host and port), size, buckets.
        """
        rank, world = config["rank"], config["world"]
        store = TCPStore(config["store_host"], config["store_port"], world, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        elements = config["size"] // 4 // config["buckets"]
        layers = [torch.nn.Parameter(torch.full((elements,), float(rank)))] * config["buckets"]
        self._buckets = [
            _Bucket(index, index + 1 == len(layers), layer.detach().clone(), [layer])
            for index, layer in enumerate(layers)
        ]
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
        """Let go of everything, together with the other ranks."""
        for state in self._states.values():
            state.deactivate()
        dist.destroy_process_group()
        return {}

    def _gloo(self) -> None:
        """All-reduce as DDP does without a hook."""
        works = []
        for bucket in self._buckets:
            bucket.values.mul_(1.0 / dist.get_world_size())
            works.append(dist.all_reduce(bucket.values, async_op=True))
        for work in works:
            work.wait()

    def _gradwire(self, state: gradwire.HookState) -> None:
        """All-reduce as the hook does."""
        for result in [state.pipeline.reduce(bucket) for bucket in self._buckets]:
            result.wait()


@dataclass(frozen=True)
class _Bucket:
    """A bucket stands for one that DDP hands over.

    Attributes:
        number: its index.
        last: whether no other follows.
        values: the gradients.
        layers: the parameters.
    """

    number: int
    last: bool
    values: torch.Tensor
    layers: list[torch.Tensor]

    def index(self) -> int:
        """Return its index."""
        return self.number

    def is_last(self) -> bool:
        """Return whether no other follows."""
        return self.last

    def buffer(self) -> torch.Tensor:
        """Return the gradients."""
        return self.values

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return self.layers


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Set the rank up; nobody waits for news of single rounds."""
    worker = Worker(config)
    return {}, {"sum": worker.sum, "close": worker.close}


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
