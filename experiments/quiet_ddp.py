"""Times steps of DDP on the lab's quiet network, by Gloo and gradwire in turn.

python experiments/quiet_ddp.py [--network A] [--ranks 4] [--megabytes 25] [--policy reliable]

The model is one matrix in one bucket, so that a step is the sum of its gradients and as little else
as DDP allows. A step's time is that of the slowest rank, from a barrier to the optimizer's end; the
header ideal is the time of the sum alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab.contest.measure import all_reduce_payload, environment, header_ideal
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import NETWORKS

WARM_UP, BLOCKS, STEPS = 5, 6, 10
CONTESTANTS = "gloo", "gradwire"


def train(width: int, policy: str) -> dict[str, list[float]]:
    """Be one rank: train one model a contestant, in blocks that take turns."""
    dist.init_process_group("gloo")
    models, optimizers = {}, {}
    for name in CONTESTANTS:
        torch.manual_seed(0)
        linear = nn.Linear(width, width, bias=False)
        models[name] = DistributedDataParallel(linear, gradient_as_bucket_view=True)
        optimizers[name] = torch.optim.SGD(linear.parameters(), lr=1e-3)
    attachment = gradwire.attach(models["gradwire"], policy=policy)
    sample = torch.ones(1, width)
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for block in range(BLOCKS):
        for name in CONTESTANTS:
            for step in range((0 if block else WARM_UP) + STEPS + 1):
                dist.barrier()
                start = time.monotonic()
                models[name](sample).sum().backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
                took = torch.tensor(time.monotonic() - start)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if step > (0 if block else WARM_UP):
                    seconds[name].append(took.item())
    attachment.detach()
    dist.destroy_process_group()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="A", choices=NETWORKS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=25)
    parser.add_argument("--policy", default="reliable")
    options = parser.parse_args()
    width = math.isqrt(int(options.megabytes * 1e6) // 4)
    if "RANK" in os.environ:
        seconds = train(width, options.policy)
        if os.environ["RANK"] == "0":
            print(json.dumps(seconds))
        return
    preset = NETWORKS[options.network]
    with Network(options.ranks, preset) as net:
        environ = {
            "MASTER_ADDR": net.address(0),
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(options.ranks),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, *sys.argv[1:]]
        ranks = [
            net.spawn(rank, command, env={**environ, "RANK": str(rank)}, stdout=-1, text=True)
            for rank in range(options.ranks)
        ]
        printed = [rank.communicate()[0] for rank in ranks]
    seconds = json.loads(printed[0])
    ideal = header_ideal(all_reduce_payload(width * width * 4, options.ranks), preset.rate)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, each in seconds.items():
        ordered = sorted(each)
        print(
            f"{name}: {len(each)} steps, median {medians[name] * 1e3:.1f} ms "
            f"({medians[name] / ideal:.3f} of the header ideal), "
            f"p90 {ordered[len(each) * 9 // 10] * 1e3:.1f} ms"
        )
    print(f"gradwire over Gloo: {medians['gradwire'] / medians['gloo']:.3f}", environment())


if __name__ == "__main__":
    main()
