"""This program is one worker of a cell over a kernel network.

It trains by DDP over gradwire as `gradwire_lab.study.trainer` does in virtual time. Its argument
is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn import utils as nn_utils
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab.contest.fingerprint import fingerprint
from gradwire_lab.contest.rank_program import Commands, meet, obey
from gradwire_lab.contest.ranks import Message
from gradwire_lab.study.arms import ARMS
from gradwire_lab.study.cell import Cell
from gradwire_lab.study.tasks import TASKS
from gradwire_lab.study.trainer import DATAGRAM, shuffle_of


class Worker:
    """A replica trains as one worker."""

    def __init__(self, config: Message) -> None:
        """Meet the other ranks; config: see `kernel.train_on_kernel`."""
        self._rank, _ = meet(config)
        self._cell = cell = Cell(**config["cell"])
        self._task, arm = TASKS[cell.task], ARMS[cell.arm]
        self._lesson = self._task.open(cell.seed, config["part"], cell.data)
        self._module = self._lesson.model
        self._optimizer = self._task.optimizers[cell.optimizer](self._module)
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._lesson.model = DistributedDataParallel(self._module)
        # A norm is rounded in the order of its parts, so the order is that of `replica.Replica`.
        self._parameters = list(reversed(list(self._module.parameters())))
        assert arm.policy is not None
        options: dict[str, Any] = dict(arm.options)
        self._attachment = gradwire.attach(
            self._lesson.model,
            policy=arm.policy,
            optimizer=self._optimizer,
            datagram=DATAGRAM,
            seed=shuffle_of(cell, config["part"]),
            **options,
        )
        self._attachment.communicator.set_drop(
            config["drop_rate"],
            config["drop_burst"],
            1000 * cell.seed + 10 * config["part"] + self._rank,
        )

    def train(self) -> Message:
        """Train; return a hash of the model, its score, and what was lost in each round."""
        rounds = self._cell.rounds
        shares: list[float] = []
        comm_s: list[float] = []
        guarded = critical = 0
        for number in range(rounds):
            if number % self._lesson.rounds_per_epoch == 0:
                self._attachment.epoch(number // self._lesson.rounds_per_epoch)
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._task.rate(number / rounds)
            self._optimizer.zero_grad()
            critical += self._attachment.phase == "critical"
            self._lesson.loss(number, self._rank).backward()  # type: ignore[no-untyped-call]
            if self._task.clip is not None:
                nn_utils.clip_grad_norm_(self._parameters, self._task.clip)
            self._optimizer.step()
            report = self._attachment.report()
            shares.append(report.delivered)
            comm_s.append(report.comm_s)
            guarded += report.guard == "resent"
        self._lesson.model = self._module
        return {
            "fingerprint": fingerprint(self._module),
            "score": self._lesson.score(),
            "critical_share": critical / rounds,
            "guarded": guarded,
            "delivered": shares,
            "comm_s": comm_s,
        }

    def close(self) -> Message:
        self._attachment.detach()
        dist.destroy_process_group()
        return {}


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Set the rank up; nobody waits for news of single rounds."""
    worker = Worker(config)
    return {}, {"train": worker.train, "close": worker.close}


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
