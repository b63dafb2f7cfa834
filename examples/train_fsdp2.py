"""A small transformer on bytes of this file, sharded by fully_shard; one line adopts gradwire.

torchrun --nproc-per-node 2 examples/train_fsdp2.py
torchrun --nproc-per-node 2 examples/train_fsdp2.py --policy none      # FSDP2 as it is
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire

CONTEXT, WIDTH = 64, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(CONTEXT))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x.flatten(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="adaptive", help="dblp, reliable, …, none for torch's")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attachment = None
    if options.policy != "none":
        attachment = gradwire.attach(model, policy=options.policy, optimizer=optimizer)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    chance = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (8,), generator=chance)
        rows = torch.stack([text[at : at + CONTEXT + 1] for at in starts.tolist()])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            line = f"step {step:3d}  loss {loss.item():.3f}"
            if attachment is not None:
                line += f"  waited {attachment.report().exposed_s * 1e3:.1f} ms"
            print(line, flush=True)
    if attachment is not None:
        attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
