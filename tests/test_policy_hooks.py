"""What the faces read of any policy, one of a user's own included, and what policies are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan
from gradwire.policies import Adaptive, NetSenseML, PlanContext, Policy, create, names, pool
from gradwire.policies.base import FeedbackNeed
from gradwire.sim.job import Job
from gradwire.training.configure import configure
from gradwire.training.hook import HookState

TENSORS = {"a.weight": 4 * 358, "a.bias": 30}
ELEMENTS = sum(TENSORS.values())
NEEDED: dict[str, dict[str, Any]] = {"plot": {"table": {"*": 0.1}}}


@dataclass
class Own(Policy):
    """A policy of a user's own, which its name alone would not tell gradwire anything about."""

    name: ClassVar[str] = "own"
    every: int | str = 5  # type: ignore[assignment]
    codebook: str = "none"
    seen: Any = None

    def plan(self, context: PlanContext) -> TransferPlan:
        regions = pool(context.tensors, 0.1, context.chunk_elements)
        return context.plan(regions, pull="exact", spend="lost", order="shuffled")

    def fit(self, tensors: Mapping[str, int] | None) -> None:
        self.seen = (tensors, self.vectors, self.servers)

    def needs_feedback(self) -> FeedbackNeed | None:
        if self.codebook == "none":
            return super().needs_feedback()
        return FeedbackNeed("codebook", self.codebook, "it leaves most out", "codebook='none'")


@pytest.mark.parametrize("name", ["dblp", "ltp", "adaptive"])
def test_an_option_every_says_whether_a_policy_awaits_epochs(name: str) -> None:
    assert create(name, every="epoch").awaits_epochs
    assert not create(name, every=7).awaits_epochs
    assert not create("mlt").awaits_epochs


def test_a_policy_of_ones_own_that_awaits_epochs_warns_where_none_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire.policies.base.PATIENCE", 2)
    job = Job(1, TENSORS, Own(every="epoch"))
    job.step([np.ones(ELEMENTS, np.float32)])
    with pytest.warns(RuntimeWarning, match="policy 'own' with every='epoch': 2 steps have passed"):
        job.step([np.ones(ELEMENTS, np.float32)])


@pytest.mark.parametrize(
    ("policy", "setting", "allowed"),
    [
        (Own(codebook="small"), "codebook", "it leaves most out; set error_feedback=True, or"),
        (NetSenseML(), "compress", "top-k leaves most elements out .* or compress='int8'"),
        (Adaptive(compress="topk"), "compress", "top-k .* or compress='auto' or 'never'"),
        (NetSenseML(compress="int8", momentum=0.9), "momentum", "velocities .* or momentum=0"),
    ],
)
def test_what_needs_feedback_is_refused_without(policy: Policy, setting: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed) as raised:
        configure(policy, {"error_feedback": False}, {})
    assert raised.value.setting == setting
    assert raised.value.value == getattr(policy, setting)
    configure(policy, {"error_feedback": True}, {})


@pytest.mark.parametrize("name", [name for name in names() if name != "netsenseml"])
def test_by_default_no_policy_needs_feedback(name: str) -> None:
    assert create(name, **NEEDED.get(name, {})).needs_feedback() is None


def test_a_policy_is_given_the_model_and_the_servers_before_its_first_plan() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    vectors = frozenset({"0.bias", "1.weight", "1.bias"})
    sizes = {"0.weight": 15, "0.bias": 5, "1.weight": 5, "1.bias": 5}
    job = Job(2, model, Own(), servers=1)
    assert [policy.seen for policy in job.policies] == [(sizes, vectors, 1)] * 2  # type: ignore[attr-defined]
    state = HookState(Own(), model=model, route="server", servers=2)
    assert state.policy.seen == (sizes, vectors, 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "bound"),
    [
        ("mlt", {"p": 0.2}, 0.2),
        ("dblp", {"p_low": 0.1}, 0.5),
        ("dblp", {"p_low": 0.1, "p_high": 0.3}, 0.3),
        ("dblp", {"p_low": {"*": 0.1}}, 0.0),
        ("dblp", {"p_low": {"*": 0.1}, "p_high": 0.3}, 0.3),
        ("ltp", {}, 0.0),
        ("plot", {"table": {"*": 0.1}}, 0.0),
        ("reliable", {}, 0.0),
    ],
)
def test_the_loosest_bound_is_that_of_tolerant_phases(
    name: str, options: dict[str, Any], bound: float
) -> None:
    assert create(name, **options).loosest_bound == bound


def keys(state: object) -> Iterator[str]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            if isinstance(key, str):
                yield key
            yield from keys(value)


@pytest.mark.parametrize("name", names())
def test_saved_states_name_no_private_attribute(name: str) -> None:
    options = {"detector": "layers", "every": 1} if name in ("dblp", "adaptive") else {}
    job = Job(2, TENSORS, name, loss_rise=0.5, max_age=3, **options, **NEEDED.get(name, {}))
    for step in range(3):
        chance = np.random.default_rng(step)
        job.pipelines[0].add_loss(1.0)
        job.step([chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(2)])
    found = set(keys(job.pipelines[0].state_dict()))
    assert {"version", "policy", "phases"} <= found
    assert not {key for key in found if key.startswith("_")}
