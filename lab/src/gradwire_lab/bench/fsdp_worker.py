"""This program is one rank of the FSDP2 benchmark, which trains one model a contestant.

Its argument is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.core.report import StepReport
from gradwire_lab.contest.rank_program import Commands, meet, obey
from gradwire_lab.contest.ranks import Message

SYMBOLS, CONTEXT, WIDTH, LAYERS, HEADS = 96, 48, 208, 4, 4
BATCH = 4


class Model(torch.nn.Module):
    """This transformer predicts the next symbol; a call gives the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = torch.nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = torch.nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(symbols.shape[1])
        hidden = self.symbol(symbols)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Trainee:
    """A trainee is the model of one contestant, and what its steps delivered."""

    def __init__(self, policy: str, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.model: Any = Model()
        shards, replicas = mesh["shard"], mesh["replicate"]
        for block in self.model.blocks:
            fully_shard(block, mesh=shards, reshard_after_forward=False)
        fully_shard(self.model, mesh=shards, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.attachment = gradwire.attach(
            self.model,
            policy,
            optimizer=self.optimizer,
            replicas=replicas if replicas.size() > 1 else None,
        )
        self.delivered: list[float] = []
        self.agreed = hashlib.sha256()
        self.beyond_bound = 0
        self.exceeded_steps = 0

    def note(self, report: StepReport) -> None:
        """Note what a step delivered, and whether each region kept its bound."""
        self.delivered.append(report.delivered)
        self.agreed.update(repr((report.agreed, report.phase, report.bound)).encode())
        self.exceeded_steps += bool(report.exceeded)
        self.beyond_bound += sum(
            region.name not in report.exceeded
            and region.delivered < 1.0 - region.effective_bound - 1e-9
            for region in report.regions
        )


class Worker:
    """A worker holds the trainees of one rank."""

    def __init__(self, config: Message) -> None:
        """Meet the other ranks and attach all models.

        Args:
            config: replicas, and policies by contestant.
        """
        (rank, world), replicas = meet(config), config["replicas"]
        shape = (replicas, world // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        self._trainees = {
            name: Trainee(policy, mesh) for name, policy in config["policies"].items()
        }
        model = self._trainees["gloo"].model
        self.parameters = sum(each.numel() for each in model.parameters())
        self._chance = torch.Generator().manual_seed(rank)
        for name in self._trainees:
            self.train(name, 2)

    def train(self, name: str, steps: int) -> Message:
        """Train; return the seconds of each step, from the last rank's start on."""
        trainee = self._trainees[name]
        seconds = []
        for _ in range(steps):
            text = torch.randint(0, SYMBOLS, (BATCH, CONTEXT + 1), generator=self._chance)
            dist.barrier()
            start = time.monotonic()
            loss = trainee.model(text[:, :-1], text[:, 1:])
            trainee.optimizer.zero_grad()
            loss.backward()
            trainee.optimizer.step()
            seconds.append(time.monotonic() - start)
            trainee.note(trainee.attachment.report())
        return {"seconds": seconds}

    def found(self, name: str) -> Message:
        trainee = self._trainees[name]
        digest = hashlib.sha256()
        for parameter in trainee.model.parameters():
            digest.update(parameter.to_local().detach().contiguous().numpy().tobytes())
        return {
            "hash": digest.hexdigest(),
            "agreed": trainee.agreed.hexdigest(),
            "beyond_bound": trainee.beyond_bound,
            "exceeded_steps": trainee.exceeded_steps,
            "delivered_mean": sum(trainee.delivered) / len(trainee.delivered),
            "delivered_least": min(trainee.delivered),
        }

    def close(self) -> Message:
        for trainee in self._trainees.values():
            trainee.attachment.detach()
        dist.destroy_process_group()
        return {}


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Set the rank up; nobody waits for news of single steps."""
    worker = Worker(config)
    commands: Commands = {"train": worker.train, "found": worker.found, "close": worker.close}
    return {"parameters": worker.parameters}, commands


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
