"""Fifty steps of a transformer on four ranks, exact: with and without a sharded optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ddp_jobs import Transformer, average_gradients, fingerprint, loss_of, sentence
from ranks import Ranks


def trains(rank: int, world: int, sharded: bool) -> bytes:
    """A twin takes the average in the order of ranks, and steps by a whole optimizer."""
    twin, net = Transformer(), Transformer()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.05)
    ours: Any = (
        ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
        if sharded
        else torch.optim.AdamW(net.parameters(), lr=1e-2)
    )
    attachment = gradwire.attach(ddp, "reliable", optimizer=ours)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    first = loss_of(twin, sentence(0, 0)).item()
    for step in range(50):
        tokens = sentence(rank, step)
        average_gradients(twin, tokens)
        ours.zero_grad()
        loss_of(ddp, tokens).backward()
        theirs.step()
        ours.step()
    for mine, reference in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, reference)
    report = attachment.report()
    assert (report.step, report.delivered) == (49, 1.0)
    assert report.buckets > 1
    attachment.detach()
    assert loss_of(net, sentence(0, 0)).item() < first  # it has trained
    return fingerprint(net)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "ZeRO"])
def test_fifty_steps_equal_the_rank_order_average_to_the_bit(sharded: bool) -> None:
    with Ranks(4, GRADWIRE_PEER_TIMEOUT="20", GRADWIRE_RENDEZVOUS_TIMEOUT="20") as four:
        assert len(set(four.run(trains, timeout=300, sharded=sharded))) == 1
