"""Loading states: damaged and foreign ones name what is wrong, and then nothing is changed."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.errors import ConfigError
from gradwire.core.rank_state import of_rank, read_rank
from gradwire.core.saved_state import State
from gradwire.policies.reliable import Reliable
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job
from job_gradients import normal
from own_state import same

TENSORS = {"front.weight": 9000, "front.bias": 50, "back.weight": 600}
POLICIES: dict[str, dict[str, Any]] = {
    "reliable": {},
    "mlt": {"p": 0.3, "error_feedback": True, "loss_rise": 0.5},
    "dblp": {"p_low": 0.2, "error_feedback": True},
    "ltp": {},
    "plot": {"table": {"*": 0.1}},
    "optireduce": {"warmup": 2},
    "netsenseml": {"momentum": 0.5},
    "adaptive": {},
}
BAD = (None, "x", -1.5, math.nan, 1 << 70, {"x": 1}, [None], torch.zeros(2), np.zeros(3))
gradients = functools.partial(normal, sum(TENSORS.values()), world=2)


def job(policy: str, steps: int) -> Job:
    made = Job(2, TENSORS, policy, link=Link(loss=0.1), **POLICIES[policy])
    for step in range(steps):
        for pipeline in made.pipelines:
            pipeline.add_loss(1.0)
        made.step(gradients(step))
    return made


def paths(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(state, (dict, list)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from paths(value, (*path, key))


def put(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    damaged = copy.deepcopy(state)
    at = damaged
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return damaged


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_is_damaged_is_named_and_nothing_is_changed(policy: str) -> None:
    good = job(policy, 7).pipelines[0].state_dict()
    here = job(policy, 3).pipelines[0]
    before = copy.deepcopy(here.state_dict())
    refused = 0
    for path in paths(good):
        missing = copy.deepcopy(good)
        at: Any = missing
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        for damaged in (missing, *(put(good, path, value) for value in BAD)):
            try:
                here.load_state_dict(damaged)
            except ConfigError as error:
                told = str(error)
            else:
                here.load_state_dict(before)  # what is not refused has to work
                continue
            refused += 1
            assert any(repr(key) in told for key in path[-2:]), (path, told)
            assert same(here.state_dict(), before), path
    assert refused > 50
    here.load_state_dict(good)
    assert same(here.state_dict(), good)


@functools.cache
def saved(policy: str) -> Any:
    return job(policy, 7).pipelines[0].state_dict()


@functools.cache
def loading(policy: str) -> Any:
    return job(policy, 3).pipelines[0]


KEYS = st.sampled_from(["epoch", "residuals", "phases", "version", "x", ""]) | st.text(max_size=4)
VALUES = st.sampled_from(BAD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
@settings(max_examples=40)
def test_however_a_state_was_changed_it_is_loaded_or_refused(policy: str, data: Any) -> None:
    """What is refused changes nothing, and what is loaded can be saved and loaded again."""
    here, changed = loading(policy), copy.deepcopy(saved(policy))
    before = copy.deepcopy(here.state_dict())
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(list(paths(changed)) or [("version",)]))
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        match data.draw(st.sampled_from(["value", "gone", "key"])):
            case "value":
                inner[path[-1]] = copy.deepcopy(data.draw(VALUES))  # later ones change it
            case "gone":
                del inner[path[-1]]
            case "key" if isinstance(inner, dict):
                inner[data.draw(KEYS)] = inner.pop(path[-1])
    try:
        here.load_state_dict(changed)
    except ConfigError:
        assert same(here.state_dict(), before)
    else:
        here.load_state_dict(here.state_dict())
        here.load_state_dict(before)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(8999), r"\['front.weight'\] is of 8999 elements, the parameter has 9000"),
        (torch.full((9000,), math.nan), "holds values that are not finite"),
        (torch.zeros(90, 100), r"of shape \(90, 100\)"),
        (torch.zeros(9000, dtype=torch.int32), "type int32"),
        ([0.0] * 9000, "a tensor by a parameter's name is needed"),
    ],
)
def test_a_residual_that_cannot_be_is_refused(values: Any, message: str) -> None:
    here = job("mlt", 3).pipelines[0]
    before = copy.deepcopy(here.state_dict())
    with pytest.raises(ConfigError, match=message):
        here.load_state_dict(put(before, ("residuals", "front.weight"), values))
    assert same(here.state_dict(), before)


@pytest.mark.parametrize(
    ("key", "values"),
    [("residuals", torch.ones(5)), ("ages", torch.tensor([[5, 1]]))],
)
def test_a_parameter_that_the_model_lacks_is_an_error_or_dropped(
    key: str, values: torch.Tensor
) -> None:
    here = job("mlt", 3).pipelines[0]
    before = copy.deepcopy(here.state_dict())
    foreign = put(before, (key, "front.wieght"), values)
    with pytest.raises(ConfigError, match=r"trains no such parameter .*'front.weight'.*strict=Fal"):
        here.load_state_dict(foreign)
    assert same(here.state_dict(), before)
    with pytest.warns(RuntimeWarning, match=r"dropped what is kept of front.wieght"):
        here.load_state_dict(foreign, strict=False)
    assert same(here.state_dict(), before)
    wrong = put(foreign, ("residuals", "front.weight"), torch.ones(5))
    with pytest.raises(ConfigError, match="is of 5 elements"):  # never dropped
        here.load_state_dict(wrong, strict=False)


@dataclass
class Late(Reliable):
    """Takes its state bit by bit, and finds an error in the last one."""

    name: ClassVar[str] = "late"

    def __post_init__(self) -> None:
        self.seen, self.most = [1.0], 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen), "most": self.most}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.extend(state["seen"])
        self.most = 1.0 / state["most"]


def test_a_policy_that_finds_an_error_late_changes_nothing_either() -> None:
    here = Job(2, TENSORS, Late(), error_feedback=True, loss_rise=0.5).pipelines[0]
    here.begin_epoch(2)
    before = copy.deepcopy(here.state_dict())
    other = put(put(before, ("phases", "most"), 0.0), ("epoch",), 7)
    other["residuals"] = {"front.weight": torch.ones(9000)}
    with pytest.raises(ConfigError, match="does not fit policy 'late'") as raised:
        here.load_state_dict(other)
    assert raised.value.setting == "state['phases']"
    assert same(here.state_dict(), before)


def test_velocities_are_not_dropped_silently() -> None:
    kept = job("netsenseml", 3).pipelines[0].state_dict()
    options = {"link": Link(loss=0.1), "momentum": 0.0}
    here = Job(2, TENSORS, "netsenseml", **options).pipelines[0]
    before = copy.deepcopy(here.state_dict())
    with pytest.raises(ConfigError, match=r"state\['velocities'\]: velocities loaded without a mo"):
        here.load_state_dict(kept)
    assert same(here.state_dict(), before)
    here.load_state_dict({**kept, "velocities": {}})


def test_a_scale_beyond_what_gradients_hold_is_refused() -> None:
    here = job("mlt", 1).pipelines[0]
    for scale in (1e160, 1e-160):
        with pytest.raises(
            ConfigError, match=r"state\['grad_scale'\]=1e.*a finite number from 1.4"
        ):
            here.load_state_dict({**here.state_dict(), "grad_scale": scale})


@pytest.mark.parametrize("policy", ["mlt", "netsenseml"])
@pytest.mark.parametrize("now", [1.0, 4.0, 65536.0])
def test_what_is_owed_is_converted_to_the_present_scale(policy: str, now: float) -> None:
    """Residuals, and velocities; magnitudes and norms are kept without any scale."""
    plain, scaled, here = job(policy, 4), job(policy, 0), job(policy, 0)
    for pipeline in scaled.pipelines:
        pipeline.set_grad_scale(65536.0)
    for step in range(4):
        for pipeline in scaled.pipelines:
            pipeline.add_loss(1.0)
        scaled.step([65536.0 * each for each in gradients(step)])
    for old, new in zip(scaled.pipelines, here.pipelines, strict=True):
        new.set_grad_scale(now)
        new.load_state_dict(old.state_dict())
        assert new.grad_scale == now
    assert plain.residual(0).any()
    np.testing.assert_allclose(here.residual(0), now * plain.residual(0), rtol=1e-5)
    np.testing.assert_allclose(here.velocity(0), now * plain.velocity(0), rtol=1e-5)
    owes = [pipeline.state_dict() for pipeline in here.pipelines]
    assert owes[0]["applied_square"] == plain.pipelines[0].state_dict()["applied_square"]


@pytest.mark.parametrize("first", ["scaler", "gradwire"])
def test_a_scalers_state_may_be_loaded_before_or_after(first: str) -> None:
    """Whatever it says at the next step is the scale that all is sent at."""
    old, here = job("mlt", 4), job("mlt", 0)
    expected = sum(old.residual(rank) for rank in range(2)) / 2
    saved = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if first == "scaler":
        scaler.load_state_dict(saved)
    for before, now in zip(old.pipelines, here.pipelines, strict=True):
        now._scaler = scaler
        now.load_state_dict(before.state_dict())
        now.flush()
    scaler.load_state_dict(saved)
    scaler.scale(torch.zeros(1))
    nothing = [np.zeros_like(each) for each in gradients(0)]
    delivered = here.step(nothing)[0] + here.step(nothing)[0]
    assert expected.any()
    np.testing.assert_allclose(delivered, 1024.0 * expected, rtol=1e-5)


def test_another_key_policy_and_version_are_refused() -> None:
    here = job("mlt", 1).pipelines[0]
    state = here.state_dict()
    for path, value, message in (
        (("smell",), "lavender", r"state\['smell'\]: no such key"),
        (("policy",), "dblp", "'dblp'.*loaded into policy 'mlt'"),
        (("version",), 99, "99.*reads versions 1 and 2"),
        (("phases",), {"share": 1}, r"state\['phases'\]\['share'\]: no such key"),
    ):
        with pytest.raises(ConfigError, match=message):
            here.load_state_dict(put(state, path, value))
    for foreign in (None, [], 5, {}):
        with pytest.raises(ConfigError, match="state"):
            here.load_state_dict(foreign)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "reliable": ("reliable", {}),
    "mlt": ("mlt", {"p": 0.3, "error_feedback": True, "loss_rise": 0.5}),
    "mlt-results": ("mlt", {"p": 0.3, "priority": "results"}),
    "dblp-ours": ("dblp", {"p_low": 0.2, "every": 2, "error_feedback": True}),
    "dblp-paper": ("dblp", {"p_low": 0.2, "every": "epoch", "detector": "paper"}),
    "dblp-layers": ("dblp", {"p_low": 0.2, "every": 2, "detector": "layers"}),
    "ltp": ("ltp", {"every": 2}),
    "plot": ("plot", {"table": {"*": 0.1}}),
    "optireduce": ("optireduce", {"warmup": 2}),
    "netsenseml": ("netsenseml", {"momentum": 0.5}),
    "adaptive-layers": ("adaptive", {"every": 2}),
    "adaptive-ours": ("adaptive", {"detector": "ours", "every": 2}),
}
SAVED: dict[str, Any] = torch.load(
    Path(__file__).parent / "states" / "version-1.pt", weights_only=True
)
SMALL = {"front.weight": 900, "front.bias": 50, "back.weight": 600}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("adaptive")])
def test_a_state_of_version_1_is_taken_whole(kind: str) -> None:
    """Each was saved in the 7th step of two workers, as version 1 saved it."""
    policy, options = KINDS[kind]
    here = Job(2, SMALL, policy, buckets=[2, 1], datagram=256, **options)
    saved = SAVED[kind]
    for pipeline in here.pipelines:
        pipeline.load_state_dict(copy.deepcopy(saved))
    again = here.pipelines[0].state_dict()
    assert again["version"] == 2
    assert here.pipelines[0].step == 7
    expected = copy.deepcopy(saved) | {"version": 2}
    detector = expected["phases"].get("phases")
    if detector is not None:
        assert any(key.startswith("_") for key in detector)
        expected["phases"]["phases"] = {key.lstrip("_"): detector[key] for key in detector}
    expected["phases"].pop("calibration", None)  # that older versions found during training
    begun = {"flush": False, "layer_steps": 0, "layer_squares": {}, "guarded": 0, "speaks_for": 1}
    begun["owing"] = False
    assert same(again, {**begun, **expected})
    here.step([np.ones(sum(SMALL.values()), np.float32)] * 2)


@pytest.mark.parametrize("trials", [None, {"current": 1, "untried": [0, 2], "times": {1: [0.1]}}])
def test_a_state_of_adaptives_former_rules_is_refused(trials: object) -> None:
    """It holds what those rules knew, and no promises of encodings."""
    here = Job(2, SMALL, "adaptive", buckets=[2, 1], datagram=256)
    saved = copy.deepcopy(SAVED["adaptive-layers"])
    if trials is not None:
        saved["phases"]["trials"] = trials
    with pytest.raises(ConfigError, match="start the policy anew") as error:
        here.pipelines[0].load_state_dict(saved)
    assert error.value.setting == "state['phases']['trials']"


@pytest.mark.parametrize("kind", KINDS)
def test_the_keys_of_a_state_are_public(kind: str) -> None:
    policy, options = KINDS[kind]
    state = Job(2, SMALL, policy, **options).pipelines[0].state_dict()
    for path in paths(state):
        assert not any(str(key).startswith("_") for key in path), path


@pytest.mark.parametrize("version", [1, 2])
def test_a_calibration_in_an_older_state_is_ignored(version: int) -> None:
    """The table rules, also where the state's bounds are others."""
    old = copy.deepcopy(SAVED["plot"]) | {"version": version}
    assert old["phases"]["calibration"]["bounds"]
    old["phases"]["calibration"]["bounds"] = dict.fromkeys(SMALL, 0.5)
    here = Job(2, SMALL, "plot", buckets=[2, 1], datagram=256, table={"*": 0.1})
    for pipeline in here.pipelines:
        pipeline.load_state_dict(copy.deepcopy(old))
    state = here.pipelines[0].state_dict()
    assert state["phases"] == {}
    here.step([np.ones(sum(SMALL.values()), np.float32)] * 2)
    assert here.report.step == 7
    assert here.report.bound == 0.1


