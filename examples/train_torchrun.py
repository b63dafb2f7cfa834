"""A job that torchrun starts again goes on from its checkpoint, with what gradwire owes.

    torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint HOST0:29400 examples/train_torchrun.py saves
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

EVERY = 2  # steps between two checkpoints


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return model(torch.randn(32, 64, generator=chance)).square().mean()


def save(folder: Path, rank: int, step: int, state: dict) -> None:
    """Saves a rank's own state, and keeps two, since another rank may die before its newest."""
    path = folder / f"{rank}-{step}.pt"
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    (folder / f"{rank}-{step - 2 * EVERY}.pt").unlink(missing_ok=True)


def newest(folder: Path, rank: int) -> int:
    """The last step that all ranks have saved; 0 for none."""
    mine = {int(path.stem.partition("-")[2]) for path in folder.glob(f"{rank}-*.pt")}
    everybody = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return max(set.intersection(*everybody), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for checkpoints; each host may have its own")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 8))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    attachment = gradwire.attach(model, optimizer=optimizer)
    loss_of(model, rank, 0).backward()  # DDP arranges its buckets anew after the first pass
    begin = newest(options.folder, rank)
    if begin:
        saved = torch.load(options.folder / f"{rank}-{begin}.pt")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        attachment.load_state_dict(saved["gradwire"])
    for step in range(begin, options.steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            states = {"net": net, "optimizer": optimizer, "gradwire": attachment}
            state = {name: each.state_dict() for name, each in states.items()}
            save(options.folder, rank, step + 1, state)
        if rank == 0:
            waited = attachment.report().exposed_s
            print(f"step {step}: loss {loss.item():.3f}, waited {waited * 1e3:.1f} ms", flush=True)
    attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
