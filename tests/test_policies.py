"""The policies: the plans they write, their options, and their names."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire.core.errors import ConfigError
from gradwire.core.plan import CloseStep, TransferPlan, mix_seed
from gradwire.core.regions import Region, TensorSlot
from gradwire.policies import (
    DBLP,
    LTP,
    MLT,
    PLOT,
    PlanContext,
    Policy,
    Reliable,
    create,
    names,
    policy_class,
    pool,
    register,
)
from gradwire.policies.base import option_names

CHUNK = 358


def slots(*lengths: int) -> tuple[TensorSlot, ...]:
    placed, at = [], 0
    for index, length in enumerate(lengths):
        placed.append(TensorSlot(f"layer{index // 2}.tensor{index}", at, length))
        at += length
    return tuple(placed)


def context(*lengths: int, phase: str = "critical", world_size: int = 4) -> PlanContext:
    tensors = slots(*lengths)
    return PlanContext(
        tensors=tensors,
        elements=sum(lengths),
        step=7,
        phase=phase,  # type: ignore[arg-type]
        world_size=world_size,
        seed=mix_seed(0, 7, 0),
        chunk_elements=CHUNK,
    )


def test_reliable_leaves_nothing_out() -> None:
    plan = Reliable().plan(context(1000, 10))
    assert not plan.lossy
    assert plan.spend == "nothing"
    assert plan.scale == 0.25
    assert [r.bound for r in plan.regions] == [0.0]


def test_mlt_binds_each_tensor_by_one_bound() -> None:
    big = 200 * CHUNK
    plan = MLT(p=0.01).plan(context(big, big))
    assert [(r.length, r.bound) for r in plan.regions] == [(big, 0.01), (big, 0.01)]
    assert (plan.spend, plan.fill, plan.order, plan.pull) == (
        "anything",
        "zero",
        "shuffled",
        "exact",
    )
    assert plan.lossy
    assert plan.schedule == (CloseStep(),)


def test_dblp_follows_the_phase_on_one_grid() -> None:
    policy = DBLP(p_low=0.01)
    assert policy.phase == "critical"
    strict = policy.plan(context(200 * CHUNK, 7, 30_000))
    loose = policy.plan(context(200 * CHUNK, 7, 30_000, phase="tolerant"))
    assert {r.bound for r in strict.regions} == {0.01}
    assert {r.bound for r in loose.regions} == {0.41}
    assert [(r.offset, r.length) for r in strict.regions] == [
        (r.offset, r.length) for r in loose.regions
    ]


def test_a_committed_pull_may_leave_out_what_the_bound_allows() -> None:
    assert DBLP(pull="committed").plan(context(9999)).pull_bound == 0.008
    assert MLT(pull="committed", p=0.1).plan(context(9999)).pull_bound == 0.1
    assert MLT(p=0.1).plan(context(9999)).pull_bound == 0.0


def test_a_tensor_that_may_lose_nothing_leaves_the_others_pulls_their_bound() -> None:
    """The engine withholds nothing of a region without a bound anyway."""
    plot = PLOT(table={"layer0.*": 0.0, "layer1.*": 0.1, "*": 0.3}, pull="committed")
    assert plot.plan(context(9 * CHUNK, 9 * CHUNK, 9 * CHUNK)).pull_bound == 0.1
    assert plot.plan(context(9 * CHUNK)).pull_bound == 0.0
    dblp = DBLP(p_low={"layer0.*": 0.0, "*": 0.3}, pull="lossy")
    assert dblp.plan(context(9 * CHUNK, 9 * CHUNK, 9 * CHUNK)).pull_bound == 0.3


@pytest.mark.parametrize("policy", [MLT, DBLP])
def test_control_says_order_and_pull_unless_they_are_given(policy: type[MLT] | type[DBLP]) -> None:
    def answers(**options: str) -> tuple[str, str, str, str]:
        plan = policy(**options).plan(context(99_999))
        return plan.control, plan.order, plan.pull, plan.schedule[0].scope

    meant = "priority" if policy is DBLP else "shuffled"
    assert answers() == ("stream", meant, "exact", "all")
    assert answers(control="probe") == ("probe", "sequential", "lossy", "worker")
    assert answers(control="probe", order="shuffled", pull="exact") == (
        "probe",
        "shuffled",
        "exact",
        "worker",
    )
    assert answers(pull="lossy") == ("stream", "shuffled", "lossy", "all")
    assert policy(control="probe").options()["pull"] == "lossy"  # what the ranks compare
    assert policy(order="shuffled").options() == policy(priority="none").options()


def test_a_lossy_pull_may_leave_out_what_the_strictest_bound_above_0_allows() -> None:
    big = 200 * CHUNK
    plan = DBLP(p_low={"layer0.*": 0.0, "*": 0.1}, pull="lossy").plan(context(big, big, big))
    assert [region.bound for region in plan.regions] == [0.0, 0.1]
    assert plan.pull_bound == 0.1
    assert MLT(p=0.0, pull="lossy").plan(context(big)).pull_bound == 0.0


def test_an_exact_step_keeps_the_grid() -> None:
    plan = MLT(p=0.1, pull="committed", fill="mean").plan(context(99_999, 5, 99_999))
    exact = plan.exact()
    assert not exact.lossy
    assert (exact.spend, exact.pull, exact.fill) == ("nothing", "exact", "zero")
    assert replace(plan, encoding="topk", kept=0.1).exact() == exact
    assert replace(plan, control="probe", pull="lossy").exact() == exact
    assert [(r.offset, r.length) for r in exact.regions] == [
        (r.offset, r.length) for r in plan.regions
    ]


def test_plans_are_pure_functions_of_their_context() -> None:
    here = context(50_000, 60_000, phase="tolerant")
    needed: dict[str, dict[str, object]] = {"plot": {"table": {"*": 0.1}}}
    for name in names():
        options = needed.get(name, {})
        assert create(name, **options).plan(here) == create(name, **options).plan(replace(here))


@pytest.mark.parametrize(
    ("build", "fault", "allowed"),
    [
        (lambda: MLT(p=1.0), "p=1.0", "a bound is a number in [0, 1)"),
        (lambda: MLT(p=-0.1), "p=-0.1", ""),
        (lambda: MLT(p=float("nan")), "p=nan", ""),
        (lambda: MLT(p="0.1"), "p='0.1'", ""),
        (lambda: DBLP(p_low=0.7), "p_low=0.7", ""),
        (lambda: DBLP(p_low=0.5, p_high=0.1), "p_high=0.1", ""),
        (lambda: DBLP(p_high=1.5), "p_high=1.5", ""),
        (lambda: DBLP(eta=0), "eta=0", ""),
        (lambda: DBLP(every=0), "every=0", ""),
        (lambda: DBLP(every="week"), "every='week'", ""),
        (lambda: DBLP(detector="theirs"), "detector='theirs'", "allowed are 'ours', 'paper'"),
        (lambda: MLT(fill="ones"), "fill='ones'", "allowed are 'zero', 'mean', 'momentum'"),
        (lambda: MLT(order="random"), "order='random'", ""),
        (lambda: MLT(spend="all"), "spend='all'", ""),
        (lambda: MLT(pull="none"), "pull='none'", "allowed are 'exact', 'committed', 'lossy'"),
        (lambda: MLT(control="ask"), "control='ask'", "allowed are 'stream', 'probe'"),
        (lambda: DBLP(control="probe", spend="lost"), "spend='lost'", ""),
        (lambda: LTP(pull="lossy"), "pull='lossy'", "allowed are 'exact', 'committed'"),
        (lambda: create("dlbp"), "policy='dlbp'", "allowed are 'reliable', 'mlt', 'dblp', 'ltp'"),
        (lambda: create("mlt", p_low=0.1), "p_low=0.1", ""),
        (lambda: create("reliable", p=0.1), "p=0.1", "its options are none"),
    ],
)
def test_impossible_options_name_themselves(
    build: Callable[[], object], fault: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        build()
    assert f"{raised.value.setting}={raised.value.value!r}" == fault
    assert allowed in raised.value.allowed


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DBLP(p_low=0.7), "p_low=0.7 without p_high"),
        (lambda: DBLP(p_low=0.5, p_high=0.1), "p_high=0.1 is below p_low=0.5"),
        (lambda: DBLP(control="probe", spend="lost"), "spend='lost' with control='probe'"),
        (lambda: create("mlt", p_low=0.1), "p_low=0.1 is no option of policy 'mlt'"),
    ],
)
def test_options_that_do_not_go_together_name_each_other(
    build: Callable[[], object], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        build()
    assert words in str(raised.value)


NEEDED: dict[str, dict[str, object]] = {"plot": {"table": {"*": 0.1}}}
HOSTILE = (
    *(None, True, "", "x", b"x", object(), (), [], {}, [1], {"a": 1}, {1: 0.1}, {"*": "x"}),
    *(-1, 0, 1, 2, 0.5, -0.1, 1e308, -1e308, 10**400, 1 << 64, math.nan, math.inf, -math.inf),
    *(1e-310, 5e-324, 1e-9, 1 - 1e-16, {"*": 1e-310}, {"*": 1e-9}, "a\0b"),
    *(
        np.nan,
        np.arange(3),
        np.zeros((2, 2)),
        torch.zeros(3),
        torch.tensor(math.nan),
        1j,
        Path("x"),
    ),
)


@pytest.mark.parametrize("name", names())
def test_any_value_of_an_option_is_taken_or_named(name: str) -> None:
    """What is not refused has to plan and to be told to the other ranks."""
    for option in option_names(policy_class(name)):
        for value in HOSTILE:
            wrong = ""
            try:
                policy = create(name, **{**NEEDED.get(name, {}), option: value})
            except ConfigError as error:
                wrong = str(error)
            if wrong:
                assert option in wrong, (option, value)
                continue
            assert not (isinstance(value, float) and not math.isfinite(value)), (option, value)
            json.dumps(policy.options(), allow_nan=False)
            with contextlib.suppress(ConfigError):  # patterns that match nothing
                policy.prepare({slot.name: slot.length for slot in context(99_999, 9).tensors})
                for phase in ("critical", "tolerant"):
                    plans(policy, phase, (option, value))


def plans(policy: Policy, phase: str, what: object) -> None:
    """What is impossible has to be an error before the first plan."""
    try:
        policy.plan(context(99_999, 9, phase=phase))
    except Exception as error:
        raise AssertionError(what) from error


def test_the_scalars_of_numpy_and_torch_are_numbers() -> None:
    policy = DBLP(p_low={"*": np.float32(0.25)}, eta=torch.tensor(0.5), every=np.int64(7))  # type: ignore[dict-item, arg-type]
    assert policy.options() == DBLP(p_low={"*": 0.25}, eta=0.5, every=7).options()
    assert MLT(p=np.array(0.5), class_dscp=[np.uint8(8)], priority="layer").options() == (
        MLT(p=0.5, class_dscp=(8,), priority="layer").options()
    )


def test_a_name_is_taken_once() -> None:
    class Other(Policy):
        name = "mlt"

        def plan(self, context: PlanContext) -> TransferPlan:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="MLT has it"):
        register(Other)


def test_no_option_has_the_name_of_an_argument_of_attach() -> None:
    taken = {
        name: parameter.kind
        for call in (gradwire.attach, gradwire.HookState)
        for name, parameter in inspect.signature(call).parameters.items()
    }
    assert "replicas" in taken
    for name, kind in taken.items():
        if kind is inspect.Parameter.VAR_KEYWORD:
            continue
        own = dataclasses.make_dataclass(
            "Own", [(name, float, 1.0)], bases=(Policy,), namespace={"name": "own"}
        )
        with pytest.raises(ConfigError) as error:
            register(own)
        assert error.value.setting == "policy"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("seed", "option 'seed' would never be set"),
        ("floor", "option 'floor' would never be set"),
        ("optimizer", "option 'optimizer' would never be set"),
        ("name", "option 'name' hides Policy.name"),
        ("phases", "option 'phases' hides Policy.phases"),
        ("congested", "option 'congested' hides Policy.congested, which"),
    ],
)
def test_an_option_that_would_be_taken_for_another_is_refused(option: str, message: str) -> None:
    def plan(self: Policy, context: PlanContext) -> TransferPlan:
        raise NotImplementedError

    members = {"plan": plan, "name": "own", "fill": "zero"}
    own = dataclasses.make_dataclass(
        "Own", [(option, float, 1.0), ("fill", str, "zero")], bases=(Policy,), namespace=members
    )
    with pytest.raises(ConfigError, match=message):
        register(own)
    assert "own" not in names()


# ---------------------------------------------------------------------------- pooling


@given(
    lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
    bound=st.sampled_from([0.008, 0.024, 0.1, 0.408, 0.9]),
)
def test_pools_cover_the_bucket_and_are_large_enough(lengths: list[int], bound: float) -> None:
    regions = pool(slots(*lengths), bound, CHUNK)
    at = 0
    for region in regions:
        assert region.offset == at
        at += region.length
    assert at == sum(lengths)
    if len(regions) > 1:  # nothing was left too small for its bound to buy a chunk
        assert all(region.length // CHUNK * bound >= 1 - 1e-6 for region in regions)


def test_small_tensors_pool_within_their_layer_first() -> None:
    enough = 13 * CHUNK
    tensors = (
        TensorSlot("a.weight", 0, enough),
        TensorSlot("a.bias", enough, 10),
        TensorSlot("b.bias", enough + 10, 10),
        TensorSlot("b.weight", enough + 20, enough),
    )
    assert [region.name for region in pool(tensors, 0.1, CHUNK)] == [
        "a.weight … a.bias",
        "b.bias … b.weight",
    ]


def test_exact_regions_are_not_pooled() -> None:
    assert len(pool(slots(1, 2, 3), 0.0, CHUNK)) == 3


# ---------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"elements": 0, "regions": ()}, "plan elements=0"),
        ({"regions": (Region(0, 5, 0.0), Region(6, 4, 0.0))}, "without gaps"),
        ({"regions": (Region(0, 9, 0.0),)}, "plan regions cover 9 elements: must be all 10"),
        ({"regions": (Region(0, 10, 1.0, "w"),)}, "bound of region 'w'=1.0"),
        ({"pull_bound": 0.1}, "pull_bound=0.1 with pull='exact'"),
        ({"control": "push"}, "control='push': allowed are 'stream', 'probe'"),
        ({"control": "probe", "spend": "lost"}, "spend='lost' with control='probe'"),
        ({"schedule": ()}, "schedule=()"),
        ({"scale": float("inf")}, "scale=inf"),
        ({"seed": -1}, "seed=-1"),
        (
            {"encoding": "f8"},
            "encoding='f8': allowed are 'f32', 'f16', 'bf16', 'int8', 'topk', 'half'",
        ),
        ({"encoding": "topk", "kept": 0}, "kept=0: the share of elements kept is a number in (0,"),
        ({"encoding": "topk", "kept": "all"}, "kept='all'"),
        ({"class_dscp": (40,)}, "class_dscp=(40,) with order='sequential': only order='priority'"),
        ({"order": "priority", "class_dscp": (64,)}, "class_dscp=(64,): a DSCP is a whole number"),
        ({"order": "priority", "class_dscp": (0,) * 9}, "a tuple of up to 8 DSCPs"),
        ({"order": "random"}, "order='random': allowed are 'shuffled', 'sequential', 'priority'"),
        ({"encoding": "f16", "kept": 0.5}, "kept=0.5 with encoding='f16': only encoding='topk'"),
    ],
)
def test_impossible_plans_name_the_field(fields: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"elements": 10, "regions": (Region(0, 10, 0.0),)}
    with pytest.raises(ConfigError) as raised:
        TransferPlan(**{**good, **fields})  # type: ignore[arg-type]
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"clock": "noon"}, "schedule clock='noon'"),
        ({"scope": "some"}, "schedule scope='some'"),
        ({"delay_s": -1.0}, "schedule delay=-1.0"),
        ({"fraction": 1.5}, "schedule fraction=1.5"),
    ],
)
def test_impossible_schedules_name_the_field(step: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CloseStep(**step)  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_seeds_are_spread_and_fixed() -> None:
    seeds = {mix_seed(0, step, bucket) for step in range(100) for bucket in range(10)}
    assert len(seeds) == 1000
    assert mix_seed(1, 2, 3) == mix_seed(1, 2, 3)
    assert all(0 <= seed < 1 << 64 for seed in seeds)


# ---------------------------------------------------------------------------- replacing options

OTHER_VALUES: dict[str, list[dict[str, object]]] = {
    "mlt": [
        {"control": "probe"},
        {"control": "stream", "pull": "committed"},
        {"priority": "layer", "class_dscp": True},
        {"priority": "layer"},
        {"p": 0.5},
    ],
    "dblp": [
        {"control": "probe"},
        {"p_low": {"*": 0.2}},
        {"p_low": 0.3},
        {"p_high": 0.9},
        {"every": "epoch", "detector": "layers"},
    ],
    "ltp": [{"every": 5}, {"slack": "wan"}, {"fraction": 0.5}],
    "plot": [{"table": {"*": 0.3}}, {"order": "sequential"}, {"spend": "anything"}],
    "optireduce": [{"warmup": 3}, {"excess": 0.5}, {"hadamard": False}],
    "netsenseml": [{"start": 1.0}, {"start": 0.25}, {"compress": "int8"}, {"prune": 0.5}],
    "adaptive": [{"table": {"*": 0.3}}, {"compress": "topk"}, {"detector": "ours"}, {"p_low": 0}],
    "reliable": [],
}


@pytest.mark.parametrize("name", names())
def test_a_replaced_option_leaves_nothing_behind(name: str) -> None:
    """dataclasses.replace gives what the same options give from the start."""
    needed = NEEDED.get(name, {})
    here = context(99_999, 50_000, phase="tolerant")
    model = {slot.name: slot.length for slot in here.tensors}
    for first in OTHER_VALUES[name]:
        for second in OTHER_VALUES[name]:
            try:
                direct = create(name, **{**needed, **first, **second})
            except ConfigError:
                continue
            replaced = replace(create(name, **{**needed, **first}), **second)  # type: ignore[type-var]
            assert replaced == direct
            assert replaced.options() == direct.options()
            for policy in (replaced, direct):
                policy.prepare(model)
            assert replaced.plan(here) == direct.plan(here)
            assert replaced.floor == direct.floor


def test_another_control_brings_its_own_order_and_pull() -> None:
    for policy in (MLT(), DBLP()):
        probing = replace(policy, control="probe").plan(context(99_999))
        assert (probing.order, probing.pull) == ("sequential", "lossy")
        policy.control = "probe"
        assert policy.plan(context(99_999)).pull == "lossy"
    assert replace(MLT(control="probe"), control="stream").plan(context(99_999)).pull == "exact"
