"""PLOT: its table, its file, and the calibration that makes one."""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gradwire
from gradwire.calibration.search import CANDIDATES, LayerSearch
from gradwire.cli import app
from gradwire.core.errors import ConfigError
from gradwire.policies import PLOT, Adaptive, Calibration
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job
from job_gradients import normal

CHUNK = 358
TENSORS = {
    "front.weight": 60 * CHUNK,
    "front.bias": 64,
    "norm.weight": 64,
    "back.weight": 60 * CHUNK,
}
gradients = partial(normal, sum(TENSORS.values()))


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
        {"front.weight": 0.05, "front.bias": 0.0, "norm.weight": 0.0, "back.weight": 0.1},
        {"eps": 0.05, "steps": 8},
    )
    made.save(tmp_path / "bounds.toml")
    assert Calibration.load(tmp_path / "bounds.toml") == made
    policy = PLOT(table=str(tmp_path / "bounds.toml"))
    assert policy.bound_of("front.weight") == 0.05
    assert policy.bound_of("front.bias") == 0.0
    assert policy.options()["table"] == made.bounds  # ranks compare contents, not paths
    policy.prepare(TENSORS)


def test_whatever_a_layer_is_called_and_a_bound_is_made_of_a_file_holds_it(tmp_path: Path) -> None:
    names = ['odd "name"', "back\\slash", "\U0001f600.weight", "del\x7f.weight", "ümlaut", "a\nb"]
    made = Calibration(
        "0" * 16,
        dict.fromkeys(names, np.float64(0.1)),  # type: ignore[arg-type]
        {"eps": np.float32(0.5), "steps": np.int64(8)},  # type: ignore[dict-item]
    )
    made.save(tmp_path / "bounds.toml")
    read = Calibration.load(tmp_path / "bounds.toml")
    assert (list(read.bounds), read.bounds, read.settings) == (names, made.bounds, made.settings)


@pytest.mark.parametrize("policy", ["plot", "adaptive"])
def test_a_name_that_the_model_lacks_is_an_error_before_the_first_step(
    policy: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "bounds.toml")
    Calibration(Calibration.fingerprint(TENSORS), {"front.wieght": 0.05}).save(path)
    with pytest.raises(ConfigError) as raised:
        Job(2, TENSORS, policy, table=path)
    assert f"table={path!r}: bounds['front.wieght']: the model has no such tensor (did you" in (
        str(raised.value)
    )
    assert "'front.weight'?)" in str(raised.value)


def test_a_file_for_another_model_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    path = str(tmp_path / "bounds.toml")
    Calibration(Calibration.fingerprint(TENSORS), dict.fromkeys(TENSORS, 0.05)).save(path)
    with pytest.raises(ConfigError, match=r"bounds\['front.weight'\]: the model has no"):
        Job(2, {"other.weight": 1000}, "plot", table=path)
    with pytest.raises(ConfigError, match="its sizes differ"):
        Job(2, {**TENSORS, "front.weight": 1000}, "plot", table=path)
    with pytest.raises(ConfigError, match=r"its tensor 'frozen.weight' has no bound there"):
        Job(2, {**TENSORS, "frozen.weight": 1000}, "plot", table=path)


