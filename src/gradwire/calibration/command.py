"""The command line of `gradwire calibrate`, which imports torch only when it calibrates."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gradwire.calibration import EPS, LR
from gradwire.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from gradwire.calibration.search import LossFunction

app = typer.Typer(add_completion=False)


@app.command()
def command(
    function: str = typer.Argument(
        ..., help="module:function that returns (model, loss_fn, batches)."
    ),
    out: str = typer.Option("bounds.toml", "--out", help="The file to write, for table=."),
    eps: float = typer.Option(EPS, help="The share of the loss decrease that a layer may cost."),
    steps: int = typer.Option(8, help="How many batches are used."),
    lr: float = typer.Option(LR, help="The learning rate of the steps."),
    seed: int = typer.Option(0, help="The seed of what is zeroed."),
    as_json: bool = typer.Option(False, "--json", help="Print the bounds as JSON."),
) -> None:
    """Find how much loss each layer of a model bears, for policies "plot" and "adaptive"."""
    from gradwire.calibration.calibrate import calibrate, checked

    folder = Path(out).resolve().parent
    if not folder.is_dir() or Path(out).is_dir():
        typer.echo(f"gradwire calibrate: --out {out}: a file in a folder that exists", err=True)
        raise typer.Exit(2)
    try:
        checked(eps, steps, lr, seed)  # before the function, which may load for minutes
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


def _parts(function: str, made: object) -> tuple[torch.nn.Module, LossFunction, Iterable[Any]]:
    """Returns the model, the loss and the batches that a user's function made.

    Raises:
        ConfigError: names the function, and says that it returned something else.
    """
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        found = f"{type(made).__name__} of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise ConfigError.of(
            "function",
            function,
            "it has to return (model, loss_fn, batches)",
            beside=f"returned {found or type(made).__name__}",
        )
    from gradwire.calibration.calibrate import check_subject

    try:
        check_subject(*made)
    except ConfigError as error:
        raise ConfigError.of(
            "function", function, f"{error}", beside="returned something else"
        ) from error
    model, loss_fn, batches = made
    return model, loss_fn, batches


def _load(function: str) -> Callable[[], object]:
    """Imports a function by "module:name", from the current folder too, or raises ConfigError."""
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
