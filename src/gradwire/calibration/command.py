"""Calibration: which layers bear how much loss, measured on the user's own model.

For each layer the largest p whose random zeroing worsens the step's loss decrease by less than
`eps` over k calibration steps (`gradwire.calibration.search`): our reading of PLOT. Here it is a
run of its own.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import typer

from gradwire.calibration.search import LayerSearch, LossFunction
from gradwire.core.checks import is_whole, plain
from gradwire.core.errors import ConfigError
from gradwire.core.names import named_parameters
from gradwire.policies.plot import EPS, LR, Calibration, check_eps, check_lr

__all__ = ["calibrate"]

app = typer.Typer(add_completion=False)

LARGEST = 1 << 62


def calibrate(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    eps: float = EPS,
    steps: int = 8,
    lr: float = LR,
    chunk_elements: int = 361,
    seed: int = 0,
) -> Calibration:
    """Finds a bound per layer; the model is left as it was.

    loss_fn(model, batch) is the training loss, a scalar tensor. batches: at least `steps` of
    them. eps: the share of a step's loss decrease that a layer's loss may cost. lr: of the plain
    gradient steps the decrease is measured by. chunk_elements: elements of a datagram.

    Takes about 3 · steps · (layers + 2) evaluations of loss_fn. Raises ConfigError when a setting
    is impossible, batches are too few, or no calibration step decreases the loss.
    """
    eps, lr = check_eps(eps), check_lr(lr)
    steps = _whole("steps", steps, 1)
    chunk_elements = _whole("chunk_elements", chunk_elements, 1)
    seed = _whole("seed", seed, 0)
    _check_subject(model, loss_fn, batches)
    few = list(itertools.islice(batches, steps))
    if len(few) < steps:
        raise ConfigError.about(
            f"steps={steps}", f"only {len(few)} batches were given", setting="steps", value=steps
        )
    trained = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    search = LayerSearch(trained, eps=eps, lr=lr, chunk_elements=chunk_elements)
    chance = torch.Generator().manual_seed(seed)
    while not search.done:
        for index, batch in enumerate(few):
            search.weigh(model, loss_fn, batch, seed=seed + index, chance=chance)
        search.settle()
    sizes = {name: p.numel() for name, p in trained.items()}
    settings = {"eps": eps, "steps": steps, "lr": lr, "chunk_elements": chunk_elements}
    return Calibration(Calibration.fingerprint(sizes), search.bounds, settings)


# ---------------------------------------------------------------------------- the command


@app.command()
def command(
    function: str = typer.Argument(
        ..., help="module:function that returns (model, loss_fn, batches)."
    ),
    out: str = typer.Option("bounds.toml", "--out", help="File to write, for policy 'plot'."),
    eps: float = typer.Option(EPS, help="Share of a step's loss decrease that a layer may cost."),
    steps: int = typer.Option(8, help="Calibration steps, a batch each."),
    lr: float = typer.Option(LR, help="Of the plain gradient steps."),
    seed: int = typer.Option(0, help="Of what is zeroed."),
    as_json: bool = typer.Option(False, "--json", help="Print the bounds as JSON."),
) -> None:
    """Find how much loss each layer of a model bears, for policy "plot"."""
    folder = Path(out).resolve().parent
    if not folder.is_dir() or Path(out).is_dir():
        typer.echo(f"gradwire calibrate: --out {out}: a file in a folder that exists", err=True)
        raise typer.Exit(2)
    try:
        model, loss_fn, batches = _parts(function, _load(function)())
        found = calibrate(model, loss_fn, batches, eps=eps, steps=steps, lr=lr, seed=seed)
    except ConfigError as error:
        typer.echo(f"gradwire calibrate: {error}", err=True)
        raise typer.Exit(2) from error
    try:
        found.save(out)
    except OSError as error:
        typer.echo(f"gradwire calibrate: --out {out}: {error.strerror}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps({"file": out, "model": found.model, "bounds": found.bounds}))
        return
    width = max(map(len, found.bounds))
    for name, bound in found.bounds.items():
        typer.echo(f"{name:{width}}  {bound:g}")
    typer.echo(f"written to {out}: attach(model, policy='plot', table={out!r})")


def _whole(name: str, value: object, low: int) -> int:
    """The number, from `low` to the largest; raises ConfigError for anything else."""
    value = plain(value)
    if not is_whole(value) or not low <= value <= LARGEST:
        raise ConfigError.of(name, value, f"a whole number from {low} to {LARGEST}")
    return value


def _check_subject(model: object, loss_fn: object, batches: object) -> None:
    """Raises ConfigError unless these can be a model, a loss and batches."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError.about(
            f"model is of type {type(model).__name__}",
            "a torch.nn.Module is needed",
            setting="model",
            value=type(model).__name__,
        )
    if not callable(loss_fn):
        raise ConfigError.about(
            f"loss_fn is of type {type(loss_fn).__name__}",
            "a function of (model, batch) is needed",
            setting="loss_fn",
            value=type(loss_fn).__name__,
        )
    if not isinstance(batches, Iterable):
        raise ConfigError.about(
            f"batches are of type {type(batches).__name__}",
            "something to iterate over is needed",
            setting="batches",
            value=type(batches).__name__,
        )


def _parts(function: str, made: object) -> tuple[torch.nn.Module, LossFunction, Iterable[Any]]:
    """What the user's function returned, checked; raises ConfigError for anything else."""
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        found = f"{type(made).__name__} of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise ConfigError.of(
            "function",
            function,
            "it has to return (model, loss_fn, batches)",
            beside=f"returned {found or type(made).__name__}",
        )
    try:
        _check_subject(*made)
    except ConfigError as error:
        raise ConfigError.of(
            "function", function, f"{error}", beside="returned something else"
        ) from error
    model, loss_fn, batches = made
    return model, loss_fn, batches


def _load(function: str) -> Callable[[], object]:
    module, colon, name = function.partition(":")
    if not (module and colon and name):
        raise ConfigError.of("function", function, "module:function is needed, as in mine:make")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        hint = f"; a module's name, as in {module[:-3]}:{name}" if module.endswith(".py") else ""
        raise ConfigError.of("function", function, f"{error}{hint}") from error
    if not callable(found):
        raise ConfigError.of("function", function, f"module {module!r} has no function {name!r}")
    made: Callable[[], object] = found
    return made
