"""Settings: keywords before variables before defaults; what is impossible names itself."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from gradwire import _engine
from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.policies import DBLP, MLT, Adaptive
from gradwire.policies.registry import agreed_configuration
from gradwire.sim.fabric import Fabric, Link
from gradwire.sim.job import Job
from gradwire.training.configure import configure
from gradwire.training.hook import HookState
from gradwire_lab.network.wire import Wire
from gradwire_lab.scenario.network import Loss as ScenarioLoss


def test_keywords_come_before_variables_and_variables_before_defaults() -> None:
    environment = {"GRADWIRE_PORT": "5000", "GRADWIRE_MAX_AGE": "7", "GRADWIRE_SEED": ""}
    settings = Settings.build({"port": 6000}, environment=environment)
    assert (settings.port, settings.max_age, settings.seed) == (6000, 7, 0)


def test_variables_convert_to_what_a_setting_takes() -> None:
    environment = {
        "GRADWIRE_ERROR_FEEDBACK": "true",
        "GRADWIRE_TIMEOUT": "12.5",
        "GRADWIRE_INTERFACE": "eth0",
        "GRADWIRE_SERVERS": "2",
        "GRADWIRE_ROUTE": "server",
    }
    settings = Settings.build(environment=environment)
    assert settings.error_feedback is True
    assert settings.timeout == 12.5
    assert settings.interface == "eth0"
    assert settings.server_count == 2
    assert Settings.build(environment={"GRADWIRE_ERROR_FEEDBACK": "auto"}).feedback is False
    assert Settings.build(environment={"GRADWIRE_HOSTS": "False"}).hosts is False
    assert Settings.build(environment={"GRADWIRE_HOSTS": "true"}).hosts is True
    with pytest.raises(ConfigError, match="GRADWIRE_HOSTS='many': expected 'auto' or true or fa"):
        Settings.build(environment={"GRADWIRE_HOSTS": "many"})


def service(name: str) -> dict[str, str]:
    """What kubelet sets in every pod of a namespace that has a Service of this name."""
    prefix = name.upper().replace("-", "_")
    url = "tcp://10.96.3.7:29500"
    return {
        f"{prefix}_SERVICE_HOST": "10.96.3.7",
        f"{prefix}_SERVICE_PORT": "29500",
        f"{prefix}_SERVICE_PORT_STORE": "29500",
        f"{prefix}_PORT": url,
        f"{prefix}_PORT_29500_TCP": url,
        f"{prefix}_PORT_29500_TCP_PROTO": "tcp",
        f"{prefix}_PORT_29500_TCP_PORT": "29500",
        f"{prefix}_PORT_29500_TCP_ADDR": "10.96.3.7",
    }


@pytest.mark.parametrize("name", ["gradwire", "gradwire-server", "gradwire-server-0"])
def test_the_variables_of_a_kubernetes_service_are_no_settings(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    links = service(name)
    for _ in range(2):
        _, settings = configure("dblp", {}, {**links, "GRADWIRE_SEED": "3"})
    assert (settings.port, settings.seed) == (0, 3)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "gradwire"]  # once a process
    assert all(variable in line for variable in links)


def test_what_only_resembles_a_service_is_still_refused() -> None:
    for variable, value in {
        "GRADWIRE_SERVICE": "x",
        "GRADWIRE_SERVER_PORT": "29500",
        "GRADWIRE_PORT": "http://10.96.3.7",
    }.items():
        with pytest.raises(ConfigError) as raised:
            configure("dblp", {}, {variable: value})
        assert (raised.value.setting, raised.value.value) == (variable, value)


def test_top_k_without_feedback_is_an_error() -> None:
    for options in ({}, {"error_feedback": False}):
        with pytest.raises(ConfigError, match="compress='topk' with error_feedback off"):
            configure("adaptive", {"compress": "topk", **options}, {})
    assert configure("adaptive", {"compress": "topk", "error_feedback": True}, {})[1].feedback
    configure("adaptive", {"compress": "never"}, {})


def test_an_exact_policy_needs_no_feedback() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert not configure("reliable", {}, {}, optimizer)[1].feedback
    assert configure("mlt", {}, {}, optimizer)[1].feedback


def test_policy_and_its_options_may_come_from_variables() -> None:
    environment = {"GRADWIRE_POLICY": "mlt", "GRADWIRE_P": "0.25", "GRADWIRE_P_LOW": "0.1"}
    with pytest.warns(UserWarning, match="GRADWIRE_P_LOW='0.1' is not read"):
        policy, _ = configure(None, {}, environment)
    assert policy == MLT(p=0.25)  # p_low belongs to another policy: left alone
    policy, _ = configure("dblp", {"p_high": 0.6}, {"GRADWIRE_EVERY": "epoch"})
    assert isinstance(policy, DBLP)
    assert (policy.p_high, policy.every) == (0.6, "epoch")
    policy, _ = configure(None, {}, {})
    assert isinstance(policy, Adaptive)


@pytest.mark.parametrize(
    ("policy", "options", "environment", "setting", "value"),
    [
        ("dblp", {"p_lo": 0.1}, {}, "p_lo", 0.1),
        ("dblp", {"prot": 5}, {}, "prot", 5),
        ("mlt", {"p_low": 0.1}, {}, "p_low", 0.1),
        ("ltp", {"control": "probe"}, {}, "control", "probe"),
        ("dblp", {"spend": "lost"}, {"GRADWIRE_CONTROL": "probe"}, "spend", "lost"),
        ("reliable", {"fill": "mean"}, {}, "fill", "mean"),
        (MLT(p=0.1), {"p": 0.2}, {}, "p", 0.2),
        ("dblp", {"fill": "mean", "error_feedback": True}, {}, "fill", "mean"),
        (MLT(fill="mean"), {"error_feedback": True}, {}, "fill", "mean"),
        ("dblp", {}, {"GRADWIRE_PROT": "5"}, "GRADWIRE_PROT", "5"),
        ("dblp", {}, {"GRADWIRE_PORT": "many"}, "GRADWIRE_PORT", "many"),
        ("dblp", {}, {"GRADWIRE_EVERY": "x"}, "GRADWIRE_EVERY", "x"),
        ("dblp", {}, {"GRADWIRE_P_LOW": "2"}, "p_low", 2.0),
        (
            "dblp",
            {},
            {"GRADWIRE_POLICY": "x", "GRADWIRE_ERROR_FEEDBACK": "maybe"},
            "GRADWIRE_ERROR_FEEDBACK",
            "maybe",
        ),
        (None, {}, {"GRADWIRE_POLICY": "magic"}, "policy", "magic"),
        (["dblp"], {}, {}, "policy", ["dblp"]),
    ],
)
def test_configure_names_what_is_wrong(
    policy: object,
    options: dict[str, object],
    environment: dict[str, str],
    setting: str,
    value: object,
) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(policy, options, environment)  # type: ignore[arg-type]
    assert (raised.value.setting, raised.value.value) == (setting, value)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("GRADWIRE_TIMEOUT", "-5"), ("GRADWIRE_P_LOW", "2"), ("GRADWIRE_POLICY", "dblpp")],
)
def test_an_error_names_the_variable_that_a_value_comes_from(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        configure(None, {}, {"GRADWIRE_POLICY": "dblp", variable: text})
    with pytest.raises(ConfigError) as given:
        configure("dblp", {"timeout": -5}, {"GRADWIRE_P_LOW": "0.1"})
    assert "GRADWIRE" not in str(given.value)


@pytest.mark.parametrize(
    ("policy", "options", "environment", "words"),
    [
        ("dblp", {"p_lo": 0.1}, {}, "unknown setting p_lo=0.1 (did you mean 'p_low'?)"),
        ("dblp", {}, {"GRADWIRE_PROT": "5"}, "GRADWIRE_PROT='5' names no setting (did you"),
        ("mlt", {"p_low": 0.1}, {}, "p_low=0.1 does not go with policy='mlt'"),
        ("reliable", {"fill": "mean"}, {}, "an option of 'mlt', 'dblp', 'plot'"),
        (MLT(p=0.1), {"p": 0.2}, {}, "p=0.2 beside a policy object"),
        ("dblp", {}, {"GRADWIRE_EVERY": "x"}, "expected a whole number or 'epoch'"),
    ],
)
def test_configure_says_what_would_be_right(
    policy: object, options: dict[str, object], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(policy, options, environment)  # type: ignore[arg-type]
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"route": "ring"},
        {"route": ["server"]},
        {"servers": 2},
        {"servers": 0, "route": "server"},
        {"hosts": True, "route": "server"},
        {"servers": ["host:1"], "route": "server"},
        {"port": 70_000},
        {"port": True},
        {"port": "7000-6999"},
        {"port": "0-10"},
        {"port": "-7000"},
        {"port": "7000-7001-7002"},
        {"port": "a few"},
        {"port": (7000, 70_000)},
        {"port": (7000.0, 7001.0)},
        {"port": ()},
        {"datagram": 9_000},
        {"datagram": False},
        {"datagram": 1472.0},
        {"rendezvous_timeout": 0},
        {"rendezvous_timeout": 1e-9},
        {"peer_timeout": 1e-12},
        {"peer_timeout": 1e10},
        {"peer_timeout": float("inf")},
        {"peer_timeout": "30"},
        {"timeout": 1e-12},
        {"timeout": 1e10},
        {"timeout": 10**400},
        {"timeout": -1},
        {"memory_limit": 1000},
        {"memory_limit": -1},
        {"loss_rise": 10**400},
        {"loss_rise": float("inf")},
        {"floor": float("nan")},
        {"error_feedback": "yes"},
        {"error_feedback": 1},
        {"error_feedback": np.array([1, 2])},
        {"max_age": 0},
        {"seed": -1},
        {"seed": np.arange(2)},
        {"on_failure": "skip"},
        {"dscp": 64},
        {"dscp": True},
        {"ecn": 1},
    ],
    ids=str,
)
def test_impossible_settings_name_themselves(options: dict[str, object]) -> None:
    """The first of them is at fault."""
    with pytest.raises(ConfigError) as raised:
        Settings.build(options, environment={})
    setting, value = next(iter(options.items()))
    assert raised.value.setting == setting
    assert raised.value.value is value
    assert raised.value.allowed
    assert f"{setting}={value!r}"[:20] in str(raised.value)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"route": "ring"}, "allowed are 'sharded', 'server'"),
        ({"port": 70_000}, "a whole number from 0 to 65535"),
        ({"rendezvous_timeout": 1e-9}, "seconds, a number from 0.01 to"),
        ({"peer_timeout": 1e-12}, "seconds, a number from 1 to 3.1536e+08"),
        ({"memory_limit": 1000}, "bytes, a whole number from 1048576 to"),
        ({"on_failure": "skip"}, "allowed are 'raise'"),
        ({"ecn": 1}, "allowed are True, False"),
        ({"error_feedback": 1}, "allowed are 'auto'"),
    ],
)
def test_impossible_settings_say_what_is_allowed(options: dict[str, object], allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Settings.build(options, environment={})
    assert raised.value.allowed.startswith(allowed)


def test_known_settings_are_listed_once() -> None:
    with pytest.raises(ConfigError) as raised:
        configure("dblp", {"nonsense": 5}, {})
    listed = str(raised.value).split("known are ")[1].split(", ")
    assert len(listed) == len(set(listed))


def test_tools_variables_are_no_settings() -> None:
    configure("mlt", {}, {"GRADWIRE_LAB_X": "1", "GRADWIRE_TEST_Y": "1", "PATH": "x"})


@pytest.mark.parametrize(
    ("port", "ports"),
    [
        (0, range(1)),
        (7000, range(7000, 7001)),
        ("7000", range(7000, 7001)),
        ("7000-7003", range(7000, 7004)),
        ((7000, 7003), range(7000, 7004)),
        ([np.int64(7000), 7000], range(7000, 7001)),
    ],
)
def test_a_port_is_a_number_or_a_range(port: Any, ports: range) -> None:
    settings = Settings(port=port)
    assert settings.ports == ports
    assert settings.transport() == Settings(port=settings.port).transport()
    read = Settings.build({}, environment={"GRADWIRE_PORT": str(settings.port)})
    assert read.ports == ports


def test_the_agreed_part_leaves_out_what_is_local() -> None:
    policy, here = configure("mlt", {"port": 1, "interface": "a"}, {})
    _, there = configure("mlt", {"port": 2, "interface": "b"}, {})
    assert agreed_configuration(policy, here) == agreed_configuration(policy, there)
    other, _ = configure("mlt", {"p": 0.5}, {})
    assert agreed_configuration(policy, here) != agreed_configuration(other, here)


def test_importing_gradwire_is_cheap() -> None:
    code = "import sys, gradwire; assert 'torch' not in sys.modules; gradwire.ConfigError"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


UNBUILT = """
import sys

