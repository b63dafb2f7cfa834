"""A small GPT on the standard library's sources, trained with DDP; one line adopts gradwire.

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py --policy reliable --steps 200
    torchrun --nproc-per-node 2 examples/train_ddp.py --policy none        # DDP as it is, over TCP

Every tenth step prints the loss, how long the step waited for the network when nothing was left to
compute, and how much of this worker's gradients was left out, where any was. On several hosts start
it as torchrun is always started (--nnodes, --node-rank, --master-addr, …); GRADWIRE_INTERFACE
chooses the network where a host has several.
"""

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

VOCABULARY = 256  # bytes
CONTEXT = 64
WIDTH = 192
HEADS = 6
LAYERS = 5  # 2.3 million parameters


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both behind a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        heads = [t.view(batch, time_, HEADS, -1).transpose(1, 2) for t in (q, k, v)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, time_, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, next bytes out: (batch, time) int64 to (batch, time, 256) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))


def corpus(limit: int = 4_000_000) -> Tensor:
    """The first bytes of the standard library's sources, in a fixed order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def batches(data: Tensor, size: int, seed: int, device: torch.device):
    """Endless (inputs, targets), each (size, CONTEXT) int64."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        at = torch.randint(len(data) - CONTEXT - 1, (size,), generator=chance)
        rows = torch.stack([data[i : i + CONTEXT + 1] for i in at.tolist()]).to(device)
        yield rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="adaptive", help="dblp, reliable, …, none for TCP")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences per worker and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--report", help="file for one JSON line per step")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = DDP(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    attachment = None
    if options.policy != "none":
        attachment = gradwire.attach(
            model, policy=options.policy, optimizer=optimizer, report=options.report
        )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        ),
    )
    data = batches(corpus(), options.batch, seed=rank, device=device)
    begun = time.perf_counter()
    for step in range(options.steps):
        inputs, targets = next(data)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        if attachment is not None:
            attachment.loss(loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            line = f"step {step:4d}  loss {loss.item():.3f}"
            if attachment is not None:
                report = attachment.report()
                line += f"  waited {report.exposed_s * 1e3:.1f} ms"
                if report.delivered < 1.0:
                    line += f"  left out {1.0 - report.delivered:.1%}, up to {report.bound:.1%} may"
            print(line, flush=True)
    if rank == 0:
        print(f"{options.steps / (time.perf_counter() - begun):.2f} steps/s")
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
            print("All ranks ran on this machine, so this says nothing of how a network would do.")
    if attachment is not None:
        attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
