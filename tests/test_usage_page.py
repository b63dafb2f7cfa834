"""docs/usage.md: the policy that it shows is one, and its recipes are Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gradwire.core.plan import TensorSlot
from gradwire.policies import PlanContext, registry
from gradwire.training.configure import configure

PAGE = Path(__file__).resolve().parent.parent / "docs" / "usage.md"


def section(title: str) -> str:
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1]
    return text.split("\n## ")[0]


def snippets(title: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", section(title), re.DOTALL)


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
    (code,) = snippets("A policy of your own")
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


def test_the_recipes_for_frameworks_attach_and_detach() -> None:
    *recipes, bare = snippets("Frameworks")
    assert len(recipes) == 4
    for recipe in recipes:
        calls = [
            node.func.attr
            for node in ast.walk(ast.parse(recipe))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        assert calls.count("attach") == calls.count("detach") == 1
    assert "gradwire.comm_hook" in bare
    ast.parse(bare)
