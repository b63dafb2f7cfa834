"""The guides: the policy that they show is one, and their recipes are Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gradwire.policies import registry
from gradwire.training.configure import configure
from plan_contexts import context

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"


def snippets(page: str, title: str = "") -> list[str]:
    text = (GUIDES / page).read_text(encoding="utf-8")
    if title:
        text = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_policy_of_the_guide_goes_by_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = snippets("choosing-a-policy.md", "A policy of your own")
    definition, line = code.split("gradwire.attach(")
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    program = compile(definition, "choosing-a-policy.md", "exec", dont_inherit=True)
    exec(program, {"__name__": "choosing_a_policy"})  # without future annotations
    assert line == 'model, policy="warmup", p=0.05)\n'

    policy, _ = configure("warmup", {"p": 0.05}, environment={"GRADWIRE_STEPS": "3"})

    plans = [policy.plan(context({"layer.weight": 100_000}, step=step)) for step in (0, 2, 3)]
    assert [plan.bound for plan in plans] == [0.0, 0.0, 0.05]
    assert not plans[1].lossy
    assert plans[2].lossy
    assert plans[2].scale == 0.25


def test_the_recipes_for_frameworks_attach_and_detach() -> None:
    (bare,) = snippets("launchers.md")
    for page in ("ray-train.md", "accelerate.md"):
        recipe = snippets(page)[0]
        calls = [
            node.func.attr
            for node in ast.walk(ast.parse(recipe))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        assert calls.count("attach") == calls.count("detach") == 1
    assert "gradwire.comm_hook" in bare
    ast.parse(bare)


def test_the_calls_of_attach_on_the_guide_of_policies_are_possible() -> None:
    (code,) = [text for text in snippets("choosing-a-policy.md") if "# adaptive" in text]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            given = {
                word.arg: ast.literal_eval(word.value)
                for word in node.keywords
                if word.arg is not None and word.arg != "optimizer"
            }
            configure(given.pop("policy", None), given, environment={})