def test_numbers_come_back_from_tensors_and_numpy() -> None:
    here = job("dblp", 3).pipelines[0]
    state = here.state_dict()
    here.load_state_dict(
        put(put(state, ("step",), np.int64(7)), ("grad_scale",), torch.tensor(2.0))
    )
    assert here.step == 7


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ConfigError) as raised:
        State({"a": "x" * 10_000}).whole("a")
    assert len(str(raised.value)) < 200


def test_a_magnitude_is_not_negative_but_may_be_of_what_is_not_finite() -> None:
    state = State({"square": -1.0, "large": math.inf, "unknown": math.nan, "none": 0})
    assert [state.magnitude(key) for key in ("large", "none")] == [math.inf, 0.0]
    assert math.isnan(state.magnitude("unknown"))
    with pytest.raises(ConfigError, match=r"state\['square'\]=-1\.0: a number from 0 on is needed"):
        state.magnitude("square")


def test_each_rank_finds_its_own_state_among_several() -> None:
    saved = {**of_rank({"step": 3}, 0, 2), **of_rank({"step": 4}, 1, 2)}
    assert read_rank(saved, 1, 2) == ({"step": 4}, None)
    assert read_rank(saved, 2, 3) == ({"step": 3}, "rank 0 of 2")
    bare = {"version": 2, "step": 5}  # as saved before states were of a rank
    assert read_rank(bare, 1, 2) == (bare, None)


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"ranks": "two"}, "state['ranks']"),
        ({"ranks": 0}, "state['ranks']"),
        ({"rank 0 of 2": {"step": 3}}, "state['rank 0 of 2']"),
        ({"rank 0 of 2": ()}, "state['rank 0 of 2']"),
        ({"step": 3}, "state['step']"),
        ({"ranks": 4}, "state"),  # what a load in part leaves as it was
    ],
)
def test_a_state_of_a_rank_that_is_damaged_is_refused(
    change: dict[str, object], setting: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_rank({**of_rank({"step": 3}, 0, 2), **change}, 0, 2)
    assert raised.value.setting == setting
