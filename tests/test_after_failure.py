"""After a step that failed while all processes live: what goes on, and how."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from ddp_jobs import batch, fingerprint, model, wrap
from gradwire_calls import until
from ranks import Ranks

ENVIRONMENT = {"GRADWIRE_PEER_TIMEOUT": "3", "GRADWIRE_RENDEZVOUS_TIMEOUT": "20"}


def loss_of(ddp: Any, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = ddp(batch(rank, step)).square().mean()
    return loss


def fail(kind: str, attachment: gradwire.Attachment, ddp: Any, rank: int, folder: str) -> None:
    """Fails in a backward pass, on each rank in its own way."""
    loss = loss_of(ddp, rank, 9)
    here, there = Path(folder, "frozen"), Path(folder, "melted")
    if kind == "timeout" and rank == 1:
        assert until(Path(folder, "failed-0").exists, 30.0)
    if kind == "plan" and rank == 1:
        attachment.policy.p = 0.4
    if kind == "frozen":
        if rank == 1:
            here.write_text(str(os.getpid()))
        assert until(there.exists, 30.0) if rank == 1 else until(here.exists, 30.0)
    loss.backward()


def goes_on(rank: int, world: int, kind: str, same: bool, folder: str) -> tuple[str, bytes]:
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    options = {"policy": "mlt", "p": 0.2, "timeout": 2.0 if kind == "timeout" else 20.0}
    attachment = gradwire.attach(ddp, **options)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    checkpoint = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    state = attachment.state_dict()
    if kind == "scale":
        attachment.grad_scale = 2.0 + rank
    with pytest.raises(RuntimeError) as failed:
        fail(kind, attachment, ddp, rank, folder)
    Path(folder, f"failed-{rank}").touch()
    for _ in range(2):  # none that follows is a sum of anything
        with pytest.raises(RuntimeError, match="stopped at an earlier failure"):
            loss_of(ddp, rank, 9).backward()
    told = str(failed.value)
    del failed
    attachment.detach()
    if not same:
        inner = ddp.module
        del ddp
        ddp = wrap(inner)
    ddp.module.load_state_dict(checkpoint)
    options["timeout"] = 20.0
    attachment = gradwire.attach(ddp, **options)
    attachment.load_state_dict(state)
    for step in range(2, 5):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    assert attachment.step == 5
    attachment.detach()
    return told, fingerprint(ddp)


@pytest.mark.parametrize("same", [True, False], ids=["same module", "new module"])
@pytest.mark.parametrize(
    ("kind", "told"),
    [("timeout", "not complete"), ("plan", "plan"), ("scale", "by 3"), ("frozen", "rank")],
)
def test_all_attach_again_and_go_on_from_a_checkpoint(
    tmp_path: Path, kind: str, told: str, same: bool
) -> None:
    with Ranks(2, **ENVIRONMENT) as ranks:
        ranks.start(goes_on, kind=kind, same=same, folder=str(tmp_path))
        if kind == "frozen":
            frozen = tmp_path / "frozen"
            assert until(lambda: frozen.exists() and frozen.read_text() != "", 60.0)
            os.kill(ranks.processes[1].pid, signal.SIGSTOP)
            assert until((tmp_path / "failed-0").exists, 60.0)
            os.kill(ranks.processes[1].pid, signal.SIGCONT)
            (tmp_path / "melted").touch()
        (first, one), (second, other) = ranks.collect()
    assert one == other
    assert told in first
    assert told in second
