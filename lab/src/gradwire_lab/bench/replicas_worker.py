"""This program is one rank of the replicas benchmark, which trains by DDP over gradwire.

Its argument is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab.contest.fingerprint import fingerprint
from gradwire_lab.contest.rank_program import Commands, meet, obey
from gradwire_lab.contest.ranks import Message


class Worker:
    """A worker trains one replica."""

    def __init__(self, config: Message) -> None:
        """Meet the other ranks; config: bound and pull."""
        self._rank, _ = meet(config)
        torch.manual_seed(0)
        self._model = DistributedDataParallel(
            torch.nn.Sequential(
                torch.nn.Linear(64, 512),
                torch.nn.ReLU(),
                torch.nn.Linear(512, 512),
                torch.nn.ReLU(),
                torch.nn.Linear(512, 10),
            )
        )
        self._attachment = gradwire.attach(
            self._model, policy="mlt", p=config["bound"], spend="anything", pull=config["pull"]
        )

    def train(self, steps: int) -> Message:
        """Train; return a hash of the model, and what was lost."""
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(1000 + self._rank)  # each rank draws data of its own
        delivered = []
        for _ in range(steps):
            inputs = torch.randn(16, 64)
            targets = inputs[:, :10].argmax(dim=1)
            loss = torch.nn.functional.cross_entropy(self._model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            delivered.append(self._attachment.report().delivered)
        return {
            "hash": fingerprint(self._model.module),
            "steps": steps,
            "lossy_steps": sum(each < 1.0 for each in delivered),
            "delivered_mean": sum(delivered) / len(delivered),
            "loss": float(loss.detach()),
            "parameters": sum(p.numel() for p in self._model.parameters()),
        }

    def close(self) -> Message:
        self._attachment.detach()
        dist.destroy_process_group()
        return {}


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Set the rank up; nobody waits for news of single steps."""
    worker = Worker(config)
    return {}, {"train": worker.train, "close": worker.close}


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
