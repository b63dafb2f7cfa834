"""`calibrate` measures how much loss each layer of a user's own model bears.

For each layer it finds the largest bound whose damage costs less than the share `eps` of a step's
loss decrease (`gradwire.calibration.search`). The result is a table for policies "plot" and
"adaptive". It is made before training, in one process and without any peer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from gradwire.calibration import EPS, LR
from gradwire.calibration.search import LayerSearch, LossFunction
from gradwire.core.checks import is_number, is_whole, plain
from gradwire.core.errors import ConfigError
from gradwire.core.names import named_parameters
from gradwire.policies.plot import Calibration

LARGEST = 1 << 62
"""The largest whole number that a setting may be."""


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
    """Finds the bound of each layer; the model is left as it was.

    About 3 · steps · (layers + 2) evaluations of loss_fn are needed. The search is our reading of
    PLOT (IEEE TNSM 21(6), 2024), whose derivation is not public.

    Args:
        model: not wrapped in DDP.
        loss_fn: called as loss_fn(model, batch); returns the training loss as a scalar tensor.
        batches: holds at least `steps` batches, of which the first are used.
        eps: the share of a step's loss decrease, above 0 and below 1, that the damage to one layer
            may cost.
        steps: how many batches each candidate is judged by.
        lr: the learning rate of the plain gradient steps, above 0.
        chunk_elements: how many elements one datagram carries, for that many are lost together.
        seed: of the zeroed chunks and of the model's own random numbers.

    Returns:
        The bounds by tensor name, with what identifies the model; `save` writes the file for
        `attach(…, table=…)`.

    Raises:
        ConfigError: a setting is impossible, batches are too few, or no calibration step decreases
            the loss.
    """
    eps, steps, lr, seed = checked(eps, steps, lr, seed)
    chunk_elements = _whole("chunk_elements", chunk_elements, 1)
    check_subject(model, loss_fn, batches)
    few = list(itertools.islice(batches, steps))
    if len(few) < steps:
        raise ConfigError.about(
            f"steps={steps}", f"only {len(few)} batches were given", setting="steps", value=steps
        )
    trained = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    search = LayerSearch(trained, eps=eps, lr=lr, chunk_elements=chunk_elements)
    chance = torch.Generator().manual_seed(seed)
    while not search.done:
        search.halve(model, loss_fn, few, seed=seed, chance=chance)
    sizes = {name: p.numel() for name, p in trained.items()}
    settings = {"eps": eps, "steps": steps, "lr": lr, "chunk_elements": chunk_elements}
    return Calibration(Calibration.fingerprint(sizes), search.bounds, settings)


def checked(eps: object, steps: object, lr: object, seed: object) -> tuple[float, int, float, int]:
    """Returns settings of `calibrate` as numbers; raises ConfigError where one is impossible."""
    return _eps(eps), _whole("steps", steps, 1), _lr(lr), _whole("seed", seed, 0)


def _eps(eps: object) -> float:
    eps = plain(eps)
    if not is_number(eps) or not 0.0 < eps < 1.0:
        raise ConfigError.of("eps", eps, "a share of the loss decrease, above 0 and below 1")
    return eps


def _lr(lr: object) -> float:
    lr = plain(lr)
    if not is_number(lr) or not lr > 0.0:
        raise ConfigError.of("lr", lr, "a finite number above 0")
    return lr


def _whole(name: str, value: object, low: int) -> int:
    value = plain(value)
    if not is_whole(value) or not low <= value <= LARGEST:
        raise ConfigError.of(name, value, f"a whole number from {low} to {LARGEST}")
    return value


def check_subject(model: object, loss_fn: object, batches: object) -> None:
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