@pytest.mark.parametrize("policy", ["plot", "adaptive"])
def test_a_file_that_lost_a_line_is_an_error_before_the_first_step(
    policy: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "bounds.toml")
    bounds = dict.fromkeys(TENSORS, 0.05)
    del bounds["back.weight"]
    Calibration(Calibration.fingerprint(TENSORS), bounds).save(path)
    with pytest.raises(ConfigError, match=r"bounds: no line for tensor 'back.weight'"):
        Job(2, TENSORS, policy, table=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("= 5", "no TOML"),
        ("format = 2", "format=2, model=None"),
        ('format = 1\nmodel = "x"', "section [bounds] is missing"),
        ('format = 1\nmodel = "x"\n[bounds]\na = 1.5', "bounds['a']=1.5: a bound is a number"),
        ('format = 1\nmodel = "x"\nsettings = 3\n[bounds]\na = 0.1', "settings=3: a section"),
        ('format = 1\nmodel = "x"\nsettings = "x"\n[bounds]\na = 0.1', "settings='x': a section"),
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


@pytest.mark.parametrize("policy", [PLOT, Adaptive])
def test_a_name_that_no_file_has_is_one_that_cannot_be_read(policy: type[PLOT]) -> None:
    with pytest.raises(ConfigError, match=r"table='a\\x00b': cannot be read"):
        policy(table="a\0b")


def test_a_table_is_needed_and_has_to_match() -> None:
    for table in (None, ""):
        with pytest.raises(ConfigError, match="make a table with `gradwire calibrate`") as raised:
            PLOT(table=table)
        assert (raised.value.setting, raised.value.value) == ("table", table)
    with pytest.raises(ConfigError, match="matches no tensor"):
        Job(2, TENSORS, "plot", table={"head.*": 0.1})
    with pytest.raises(ConfigError, match="without a model"):
        PLOT(table={"*": 0.1}).prepare(None)


def test_a_pattern_that_never_counts_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"table\['\*\.weight'\]=0\.0 never counts: '\*' stands"):
        Job(2, TENSORS, "plot", table={"*": 0.2, "*.weight": 0.0})
    Job(2, TENSORS, "plot", table={"*.weight": 0.0, "*": 0.2})
    Job(2, TENSORS, "plot", table={"*.weight": 0.0, "*.bias": 0.1, "*": 0.2})  # of no use, no harm
    Job(2, TENSORS, "plot", table={"*.weight": 0.0, "*.bias": 0.1, "*t": 0.2, "*": 0.3})
    weights = {name: size for name, size in TENSORS.items() if name.endswith("weight")}
    Job(2, weights, "plot", table={"*.weight": 0.1, "*": 0.2})  # for what another model may have
    Job(2, TENSORS, "plot", table={"*": 0.2, "*.weight": 0.2})  # changes nothing


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


def test_a_norm_layer_over_two_dimensions_is_not_searched_either() -> None:
    model = nn.Sequential(OrderedDict(front=nn.Linear(8, 8), norm=nn.LayerNorm([4, 8])))
    search = LayerSearch(dict(model.named_parameters()), eps=0.05, lr=0.5, chunk_elements=8)
    assert search.layers == {"front": ["front.weight"]}
    assert search.bounds["norm.weight"] == 0.0


def test_buffers_that_no_state_has_stay_as_they_were_too() -> None:
    class Counting(Uneven):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()), persistent=False)
            self.register_buffer("mask", torch.zeros(1).expand(64), persistent=False)
            self.register_buffer("last", None, persistent=False)
            self.register_buffer("seen", torch.zeros(1), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = x
            self.seen = torch.cat([self.seen, torch.ones(1)])
            self.register_buffer("late", torch.ones(1))
            return super().forward(x) + self.mask

    model = Counting()
    before = dict(model.named_buffers())
    gradwire.calibrate(model, loss_of, batches(), steps=1, lr=0.5)
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is buffer for name, buffer in before.items())
    assert (model.calls, model.last, model.seen.numel()) == (0, None, 1)


def test_the_scalars_of_numpy_and_torch_are_settings_too(tmp_path: Path) -> None:
    found = gradwire.calibrate(
        Uneven(),
        loss_of,
        batches(),
        eps=np.float64(0.5),
        steps=np.int64(2),  # type: ignore[arg-type]
        lr=torch.tensor(0.5),  # type: ignore[arg-type]
        chunk_elements=torch.tensor(361),  # type: ignore[arg-type]
        seed=np.int64(1),  # type: ignore[arg-type]
    )
    found.save(tmp_path / "bounds.toml")
    assert Calibration.load(tmp_path / "bounds.toml") == found
    assert found.settings == {"eps": 0.5, "steps": 2, "lr": 0.5, "chunk_elements": 361}
    assert found == gradwire.calibrate(
        Uneven(), loss_of, batches(), eps=0.5, steps=2, lr=0.5, seed=1
    )


def test_the_front_bears_half_of_the_most() -> None:
    """Whatever single steps say of it; there is no more than one front layer in so few."""
    torch.manual_seed(2)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    found = gradwire.calibrate(
        nn.Sequential(*layers),
        lambda model, x: (model(x) - x).square().mean(),
        [torch.randn(32, 64) for _ in range(4)],
        eps=0.99,
        steps=4,
        lr=0.01,
    )
    assert [found.bounds[f"{n}.weight"] for n in range(3)] == [0.2, 0.6, 0.6]