sys.modules["gradwire._engine"] = None  # as if nobody had built it

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire, gradwire.cli, gradwire.sim.fabric, gradwire.sim.job
from gradwire.core.errors import EngineMissingError

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
try:
    gradwire.attach(DistributedDataParallel(torch.nn.Linear(2, 2)))
except EngineMissingError as error:
    print(error)
"""


def test_an_engine_that_was_not_built_says_how_to_build_it() -> None:
    """Where the module is attached, and not where something is imported."""
    done = subprocess.run(
        [sys.executable, "-c", UNBUILT], capture_output=True, text=True, timeout=60
    )
    assert "gradwire._engine cannot be imported" in done.stdout, done.stderr
    assert "build it with `make engine`" in done.stdout


def test_a_policy_object_describes_and_keeps_no_state() -> None:
    described = DBLP(p_low=0.1, fill="zero")
    first, _ = configure(described, {}, {})
    second, _ = configure(described, {}, {})
    assert first == second == described
    assert first is not described
    assert first.phases is not second.phases


def test_the_scalars_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    settings = Settings.build(
        {
            "port": np.int64(5000),
            "timeout": torch.tensor(2.5),
            "loss_rise": np.float32(0.5),
            "error_feedback": np.bool_(True),
            "max_age": np.array(3),
            "report": tmp_path / "steps.jsonl",
        },
        environment={},
    )
    assert (settings.port, settings.timeout, settings.loss_rise) == (5000, 2.5, 0.5)
    assert (settings.error_feedback, settings.max_age) == (True, 3)
    assert settings.report == str(tmp_path / "steps.jsonl")
    json.dumps(settings.agreed())  # as the ranks compare it


@pytest.mark.parametrize("report", ["", 5, True])
def test_a_report_is_a_file(report: object) -> None:
    with pytest.raises(ConfigError, match=f"report={report!r}: the name of a file, or None"):
        Settings(report=report)  # type: ignore[arg-type]


def losing_engine(loss: float, run: float) -> _engine.Engine:
    return _engine.Engine(
        endpoint=0,
        workers=2,
        servers=0,
        session=1,
        address="127.0.0.1",
        drop_rate=loss,
        drop_burst=run,
    )


@pytest.mark.parametrize(
    ("loss", "run", "possible"),
    [(0.9, 9.0, True), (0.9, 8.9, False), (0.6, 1.5, True), (0.6, 1.4, False), (0.5, 1.1, True)],
)
def test_all_that_inject_loss_refuse_the_same_runs(loss: float, run: float, possible: bool) -> None:
    injectors: list[Callable[[], object]] = [
        lambda: losing_engine(loss, run).close(),
        lambda: Wire(loss=loss, loss_burst=run),
        lambda: ScenarioLoss(rate=loss, run=run),
        lambda: Fabric(2, link=Link(loss=loss, loss_burst=run)),
    ]
    for inject in injectors:
        with contextlib.nullcontext() if possible else pytest.raises(ValueError, match="runs"):
            inject()


@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.SGD, 5, ["sgd"]])
def test_an_optimizer_is_one_of_torchs(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"optimizer=.*: a torch.optim.Optimizer, a list of sev"):
        HookState("mlt", optimizer=optimizer)


def test_an_error_shows_the_beginning_of_a_long_value_in_one_line() -> None:
    net = torch.nn.Linear(2, 2)
    given: Any = {"linear": torch.optim.AdamW(net.parameters())}
    with pytest.raises(ConfigError) as raised:
        HookState("mlt", optimizer=given)
    assert raised.value.value is given
    assert str(raised.value).startswith("optimizer={'linear': AdamW (")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200


def test_an_optimizer_is_one_of_the_modules() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    foreign = torch.optim.AdamW(other.parameters())
    with pytest.raises(ConfigError, match=r"optimizer=AdamW: it holds none of the module's param"):
        HookState("dblp", model=model, optimizer=foreign)
    HookState("dblp", model=model, optimizer=torch.optim.AdamW([other.weight, model.weight]))
    HookState("dblp", optimizer=foreign)  # nobody knows a module


def test_whether_parameters_are_unused_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match=r"find_unused_parameters='yes': allowed are True, False"):
        HookState("mlt", find_unused_parameters="yes")  # type: ignore[arg-type]


MATTERS: list[dict[str, Any]] = [
    {"guard": "skip", "floor": 0.5, "error_feedback": True},
    {"scaler": torch.amp.GradScaler("cpu"), "error_feedback": True},
    {"fill": "momentum"},
]
"""What goes by the optimizer of each parameter."""


@pytest.mark.parametrize("options", MATTERS)
def test_a_parameter_in_no_optimizer_is_named_where_that_matters(options: dict[str, Any]) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    first, second, third = (torch.optim.Adam(part.parameters()) for part in model)
    HookState("mlt", model=model, optimizer=[first, second, third], **options)
    with pytest.raises(ConfigError) as raised:
        HookState("mlt", model=model, optimizer=[first, third], **options)
    assert (raised.value.setting, raised.value.value) == ("optimizer", "1.weight")
    model[1].requires_grad_(False)
    HookState("mlt", model=model, optimizer=[first, third], **options)


def test_a_scaler_with_feedback_needs_the_optimizers() -> None:
    model, scaler = torch.nn.Linear(2, 2), torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError) as raised:
        HookState("mlt", model=model, scaler=scaler, error_feedback=True)
    assert (raised.value.setting, raised.value.value) == ("optimizer", "weight")
    HookState("mlt", model=model, scaler=scaler)
    off = torch.amp.GradScaler("cpu", enabled=False)
    HookState("mlt", model=model, scaler=off, error_feedback=True)


def test_a_parameter_in_two_optimizers_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (model.parameters(), [model.bias])]
    with pytest.raises(ConfigError) as raised:
        HookState("reliable", model=model, optimizer=optimizers)
    assert (raised.value.setting, raised.value.value) == ("optimizer", "bias")


def test_all_optimizers_have_to_suit_what_is_left_to_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def made(*families: type[torch.optim.Optimizer]) -> list[Any]:
        return [kind(each.parameters()) for kind, each in zip(families, model, strict=False)]

    sgd, adam = torch.optim.SGD, torch.optim.Adam
    for families, fill in ((([adam, adam]), "momentum"), ([sgd, adam], "zero"), ([adam], "zero")):
        state = HookState("dblp", model=model, optimizer=made(*families))
        assert state.policy.fill == fill
    assert configure("mlt", {}, {}, made(sgd, sgd))[1].feedback
    assert not configure("mlt", {}, {}, made(sgd, adam))[1].feedback


class Wrapper(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: an Optimizer in name, initialised as nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups


def test_the_optimizer_inside_a_wrapper_decides() -> None:
    model = torch.nn.Linear(2, 2)
    options: dict[str, Any] = {"p": 0.1, "fill": "momentum"}  # Adam's
    adam = Wrapper(Wrapper(torch.optim.AdamW(model.parameters())))
    HookState("mlt", model=model, optimizer=adam, **options)
    sgd = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="optimizer=SGD"):
        HookState("mlt", model=model, optimizer=sgd, **options)


def test_a_wrapper_that_takes_no_hooks_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    wrapper = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(ConfigError, match=r"optimizer=PostLocalSGDOptimizer: .* inside it"):
        HookState("mlt", model=model, optimizer=wrapper)
    HookState("mlt", model=model, optimizer=wrapper.optim)


def test_a_parameter_on_a_device_that_none_can_be_taken_off_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match=r"parameter '1.weight' lies on device meta: .* cpu and"):
        HookState("reliable", model=model)
    model._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]  # type: ignore[assignment]
    HookState("reliable", model=model)  # DDP averages none of those
    del model._ddp_params_and_buffers_to_ignore
    model[1].requires_grad_(False)
    HookState("reliable", model=model)  # it has no gradient


def test_a_complex_parameter_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"parameter '1.weight' has dtype torch.complex64"):
        HookState("reliable", model=model)
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, ["1.weight", "1.bias"])
    HookState("reliable", model=model)  # DDP leaves it alone, and so does gradwire
    ignore(model, [])
    model[1].requires_grad_(False)
    HookState("reliable", model=model)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(kind: type[torch.nn.Module]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), kind(3, 2, sparse=True))
    refusal = rf"parameter '1.weight' of {kind.__name__}\(sparse=True\): dense gradients"
    with pytest.raises(ConfigError, match=refusal):
        HookState("reliable", model=model)
    with pytest.raises(ConfigError, match=r"parameter 'weight' of Emb"):
        HookState("reliable", model=model[1])
    HookState("reliable", model=torch.nn.Sequential(kind(3, 2)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    HookState("reliable", model=model)  # DDP leaves it alone, and so does gradwire
    frozen = torch.nn.Sequential(kind(3, 2, sparse=True), torch.nn.Linear(2, 2))
    frozen[0].requires_grad_(False)
    HookState("reliable", model=frozen)


def test_a_warning_names_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_P", "0.9")
    with pytest.warns(UserWarning, match="GRADWIRE_P=") as caught:
        HookState("adaptive", model=torch.nn.Linear(2, 2))
    monkeypatch.delenv("GRADWIRE_P")
    pipeline = Job(2, {"a.weight": 8}, "mlt").pipelines[0]
    with pytest.warns(RuntimeWarning) as more:
        pipeline.add_loss(math.nan)
    assert [each.filename for each in (*caught, *more)] == [__file__] * 2


def test_a_variable_of_another_policy_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"GRADWIRE_P='0\.9' is not read: policy 'adaptive'"):
        configure(None, {}, {"GRADWIRE_P": "0.9"})
    with pytest.warns(UserWarning, match=r"GRADWIRE_P='0\.9' is not read: policy 'mlt'"):
        configure(MLT(p=0.1), {}, {"GRADWIRE_P": "0.9"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configure("mlt", {}, {"GRADWIRE_P": "0.9"})[0].options()["p"] == 0.9


def test_a_module_is_attached_without_the_settings_of_a_process_group() -> None:
    with pytest.raises(ConfigError) as refused:
        configure("reliable", {"min_bytes": 1000})
    assert refused.value.setting == "min_bytes"
