"""Tensors are called alike with and without compilation and activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

import gradwire
from gradwire.core.names import named_parameters
from gradwire.policies import Calibration
from gradwire.training.bucket import ParameterNames


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.ReLU(), nn.Linear(5, 4))
    return nn.Sequential(nn.Linear(6, 5), inner, nn.Linear(4, 3))


def compiled(model: nn.Module) -> nn.Module:
    made: nn.Module = torch.compile(model, backend="eager")
    return made


def compiled_twice(model: nn.Module) -> nn.Module:
    inner = compiled(model)
    assert isinstance(inner, OptimizedModule)
    return OptimizedModule(inner, inner.dynamo_ctx)


def compiled_parts(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(*map(compiled, model))


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(*map(checkpoint_wrapper, model))


def all_of_it(model: nn.Module) -> nn.Module:
    return compiled(checkpoint_wrapper(compiled_parts(checkpointed(model))))


WAYS = (
    compiled,
    compiled_twice,
    compiled_parts,
    compiled_in_place,
    checkpointed,
    offload_wrapper,
    all_of_it,
)


@pytest.mark.parametrize("wrap", WAYS)
def test_wrappers_add_nothing_to_the_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = plain()
    expected = dict(model.named_parameters())
    wrapped = wrap(model)
    assert list(named_parameters(wrapped).items()) == list(expected.items())
    names = ParameterNames(wrapped)
    assert [names(parameter) for parameter in expected.values()] == list(expected)
    assert names.trained == {name: p.numel() for name, p in expected.items()}


@pytest.mark.parametrize("wrap", WAYS)
def test_a_table_fits_the_wrapped_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    table = {"0.*": 0.1, "1.1.weight": 0.2, "*": 0.0}
    gradwire.HookState("plot", model=wrap(plain()), table=table)
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.HookState("plot", model=wrap(plain()), table={**table, "9.weight": 0.1})
    assert refused.value.setting == "table['9.weight']"


@pytest.mark.parametrize("wrap", [compiled, checkpointed])
def test_a_calibration_fits_the_wrapped_model(
    wrap: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch).square().mean()
        return out

    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    found = [
        gradwire.calibrate(model, loss, batches, steps=2) for model in (plain(), wrap(plain()))
    ]
    assert isinstance(found[0], Calibration)
    assert found[0] == found[1]


def test_a_tensor_at_fault_is_called_as_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(4, 2, sparse=True))
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.HookState("reliable", model=compiled_parts(model))
    assert refused.value.setting == "1.weight"
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.HookState("reliable", model=compiled(nn.Linear(3, 3, dtype=torch.complex64)))
    assert refused.value.setting == "weight"


def test_a_part_that_is_called_as_wrappers_call_theirs_keeps_its_name() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    model._orig_mod = nn.Linear(2, 2, bias=False)
    assert list(named_parameters(model)) == ["weight", "_orig_mod.weight"]


def test_wrappers_of_ones_own_keep_their_part_of_the_name() -> None:
    """Nobody can tell them from a part of the model."""
    outer = nn.Module()
    outer.module = plain()
    assert next(iter(named_parameters(outer))) == "module.0.weight"
