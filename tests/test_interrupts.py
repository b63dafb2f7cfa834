"""Ctrl-C while a rank waits for others: it acts at once, wherever the rank waits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import gradwire
from ddp_jobs import batch, model, wrap
from gradwire.transport.communicator import Communicator
from gradwire_calls import until
from ranks import Ranks, free_port

PROMPT_S = 2.0


def interrupted(rank: int, folder: str, waits: Callable[[], object]) -> float:
    """Rank 0 waits for rank 1, which comes when the test allows it. When rank 0 was interrupted."""
    here, there = Path(folder, "waits"), Path(folder, "come")
    if rank == 1:
        assert until(there.exists, 60.0)
        return 0.0
    here.touch()
    try:
        waits()
    except KeyboardInterrupt:
        return time.monotonic()
    finally:
        there.touch()
    return -1.0


def interrupt(ranks: Ranks, function: Callable[..., Any], folder: Path, **arguments: Any) -> float:
    """Sends rank 0 a SIGINT once it waits; how long that took to act, in seconds."""
    ranks.start(function, folder=str(folder), **arguments)
    assert until((folder / "waits").exists, 60.0)
    time.sleep(1.0)
    pressed = time.monotonic()
    os.kill(ranks.processes[0].pid, signal.SIGINT)
    caught, other = ranks.collect()
    assert other == 0.0, other
    assert isinstance(caught, float), caught
    return caught - pressed


def in_backward(rank: int, world: int, folder: str, options: dict[str, Any]) -> float:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, **options)
    loss = ddp(batch(rank, 0)).square().mean()
    try:
        return interrupted(rank, folder, loss.backward)
    finally:
        attachment.detach()


def in_static_graph(rank: int, world: int, folder: str, first: bool) -> float:
    ddp = wrap(model(), static_graph=True)
    attachment = gradwire.attach(ddp, "reliable")
    if not first:
        ddp(batch(rank, 0)).square().mean().backward()
    loss = ddp(batch(rank, 1)).square().mean()
    try:
        return interrupted(rank, folder, loss.backward)
    finally:
        attachment.detach()


def in_handle(rank: int, world: int, folder: str) -> float:
    store = dist.distributed_c10d._get_default_store()
    communicator = Communicator(store, rank, world, group="handles")

    def wait() -> None:
        communicator.all_reduce(np.ones(5000, np.float32)).wait()

    try:
        return interrupted(rank, folder, wait)
    finally:
        communicator.close()


def in_attach(rank: int, world: int, folder: str) -> float:
    ddp = wrap(model())
    return interrupted(rank, folder, lambda: gradwire.attach(ddp, "reliable"))


def in_first_backward(rank: int, world: int, folder: str) -> float:
    """Where the ranks of the bare hook meet."""
    ddp = wrap(model())
    state = gradwire.HookState("reliable", model=ddp.module)
    ddp.register_comm_hook(state, gradwire.comm_hook)
    loss = ddp(batch(rank, 0)).square().mean()
    return interrupted(rank, folder, loss.backward)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (in_backward, {"options": {"policy": "reliable"}}),
        (in_backward, {"options": {"policy": "ltp"}}),  # guarded: no bucket is handed over
        (in_static_graph, {"first": False}),
        (in_handle, {}),
    ],
)
def test_ctrl_c_ends_a_wait_for_a_late_rank(
    two: Ranks, tmp_path: Path, function: Callable[..., float], arguments: dict[str, Any]
) -> None:
    assert 0.0 < interrupt(two, function, tmp_path, **arguments) < PROMPT_S


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(in_attach, {}), (in_first_backward, {}), (in_static_graph, {"first": True})],
)
def test_ctrl_c_ends_a_wait_after_which_the_process_groups_are_out_of_step(
    tmp_path: Path, function: Callable[..., float], arguments: dict[str, Any]
) -> None:
    with Ranks(2, GRADWIRE_RENDEZVOUS_TIMEOUT="30") as ranks:
        assert 0.0 < interrupt(ranks, function, tmp_path, **arguments) < PROMPT_S


def heeds(rank: int, world: int, folder: str) -> tuple[float, int]:
    """A handler of the user's own runs while the rank waits, and the step goes on."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.1)
    loss = ddp(batch(rank, 0)).square().mean()
    came: list[float] = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(time.monotonic()))
    try:
        if rank == 0:
            Path(folder, "waits").touch()
        else:
            assert until(Path(folder, "come").exists, 60.0)
        loss.backward()
    finally:
        signal.signal(signal.SIGINT, before)
        attachment.detach()
    return (came[0] if came else 0.0), attachment.report().step


def test_a_handler_of_the_users_own_runs_at_once_and_the_step_goes_on(
    two: Ranks, tmp_path: Path
) -> None:
    two.start(heeds, folder=str(tmp_path))
    assert until((tmp_path / "waits").exists, 60.0)
    time.sleep(1.0)
    pressed = time.monotonic()
    os.kill(two.processes[0].pid, signal.SIGINT)
    time.sleep(PROMPT_S)
    (tmp_path / "come").touch()
    (caught, step), (_, other) = two.collect()
    assert 0.0 < caught - pressed < PROMPT_S
    assert step == other == 0


def goes_on(rank: int, world: int, folder: str) -> float:
    """After Ctrl-C in a backward pass: the next pass is refused, and a new module can be attached
    once all have detached."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    loss = ddp(batch(rank, 0)).square().mean()
    caught = interrupted(rank, folder, loss.backward)
    if rank == 1:
        with contextlib.suppress(RuntimeError):  # unless the others' engine is there for a moment
            loss.backward()
    else:
        with pytest.raises(RuntimeError):
            ddp(batch(rank, 1)).square().mean().backward()
    attachment.detach()
    fresh = wrap(model())
    again = gradwire.attach(fresh, "reliable")
    fresh(batch(rank, 0)).square().mean().backward()
    assert again.report().step == 0
    again.detach()
    return caught


def test_a_new_module_can_be_attached_after_ctrl_c(two: Ranks, tmp_path: Path) -> None:
    assert interrupt(two, goes_on, tmp_path) < PROMPT_S


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, gradwire
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=2)
ddp = DDP(torch.nn.Linear(8, 8))
gradwire.attach(ddp, "reliable")
loss = ddp(torch.ones(2, 8)).sum()
print("waits", flush=True)
if rank == 1:
    time.sleep(300)
loss.backward()
"""


def test_a_program_that_is_interrupted_ends() -> None:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
        time.sleep(1.0)
        processes[0].send_signal(signal.SIGINT)
        _, errors = processes[0].communicate(timeout=60)  # long before rank 1 would come
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[0].returncode == -signal.SIGINT
    assert errors.splitlines()[-1].endswith("KeyboardInterrupt")
