"""What the tests of attach() share: models, data, and what comes of them. Each rank imports it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


class Branches(nn.Module):
    """Uses one of two branches; the other one's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.top = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        out: torch.Tensor = self.top((self.right if right else self.left)(x))
        return out


class Transformer(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(101, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 70, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 101)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def sentence(rank: int, step: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 101, (4, 9), generator=chance)


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def model(dtype: torch.dtype = torch.float32, width: int = 700) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 300), nn.ReLU(), nn.Linear(300, 8)
    )
    return net.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 64, generator=chance).to(dtype)


def wrap(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=0.3, **options)


def gradients(module: nn.Module) -> torch.Tensor:
    parts = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(parts).clone()


def average_of(local: torch.Tensor) -> torch.Tensor:
    """The rank-order average of every rank's tensor, gathered by gloo, in float32."""
    everybody = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, local)
    total = everybody[0].float()
    for other in everybody[1:]:
        total = total + other.float()
    return total * torch.tensor(1.0 / len(everybody), dtype=torch.float32)


def average_gradients(net: nn.Module, tokens: torch.Tensor) -> None:
    """Sets a transformer's gradients to the rank-order average of what all ranks compute."""
    net.zero_grad()
    loss_of(net, tokens).backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad = average_of(parameter.grad)


def local_gradients(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    net(x).float().square().mean().backward()
    return gradients(net)


def train(module: nn.Module, rank: int, steps: range, lr: float = 0.05) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for step in steps:
        optimizer.zero_grad()
        module(batch(rank, step)).square().mean().backward()
        optimizer.step()


def fingerprint(module: nn.Module) -> bytes:
    """The bytes of all parameters' sum of bits: equal if and practically only if they are."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


ETHERNET = 1472
"""Bytes of the datagrams in jobs that lose some: loopback has so few that none may be lost."""


def set_drop(attachment: gradwire.Attachment, rate: float, burst: float = 1.0) -> None:
    attachment.communicator.set_drop(rate, burst, 5)
