"""One rank of the replicas benchmark, a program on a lab host: trains by DDP over gradwire.

Arguments: rank, world, store host, store port, steps, pull, bound. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import gradwire


def parameters_hash(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters' bytes, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main(arguments: list[str]) -> None:
    """Train and report."""
    rank, world = int(arguments[0]), int(arguments[1])
    host, port, steps = arguments[2], int(arguments[3]), int(arguments[4])
    pull, bound = arguments[5], float(arguments[6])
    torch.set_num_threads(1)
    store = TCPStore(host, port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(64, 512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, 512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, 10),
        )
    )
    attachment = gradwire.attach(model, policy="mlt", p=bound, spend="anything", pull=pull)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1000 + rank)  # every rank has data of its own
    delivered = []
    for _ in range(steps):
        inputs = torch.randn(16, 64)
        targets = inputs[:, :10].argmax(dim=1)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        delivered.append(attachment.report().delivered)
    lossy = sum(each < 1.0 for each in delivered)
    print(
        json.dumps(
            {
                "hash": parameters_hash(model.module),
                "steps": steps,
                "lossy_steps": lossy,
                "delivered_mean": sum(delivered) / len(delivered),
                "loss": float(loss.detach()),
                "parameters": sum(p.numel() for p in model.parameters()),
            }
        )
    )
    dist.barrier()
    attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
