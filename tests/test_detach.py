"""What detach gives back, and how a job ends: quietly, whatever still holds its hook."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ddp_jobs import model, train, wrap
from ranks import Ranks, free_port

START = """
import os, torch, torch.distributed as dist, gradwire
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
def step(module):  # as an output that is looked at later: its graph lives to the end
    kept = module(torch.randn(2, 8))
    kept.register_hook(lambda gradient: None)
    kept.sum().backward()
    return kept
first = DDP(torch.nn.Linear(8, 8))
a = gradwire.attach(first, "reliable")
z = step(first)
"""

ENDS = {
    "detached": """
a.detach()
opt = torch.optim.AdamW(first.parameters())
b = gradwire.attach(first, "dblp", optimizer=opt, scaler=torch.amp.GradScaler("cpu"))
y = step(first)
second = DDP(torch.nn.Linear(8, 8))
c = gradwire.attach(second, "mlt", error_feedback=True)
x = step(second)
b.detach(); c.detach()
dist.destroy_process_group()
""",
    "attached": "dist.destroy_process_group()",
    "failed": """
b = None
try:
    if dist.get_rank() == 0:
        a.detach()
    else:
        first.require_forward_param_sync = False
        y = step(first)
except RuntimeError as error:
    b = error
""",
}


def quietly(script: str) -> list[tuple[int, str]]:
    """Runs a script as two ranks; what each returned and wrote."""
    port = str(free_port())
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GRADWIRE_PEER_TIMEOUT": "10",
        "GRADWIRE_TEST_LEAKS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # Gloo warns where the host's own name has no address
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, out) for process, out in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize(
    "end",
    ["failed", *(pytest.param(end, marks=pytest.mark.slow) for end in ("attached", "detached"))],
)
def test_a_job_ends_in_silence_though_its_last_graph_holds_the_hook(end: str) -> None:
    """The graph holds the reducer, and that the hook's state: neither is ever collected."""
    assert quietly(START + ENDS[end]) == [(0, "")] * 2


# ---------------------------------------------------------------------------- detach


def udp_sockets() -> int:
    """This process's own."""
    known = set()
    for table in ("udp", "udp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            known.add(f"socket:[{line.split()[9]}]")
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(entry.readlink()) in known
    return count


def engine_threads() -> list[str]:
    """The engine's own, and those of its users."""
    names = [thread.name for thread in threading.enumerate()]
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((entry / "comm").read_text().strip())
    return [name for name in names if name.startswith("gradwire")]


def frees(rank: int, world: int) -> None:
    assert (udp_sockets(), engine_threads()) == (0, [])
    first, second = wrap(model()), wrap(model())
    one = gradwire.attach(first, "reliable")
    two = gradwire.attach(second, "mlt", p=0.1)
    assert udp_sockets() == 1
    assert engine_threads()
    train(first, rank, range(2))
    one.detach()
    assert udp_sockets() == 1  # the second module's
    train(second, rank, range(2))
    sent = two.counters()["packets_sent"]
    two.detach()
    assert (udp_sockets(), engine_threads()) == (0, [])
    assert two.counters()["packets_sent"] >= sent > 0
    again = gradwire.attach(first, "dblp")
    train(first, rank, range(2, 4))
    assert again.report().step == 1
    again.detach()
    assert (udp_sockets(), engine_threads()) == (0, [])


def test_the_last_detach_closes_the_engine_and_the_next_attach_opens_one() -> None:
    with Ranks(2) as ranks:
        ranks.run(frees)


def in_no_time(rank: int, world: int) -> None:
    """Garbage is not collected, which would take as long as the process has objects."""
    first, second = wrap(model()), wrap(model())
    collected: list[str] = []
    gc.disable()
    gc.callbacks.append(lambda phase, found: collected.append(phase))
    try:
        attachments = [gradwire.attach(module, "reliable") for module in (first, second)]
        train(first, rank, range(2))
        for attachment in attachments:
            attachment.detach()
    finally:
        gc.callbacks.pop()
        gc.enable()
    assert collected == []


def test_modules_are_attached_and_detached_without_a_collection_of_garbage() -> None:
    with Ranks(2) as ranks:
        ranks.run(in_no_time)


def kept_memory(rank: int, world: int) -> float:
    """What is left of an attachment that nobody holds, over the gradient's bytes."""
    ddp = DistributedDataParallel(model(width=3000), bucket_cap_mb=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, rank, range(2))
    gc.collect()
    tracemalloc.start()
    attachment = gradwire.attach(
        ddp, "mlt", p=0.3, optimizer=optimizer, error_feedback=True, floor=0.1
    )
    for step in range(3):
        train(ddp, rank, range(step, step + 1))
    during = tracemalloc.get_traced_memory()[0]
    attachment.detach()
    del attachment
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    gradient = sum(4 * p.numel() for p in ddp.parameters())
    assert during > gradient  # residuals
    return after / gradient


def test_a_detached_module_holds_no_books_and_no_buffers() -> None:
    with Ranks(2) as ranks:
        assert max(ranks.run(kept_memory)) < 0.2
