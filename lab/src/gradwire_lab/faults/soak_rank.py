"""A rank of a soak trains one life after another in one process, and tells what that takes."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab.contest.fingerprint import fingerprint

INPUTS, WIDTH = 64, 1024
SAVED_EVERY = 10
"""Steps from one checkpoint to the next."""
TOLD_EVERY_S = 5.0
MEETING_S = 60.0

Config = dict[str, Any]


def figures() -> dict[str, int]:
    """Return what this process holds: bytes of memory, descriptors and threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


class SoakRank:
    """A soak's rank trains until somebody dies, and then once more from the last checkpoint."""

    def __init__(self, config: Config, joined: Any, tell: Callable[..., None]) -> None:
        """Read the configuration.

        Args:
            joined: the store of all jobs.
        """
        self._config = config
        self._store = joined
        self._tell = tell
        self._file = Path(config["folder"]) / "state.pt"
        self._told_at = 0.0

    def live(self, life: int) -> None:
        """Train until it fails; tells why."""
        try:
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"{self._config['prefix']}/{life}", self._store),
                rank=self._config["rank"],
                world_size=self._config["world"],
                timeout=datetime.timedelta(seconds=MEETING_S),
            )
            self._train(life)
        except Exception as error:  # whatever ends a life is told
            self._tell("ended", life=life, kind=type(error).__name__, text=str(error))
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        gc.collect()

    def _train(self, life: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, INPUTS))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        step = 0
        if self._file.exists():
            saved = torch.load(self._file)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            step = saved["step"]
        model = DistributedDataParallel(net, bucket_cap_mb=0.25)
        policies = self._config["policies"]
        attachment = gradwire.attach(
            model,
            policies[life % len(policies)],
            optimizer=optimizer,
            peer_timeout=self._config["peer_timeout"],
            rendezvous_timeout=MEETING_S,
            timeout=MEETING_S,
        )
        try:
            while True:
                chance = torch.Generator().manual_seed(1000 * step + self._config["rank"])
                optimizer.zero_grad()
                loss = model(torch.randn(16, INPUTS, generator=chance)).square().mean()
                loss.backward()
                optimizer.step()
                step += 1
                if step % SAVED_EVERY == 0:
                    self._save(life, step, net, optimizer)
        finally:
            attachment.detach()

    def _save(self, life: int, step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save on rank 0, and tell the replica at each checkpoint, and what this process holds."""
        if self._config["rank"] == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            written = self._file.with_suffix(".new")
            torch.save(state, written)
            written.rename(self._file)
        held = {}
        if time.monotonic() - self._told_at > TOLD_EVERY_S:
            self._told_at = time.monotonic()
            held = figures()
        self._tell("replica", life=life, step=step, fingerprint=fingerprint(net), **held)
