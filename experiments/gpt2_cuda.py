"""Times steps of a GPT-2 of 124 million parameters on CUDA devices, by Gloo and gradwire in turn.

torchrun --nproc-per-node 2 experiments/gpt2_cuda.py [--face fsdp] [--type bfloat16]

Ranks without a device of their own share one. A step's time is the slowest rank's, from a barrier
to the end of the optimizer's work on the device. "none" is DDP's model without a sum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 12, 768, 12, 50_257, 1024
WARM_UP, BLOCKS, STEPS = 3, 3, 4
HOOKS = {
    "gloo f16": default_hooks.fp16_compress_hook,
    "gloo bf16": default_hooks.bf16_compress_hook,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.attention(self.before(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x[:, :-1])).flatten(0, 1).float()
        return nn.functional.cross_entropy(scores, ids[:, 1:].flatten())


class Job:
    """One contestant's model and optimizer. face: ddp or fsdp. kind: the gradients' type."""

    def __init__(self, name: str, face: str, kind: torch.dtype) -> None:
        self.attachment: gradwire.Attachment | None = None
        net: nn.Module = GPT2().cuda()
        if face == "fsdp":
            mesh = init_device_mesh("cuda", (dist.get_world_size(),))
            mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=kind)
            for part in (*net.blocks, net):
                fully_shard(part, mesh=mesh, mp_policy=mixed)
        elif name != "none":
            net = DistributedDataParallel(net.to(kind), gradient_as_bucket_view=True)
            if name in HOOKS:
                net.register_comm_hook(None, HOOKS[name])
        if name.startswith("gradwire "):
            self.attachment = gradwire.attach(net, name.removeprefix("gradwire "))
        self.net, self.optimizer = net, torch.optim.AdamW(net.parameters(), 1e-5)

    def step(self, ids: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.net(ids)
        loss.backward()
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--face", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--type", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", type=int, default=4, help="texts of 1,024 tokens a rank and step")
    parser.add_argument("--contestant", action="append", help="none, gloo, …, gradwire POLICY")
    given = parser.parse_args()
    names = given.contestant or ["none"] * (given.face == "ddp") + ["gloo", "gradwire reliable"]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    jobs = {name: Job(name, given.face, getattr(torch, given.type)) for name in names}
    ids = torch.randint(0, VOCABULARY, (given.rows, CONTEXT), device="cuda")
    times: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for block in range(1 + BLOCKS):
        for name, job in jobs.items():
            for _ in range(STEPS if block else WARM_UP):
                torch.cuda.synchronize()
                dist.barrier()
                used, began = time.process_time(), time.perf_counter()
                job.step(ids)
                torch.cuda.synchronize()
                if block:
                    times[name].append(time.perf_counter() - began)
                    processor[name].append(time.process_time() - used)
    if dist.get_rank() == 0:
        print(torch.cuda.get_device_name(), f"torch {torch.__version__}", given.face, given.type)
    for name, job in jobs.items():
        slowest = torch.tensor(times[name])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        steps = sorted(1e3 * slowest)
        if dist.get_rank() == 0:
            median, used = statistics.median(steps), 1e3 * statistics.median(processor[name])
            print(
                f"{name:20} median {median:6.0f} ms, {steps[0]:.0f} to {steps[-1]:.0f}; "
                f"processor {used:.0f} ms a rank"
            )
        if job.attachment is not None:
            job.attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
