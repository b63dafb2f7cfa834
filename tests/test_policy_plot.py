"""PLOT: its table, its file, and the calibration that makes one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app
from gradwire.errors import ConfigError
from gradwire.layer_search import CANDIDATES
from gradwire.policies import PLOT, Calibration
from gradwire.sim import Link
from gradwire.virtual import Job

CHUNK = 358
TENSORS = {
    "front.weight": 60 * CHUNK,
    "front.bias": 64,
    "norm.weight": 64,
    "back.weight": 60 * CHUNK,
}


def gradients(step: int, world: int = 3) -> list[np.ndarray]:
    chance = np.random.default_rng(step)
    elements = sum(TENSORS.values())
    return [chance.standard_normal(elements).astype(np.float32) for _ in range(world)]


def test_each_layer_loses_within_its_own_bound() -> None:
    table = {"front.weight": 0.05, "back.*": 0.4}
    job = Job(3, TENSORS, "plot", table=table, link=Link(loss=0.3))
    least = {"front.weight": 1.0, "back.weight": 1.0}
    for step in range(15):
        job.step(gradients(step))
        regions = {region.name: region for region in job.report.regions}
        assert regions["front.bias … norm.weight"].delivered == 1.0
        assert regions["front.bias … norm.weight"].bound == 0.0  # no pattern matches
        for name, bound in (("front.weight", 0.05), ("back.weight", 0.4)):
            assert regions[name].delivered >= 1.0 - bound
            least[name] = min(least[name], regions[name].delivered)
    assert least["back.weight"] < 0.85 < least["front.weight"]


def test_nothing_is_given_up_on_a_quiet_network() -> None:
    job = Job(2, TENSORS, "plot", table={"*.weight": 0.4})
    job.step(gradients(0, 2))
    assert job.report.delivered == 1.0


# ---------------------------------------------------------------------------- the file


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Calibration(
        Calibration.fingerprint(TENSORS),
        {"front.weight": 0.05, 'odd "name"': 0.1},
        {"eps": 0.05, "steps": 8},
    )
    made.save(tmp_path / "bounds.toml")
    assert Calibration.load(tmp_path / "bounds.toml") == made
    policy = PLOT(table=str(tmp_path / "bounds.toml"))
    assert policy.bound_of("front.weight") == 0.05
    assert policy.bound_of("front.bias") == 0.0
    assert policy.options()["table"] == made.bounds  # ranks compare contents, not paths
    policy.prepare(TENSORS)


def test_a_file_for_another_model_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    path = str(tmp_path / "bounds.toml")
    Calibration(Calibration.fingerprint(TENSORS), {"front.weight": 0.05}).save(path)
    with pytest.raises(ConfigError, match=r"made for model .*has no tensor 'front.weight'"):
        Job(2, {"other.weight": 1000}, "plot", table=path)
    with pytest.raises(ConfigError, match="its sizes differ"):
        Job(2, {**TENSORS, "front.weight": 1000}, "plot", table=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("= 5", "no TOML"),
        ("format = 2", "format=2, model=None"),
        ('format = 1\nmodel = "x"', "section [bounds] is missing"),
        ('format = 1\nmodel = "x"\n[bounds]\na = 1.5', "bounds['a']=1.5: a bound is a number"),
    ],
)
def test_a_bad_file_names_itself(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "bounds.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        PLOT(table=str(path))
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_a_table_is_needed_and_has_to_match() -> None:
    with pytest.raises(ConfigError, match="table=None"):
        PLOT()
    with pytest.raises(ConfigError, match="matches no tensor"):
        Job(2, TENSORS, "plot", table={"head.*": 0.1})
    with pytest.raises(ConfigError, match="without a model"):
        PLOT(table={"*": 0.1}).prepare(None)


# ---------------------------------------------------------------------------- calibration


class Uneven(nn.Module):
    """All of the loss hangs on `front`; `back` adds a thousandth."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.back = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.front(x)) + 1e-3 * self.back(x)
        return out


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch.roll(1, 1)).square().mean()
    return loss


def batches() -> list[torch.Tensor]:
    return [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def make() -> tuple[nn.Module, object, list[torch.Tensor]]:
    """For the command."""
    return Uneven(), loss_of, batches()


def test_layers_that_matter_get_small_bounds_and_the_model_stays_as_it_was() -> None:
    model = Uneven()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    found = gradwire.calibrate(model, loss_of, batches(), eps=0.05, steps=6, lr=0.5)
    assert found.bounds["back.weight"] == CANDIDATES[-1]
    assert found.bounds["front.weight"] < 0.2
    for name in ("front.bias", "norm.weight", "norm.bias", "back.bias"):
        assert found.bounds[name] == 0.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    loose = gradwire.calibrate(model, loss_of, batches(), eps=0.9, steps=6, lr=0.5)
    assert loose.bounds["front.weight"] > found.bounds["front.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, "eps=0.0"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 7}, "steps=7: only 6 batches"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": 1e6}, "do not decrease the loss"),
    ],
)
def test_impossible_calibrations_name_themselves(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        gradwire.calibrate(Uneven(), loss_of, batches(), **{"steps": 2, **options})  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_the_command_writes_a_file_for_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from test_policy_plot import make\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    out = str(tmp_path / "bounds.toml")
    runner = CliRunner()
    done = runner.invoke(app, ["calibrate", "mine:make", "--steps", "2", "--out", out, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["bounds"] == Calibration.load(out).bounds
    sizes = {name: p.numel() for name, p in Uneven().named_parameters()}
    PLOT(table=out).prepare(sizes)
    done = runner.invoke(app, ["calibrate", "mine:nothing"])
    assert done.exit_code == 2
    assert "has no function 'nothing'" in done.output + (done.stderr or "")