def test_a_job_keeps_the_bounds_of_a_calibration(tmp_path: Path) -> None:
    path = str(tmp_path / "bounds.toml")
    found = gradwire.calibrate(Uneven(), loss_of, batches(), eps=0.05, steps=6, lr=0.5)
    found.save(path)
    sizes = {name: p.numel() for name, p in Uneven().named_parameters()}
    job = Job(3, sizes, "plot", table=path, link=Link(loss=0.3), datagram=256)
    chance = np.random.default_rng(0)
    for _ in range(10):
        job.step([chance.standard_normal(sum(sizes.values())).astype(np.float32) for _ in "abc"])
    regions = {region.name: region for region in job.report.regions}
    assert regions["back.weight"].bound == CANDIDATES[-1]
    assert 0.4 <= regions["back.weight"].delivered < 0.95
    assert regions["front.weight"].bound == found.bounds["front.weight"] < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, "eps=0.0"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 7}, "steps=7: only 6 batches"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": 1e6}, "do not decrease the loss"),
        ({"seed": -1}, "seed=-1"),
        ({"steps": 1.5}, "steps=1.5: a whole number"),
        ({"steps": 10**400}, "steps=1000"),
        ({"eps": np.ones(2)}, "eps=array([1., 1.])"),
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
    done = runner.invoke(app, ["calibrate", "mine:make", "--out", str(tmp_path / "no" / "b.toml")])
    assert done.exit_code == 2
    assert "a file in a folder that exists" in done.output
    done = runner.invoke(app, ["calibrate", "mine:nothing"])
    assert done.exit_code == 2
    assert "has no function 'nothing'" in done.output + (done.stderr or "")


def frozen() -> torch.nn.Module:
    return Uneven().requires_grad_(False)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("None", "returned NoneType: it has to return (model, loss_fn, batches)"),
        ("(Uneven(), loss_of)", "returned tuple of 2: it has to return (model, loss_fn, batches)"),
        ("(3, loss_of, [1])", "model is of type int: a torch.nn.Module is needed"),
        ("(Uneven(), 3, [1])", "loss_fn is of type int: a function of (model, batch)"),
        ("(Uneven(), loss_of, 3)", "batches are of type int: something to iterate over"),
        ("(Uneven(), loss_of, [])", "steps=2: only 0 batches were given"),
        ("(frozen(), loss_of, batches())", "the model has no trained parameters"),
        ("(Uneven(), lambda m, b: 1.0, batches())", "loss_fn returned float: a scalar tensor"),
        ("(Uneven(), lambda m, b: torch.zeros(3), batches())", "Tensor of shape (3,): a scalar"),
        ("(Uneven(), lambda m, b: torch.zeros(()), batches())", "a tensor without a gradient"),
        (
            "(Uneven(), lambda m, b: loss_of(m, b) * math.nan, batches())",
            "steps are not finite (lr=0.05)",
        ),
    ],
)
def test_a_function_that_returns_something_else_is_one_sentence(
    made: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "strange", lambda: eval(made, {**globals(), "math": math}))
    monkeypatch.setitem(sys.modules, "strange_calibration", sys.modules[__name__])
    out = str(tmp_path / "b.toml")
    arguments = ["calibrate", "strange_calibration:strange", "--steps", "2", "--out", out]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.exception
    said = done.output.strip()
    assert message in said
    assert said.startswith("gradwire calibrate: ")
    assert len(said.splitlines()) == 1
    assert not Path(out).exists()


def test_calibrate_checks_its_numbers_before_it_calls_the_function() -> None:
    for wrong in (["--eps", "5.0"], ["--lr", "0.0"], ["--steps", "0"], ["--seed", "-1"]):
        done = CliRunner().invoke(app, ["calibrate", "os:getcwd", *wrong])
        assert done.exit_code == 2
        assert f"{wrong[0].removeprefix('--')}={wrong[1]}: " in done.output


def test_a_file_in_place_of_a_module_is_explained() -> None:
    done = CliRunner().invoke(app, ["calibrate", "mine.py:make"])
    assert done.exit_code == 2
    assert "as in mine:make" in done.output
