"""States and reports of attached modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradwire
from ddp_jobs import (
    fingerprint,
    model,
    train,
    wrap,
)
from own_state import own_state
from ranks import Ranks


def resumes(rank: int, world: int) -> tuple[bytes, bytes]:
    options: dict[str, Any] = {"policy": "dblp", "every": 3, "error_feedback": True, "p_low": 0.2}
    straight = wrap(model())
    attachment = gradwire.attach(straight, **options)
    train(straight, rank, range(4))
    train(straight, rank, range(4, 12))
    attachment.detach()
    stopped = wrap(model())
    attachment = gradwire.attach(stopped, **options)
    train(stopped, rank, range(4))
    state = attachment.state_dict()
    attachment.detach()
    resumed = wrap(model())
    resumed.module.load_state_dict(stopped.module.state_dict())
    attachment = gradwire.attach(resumed, **options)
    attachment.load_state_dict(state)
    train(resumed, rank, range(4, 12))
    assert attachment.step == 12
    attachment.detach()
    with pytest.raises(gradwire.GradwireError, match="detached"):
        attachment.load_state_dict(state)
    return fingerprint(straight), fingerprint(resumed)


def test_a_resumed_run_decides_as_the_first_would(two: Ranks) -> None:
    (_, first), (_, second) = two.run(resumes)
    assert first == second


def ages_resume(rank: int, world: int) -> None:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.5)
    train(ddp, rank, range(3))
    state = own_state(attachment.state_dict())
    ages = state["ages"]
    assert ages
    sizes = {name: p.numel() for name, p in ddp.module.named_parameters()}
    assert all(int(runs[:, 0].sum()) == sizes[name] for name, runs in ages.items())
    attachment.detach()
    attachment = gradwire.attach(ddp, "mlt", p=0.5)
    attachment.load_state_dict(state)
    again = own_state(attachment.state_dict())["ages"]
    assert {name: runs.tolist() for name, runs in again.items()} == {
        name: runs.tolist() for name, runs in ages.items()
    }
    attachment.flush()
    train(ddp, rank, range(3, 5))
    assert own_state(attachment.state_dict())["ages"] == {}
    del state["ages"]  # as saved before ages were
    attachment.load_state_dict(state)
    attachment.detach()


def test_ages_are_saved_and_emptied_with_the_residuals(two: Ranks) -> None:
    two.run(ages_resume)


def reports(rank: int, world: int, path: str) -> None:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.2, report=path)
    with pytest.raises(gradwire.GradwireError, match="no step"):
        attachment.report()
    for wrong in ("0.5", None, torch.zeros(2), True, 1j):
        with pytest.raises(gradwire.ConfigError) as raised:
            attachment.loss(wrong)  # type: ignore[arg-type]
        assert raised.value.allowed.startswith("a number, or a tensor that holds one")
    for wrong in (-1, 0.5, "1", True, 10**400):
        with pytest.raises(gradwire.ConfigError) as raised:
            attachment.epoch(wrong)  # type: ignore[arg-type]
        assert (raised.value.setting, raised.value.value) == ("epoch", wrong)
    attachment.epoch(np.int64(0))  # type: ignore[arg-type]
    for wrong in (0.0, float("nan"), "1", True, 10**400, 1e160, 1e-160):
        with pytest.raises(gradwire.ConfigError) as raised:
            attachment.grad_scale = wrong  # type: ignore[assignment]
        assert raised.value.setting == "grad_scale"
        assert raised.value.value is wrong
    attachment.grad_scale = torch.tensor([1.0]).squeeze()  # type: ignore[assignment]
    for step in range(3):
        attachment.loss(torch.tensor([float(rank)], requires_grad=True))
        train(ddp, rank, range(step, step + 1))
    assert attachment.report().agreed.loss == 0.5
    attachment.detach()


def test_every_step_writes_a_line(two: Ranks, tmp_path: Path) -> None:
    two.run(reports, path=str(tmp_path / "steps.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["rank"] == 0
        assert line["bytes"] > 0
        assert line["packets"] > 0
        assert 0 < line["push_s"] <= line["comm_s"]
        assert line["rtprop_s"] > 0
        assert line["btlbw"] >= 0  # 0: not known yet
        assert line["bound"] == 0.2
        assert 0 < line["effective_bound"] <= 0.2
        assert all(region["delivered"] >= 0.8 for region in line["regions"])
