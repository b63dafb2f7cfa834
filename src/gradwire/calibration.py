"""Calibration: which layers bear how much loss, measured on the user's own model.

For each layer the largest p whose random zeroing worsens the step's loss decrease by less than
`eps` over k calibration steps. That is our reading of PLOT, whose own derivation is not public
(`gradwire.policies.plot`). Each layer is judged by itself, the others being whole; chunks are
zeroed as datagrams are lost. Norm layers and biases (tensors of one dimension) get 0.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import typer

from gradwire.errors import ConfigError
from gradwire.policies.plot import Calibration

__all__ = ["CANDIDATES", "calibrate"]

CANDIDATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
"""The bounds that are tried, beside 0."""

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]

app = typer.Typer(add_completion=False)


def calibrate(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    eps: float = 0.05,
    steps: int = 8,
    lr: float = 0.05,
    chunk_elements: int = 358,
    seed: int = 0,
) -> Calibration:
    """Finds a bound per layer; the model is left as it was.

    loss_fn(model, batch) is the training loss, a scalar tensor. batches: at least `steps` of
    them. eps: the share of a step's loss decrease that a layer's loss may cost. lr: of the plain
    gradient steps the decrease is measured by. chunk_elements: elements of a datagram.

    Takes about 3 · steps · (layers + 2) evaluations of loss_fn. Raises ConfigError when a setting
    is impossible, batches are too few, or no calibration step decreases the loss.
    """
    if not 0.0 < eps < 1.0:
        raise ConfigError(f"eps={eps!r}: a share of the loss decrease, above 0 and below 1")
    if steps < 1:
        raise ConfigError(f"steps={steps!r}: 1 or more")
    if not lr > 0.0:
        raise ConfigError(f"lr={lr!r}: above 0")
    if chunk_elements < 1:
        raise ConfigError(f"chunk_elements={chunk_elements!r}: 1 or more")
    few = list(itertools.islice(batches, steps))
    if len(few) < steps:
        raise ConfigError(f"steps={steps}: only {len(few)} batches were given")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers: dict[str, list[str]] = {}
    for name, parameter in trained.items():
        if parameter.dim() > 1:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    saved = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad for name, p in trained.items()}
    try:
        with torch.random.fork_rng():
            levels = _search(model, loss_fn, few, trained, layers, eps, lr, chunk_elements, seed)
    finally:
        model.load_state_dict(saved)
        for name, parameter in trained.items():
            parameter.grad = gradients[name]
    bounds = dict.fromkeys(trained, 0.0)
    for layer, names in layers.items():
        for name in names:
            bounds[name] = (0.0, *CANDIDATES)[levels[layer]]
    sizes = {name: p.numel() for name, p in trained.items()}
    settings = {"eps": eps, "steps": steps, "lr": lr, "chunk_elements": chunk_elements}
    return Calibration(Calibration.fingerprint(sizes), bounds, settings)


def _search(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batches: list[Any],
    trained: dict[str, torch.nn.Parameter],
    layers: dict[str, list[str]],
    eps: float,
    lr: float,
    chunk_elements: int,
    seed: int,
) -> dict[str, int]:
    """Halves the candidates of all layers at once; the number of the largest that is borne."""
    low = dict.fromkeys(layers, 0)
    high = dict.fromkeys(layers, len(CANDIDATES))
    chance = torch.Generator().manual_seed(seed)
    while any(low[layer] < high[layer] for layer in layers):
        middle = {layer: (low[layer] + high[layer] + 1) // 2 for layer in layers}
        whole, cost = 0.0, dict.fromkeys(layers, 0.0)
        for index, batch in enumerate(batches):
            start = _loss(model, loss_fn, batch, seed + index)
            parts = torch.autograd.grad(start, list(trained.values()), allow_unused=True)
            gradient = {
                name: torch.zeros_like(p) if part is None else part
                for (name, p), part in zip(trained.items(), parts, strict=True)
            }
            with torch.no_grad():
                decrease = float(start)
                with _moved(trained, gradient, lr):
                    decrease -= float(_loss(model, loss_fn, batch, seed + index))
                whole += decrease
                for layer, names in layers.items():
                    if low[layer] == high[layer]:
                        continue
                    p = CANDIDATES[middle[layer] - 1]
                    holed = dict(gradient)
                    for name in names:
                        holed[name] = _lose(gradient[name], p, chunk_elements, chance)
                    with _moved(trained, holed, lr):
                        less = float(start) - float(_loss(model, loss_fn, batch, seed + index))
                    cost[layer] += decrease - less
        if not whole > 0.0:
            raise ConfigError(
                f"lr={lr!r}: the calibration steps do not decrease the loss; a smaller one, or "
                "more batches"
            )
        for layer in layers:
            if low[layer] == high[layer]:
                continue
            if cost[layer] < eps * whole:
                low[layer] = middle[layer]
            else:
                high[layer] = middle[layer] - 1
    return low


def _loss(model: torch.nn.Module, loss_fn: LossFunction, batch: Any, seed: int) -> torch.Tensor:
    """The loss, with the same dropout each time."""
    torch.manual_seed(seed)
    loss = loss_fn(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(f"loss_fn returned {type(loss).__name__}: a scalar tensor is needed")
    return loss


class _moved:
    """The parameters one plain gradient step away, for as long as the block lasts."""

    def __init__(
        self,
        trained: dict[str, torch.nn.Parameter],
        gradient: dict[str, torch.Tensor],
        lr: float,
    ) -> None:
        self.trained, self.gradient, self.lr = trained, gradient, lr
        self.before = {name: p.detach().clone() for name, p in trained.items()}

    def __enter__(self) -> None:
        for name, parameter in self.trained.items():
            parameter.sub_(self.gradient[name], alpha=self.lr)

    def __exit__(self, *_: object) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(self.before[name])


def _lose(
    gradient: torch.Tensor, p: float, chunk_elements: int, chance: torch.Generator
) -> torch.Tensor:
    """The gradient without about a share p of its chunks."""
    chunks = -(-gradient.numel() // chunk_elements)
    kept = (torch.rand(chunks, generator=chance) >= p).to(gradient.dtype)
    mask = kept.repeat_interleave(chunk_elements)[: gradient.numel()].to(gradient.device)
    return gradient * mask.reshape(gradient.shape)


# ---------------------------------------------------------------------------- the command


@app.command()
def command(
    function: str = typer.Argument(
        ..., help="module:function that returns (model, loss_fn, batches)."
    ),
    out: str = typer.Option("bounds.toml", "--out", help="File to write, for policy 'plot'."),
    eps: float = typer.Option(0.05, help="Share of a step's loss decrease that a layer may cost."),
    steps: int = typer.Option(8, help="Calibration steps, a batch each."),
    lr: float = typer.Option(0.05, help="Of the plain gradient steps."),
    seed: int = typer.Option(0, help="Of what is zeroed."),
    as_json: bool = typer.Option(False, "--json", help="Print the bounds as JSON."),
) -> None:
    """Find how much loss each layer of a model bears, for policy "plot"."""
    try:
        model, loss_fn, batches = _load(function)()
        found = calibrate(model, loss_fn, batches, eps=eps, steps=steps, lr=lr, seed=seed)
    except ConfigError as error:
        typer.echo(f"gradwire calibrate: {error}", err=True)
        raise typer.Exit(2) from error
    found.save(out)
    if as_json:
        typer.echo(json.dumps({"file": out, "model": found.model, "bounds": found.bounds}))
        return
    width = max(map(len, found.bounds))
    for name, bound in found.bounds.items():
        typer.echo(f"{name:{width}}  {bound:g}")
    typer.echo(f"written to {out}: attach(model, policy='plot', table={out!r})")


def _load(function: str) -> Callable[[], tuple[torch.nn.Module, LossFunction, Iterable[Any]]]:
    module, colon, name = function.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"function={function!r}: module:function is needed")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"function={function!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"function={function!r}: module {module!r} has no function {name!r}")
    made: Callable[[], tuple[torch.nn.Module, LossFunction, Iterable[Any]]] = found
    return made
