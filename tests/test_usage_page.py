"""docs/usage.md: the policy that it shows is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradwire.configure import configure
from gradwire.plans import TensorSlot
from gradwire.policies import PlanContext, registry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "usage.md"


def context(step: int) -> PlanContext:
    slot = TensorSlot("layer.weight", 0, 100_000)
    return PlanContext(
        tensors=(slot,),
        elements=slot.length,
        step=step,
        phase="critical",
        world_size=4,
        seed=1,
        chunk_elements=358,
    )


def test_the_policy_of_the_usage_page_goes_by_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8").split("## A policy of your own")[1]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    definition, line = code.split("gradwire.attach(")
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    program = compile(definition, str(PAGE), "exec", dont_inherit=True)  # no future annotations
    exec(program, {"__name__": "usage_page"})
    assert line == 'model, policy="warmup", p=0.05)\n'

    policy, _ = configure("warmup", {"p": 0.05}, environment={"GRADWIRE_STEPS": "3"})

    plans = [policy.plan(context(step)) for step in (0, 2, 3)]
    assert [plan.bound for plan in plans] == [0.0, 0.0, 0.05]
    assert not plans[1].lossy
    assert plans[2].lossy
    assert plans[2].scale == 0.25
