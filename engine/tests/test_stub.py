"""_engine.pyi says of the compiled module what is true: names, argument names, defaults."""

import ast
import re
from pathlib import Path

import pytest

import gradwire
from gradwire import _engine

STUB = ast.parse(
    Path(gradwire.__file__).with_name("_engine.pyi").read_text(encoding="utf-8"), "_engine.pyi"
)
CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]
FUNCTIONS = [(_engine, node) for node in STUB.body if isinstance(node, ast.FunctionDef)] + [
    (getattr(_engine, owner.name), node)
    for owner in CLASSES
    for node in owner.body
    if isinstance(node, ast.FunctionDef) and not node.decorator_list
]


def test_the_module_has_what_the_stub_promises_and_nothing_else() -> None:
    promised = {
        node.name for node in STUB.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    promised |= {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert {name for name in vars(_engine) if not name.startswith("_")} == promised


@pytest.mark.parametrize("owner", CLASSES, ids=lambda node: node.name)
def test_classes_have_the_members_of_the_stub(owner: ast.ClassDef) -> None:
    promised = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    promised |= {node.target.id for node in owner.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    actual = {name for name in vars(getattr(_engine, owner.name)) if not name.startswith("_")}
    assert actual == promised - {"__init__"}


@pytest.mark.parametrize(("owner", "stub"), FUNCTIONS, ids=lambda node: getattr(node, "name", ""))
def test_arguments_and_defaults_are_those_of_the_stub(owner: object, stub: ast.FunctionDef) -> None:
    signature = getattr(owner, stub.name).__nb_signature__[0][0]
    # Arrays are described in a notation that is no Python.
    plain = re.sub(r"(numpy\.)?ndarray\[[^]]*\]", "ndarray", signature.replace("\\", ""))
    actual = ast.parse(plain + ": ...").body[0]
    assert isinstance(actual, ast.FunctionDef)

    def names(node: ast.FunctionDef, kind: str) -> list[str]:
        return [argument.arg for argument in getattr(node.args, kind)]

    assert names(actual, "args") == names(stub, "args")
    assert names(actual, "kwonlyargs") == names(stub, "kwonlyargs")
    for kind in ("defaults", "kw_defaults"):
        told = [default is not None for default in getattr(stub.args, kind)]
        assert [default is not None for default in getattr(actual.args, kind)] == told
