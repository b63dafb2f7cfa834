"""LayerSearch finds the largest bound that each layer of a model bears, by halving.

A layer bears the bound p when zeroing about a share p of its gradient's chunks costs less than the
share `eps` of what a plain gradient step decreases the loss by, in the mean over some batches. Only
one layer is damaged at a time. Chunks are drawn at random, as lost datagrams would be. This is our
reading of PLOT (IEEE TNSM 21(6), 2024), whose derivation is not public (`gradwire.policies.plot`).

Norm layers and biases are not searched and get bound 0; they are the tensors of fewer than two
dimensions and those named like them. Layers in front get half of the largest bound at most, because
whole trainings show them to be more fragile than single steps do.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from gradwire.core.errors import ConfigError
from gradwire.policies.parts.fragile import is_fragile

CANDIDATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
"""The bounds that are tried; a layer that bears none of them gets 0."""

FRONT = 0.1
"""The share of the layers that are in front; the first layer always is."""

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
"""Takes the model and a batch, and returns the training loss as a scalar tensor."""


class LayerSearch:
    """The state of a search: which candidates are still possible for each layer.

    Attributes:
        layers: the names of each searched layer's tensors, by the layer's name.

    Args:
        eps: the share of a step's loss decrease that the damage to one layer may cost.
        lr: the learning rate of the plain gradient steps.
        chunk_elements: how many elements are zeroed together, as one datagram carries them.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        eps: float,
        lr: float,
        chunk_elements: int,
    ) -> None:
        self._parameters = dict(parameters)
        if not self._parameters:
            raise ConfigError.about(
                "the model has no trained parameters (requires_grad)",
                "there is nothing to calibrate",
                setting="model",
            )
        self._eps, self._lr, self._chunk_elements = eps, lr, chunk_elements
        self.layers: dict[str, list[str]] = {}
        for name, parameter in self._parameters.items():
            if parameter.dim() > 1 and not is_fragile(name):
                self.layers.setdefault(name.rpartition(".")[0], []).append(name)
        # Counts of candidates, so that 0 stands for bound 0 and n for CANDIDATES[n - 1].
        self._low = dict.fromkeys(self.layers, 0)
        self._high = dict.fromkeys(self.layers, len(CANDIDATES))
        for layer in list(self.layers)[: max(1, round(FRONT * len(self.layers)))]:
            self._high[layer] = sum(p <= CANDIDATES[-1] / 2 for p in CANDIDATES)

    @property
    def done(self) -> bool:
        return self._low == self._high

    @property
    def bounds(self) -> dict[str, float]:
        """The largest bound known to be borne, for each parameter by name."""
        bounds = dict.fromkeys(self._parameters, 0.0)
        for layer, names in self.layers.items():
            for name in names:
                bounds[name] = (0.0, *CANDIDATES)[self._low[layer]]
        return bounds

    def halve(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        batches: Iterable[Any],
        *,
        seed: int,
        chance: torch.Generator,
    ) -> None:
        """Tries the middle candidate of each layer and drops the half that it rules out.

        The model is left as it was. For each batch this takes one gradient, and evaluates the loss
        twice and once more for each layer whose bound is not found yet.

        Args:
            seed: of the model's own random numbers; the batch at index i uses seed + i.
            chance: draws the chunks that are zeroed.
        """
        decrease = 0.0  # of the whole steps
        costs = dict.fromkeys(self._open(), 0.0)  # how much less the damaged steps decrease it
        for index, batch in enumerate(batches):
            with _restored(model), torch.random.fork_rng():
                decrease += self._weigh(model, loss_fn, batch, seed + index, chance, costs)
        if not math.isfinite(decrease):
            raise ConfigError.about(
                f"the losses of the calibration steps are not finite (lr={self._lr!r})",
                "a smaller lr, or a model that has not diverged",
                setting="lr",
                value=self._lr,
            )
        if not decrease > 0.0:
            raise ConfigError.of(
                "lr",
                self._lr,
                "the calibration steps do not decrease the loss; a smaller one, or more batches",
            )
        for layer, cost in costs.items():
            middle = self._middle(layer)
            if cost < self._eps * decrease:
                self._low[layer] = middle
            else:
                self._high[layer] = middle - 1

    def _weigh(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        seed: int,
        chance: torch.Generator,
        costs: dict[str, float],
    ) -> float:
        """Adds the cost of each layer's damage to `costs`; returns the whole step's decrease."""
        with torch.enable_grad():
            start = _loss(model, loss_fn, batch, seed)
            if not start.requires_grad:
                raise ConfigError.about(
                    "loss_fn returned a tensor without a gradient",
                    "compute the loss from the model's output, without detach(), item() or "
                    "no_grad()",
                    setting="loss_fn",
                    value=type(loss_fn).__name__,
                )
            parts = torch.autograd.grad(start, list(self._parameters.values()), allow_unused=True)
        gradient = {
            name: torch.zeros_like(p) if part is None else part
            for (name, p), part in zip(self._parameters.items(), parts, strict=True)
        }
        with torch.no_grad():
            whole = float(start)
            with self._moved(gradient):
                whole -= float(_loss(model, loss_fn, batch, seed))
            for layer in costs:
                p = CANDIDATES[self._middle(layer) - 1]
                holed = dict(gradient)
                for name in self.layers[layer]:
                    holed[name] = _lose(gradient[name], p, self._chunk_elements, chance)
                with self._moved(holed):
                    less = float(start) - float(_loss(model, loss_fn, batch, seed))
                costs[layer] += whole - less
        return whole

    def _open(self) -> list[str]:
        return [layer for layer in self.layers if self._low[layer] < self._high[layer]]

    def _middle(self, layer: str) -> int:
        return (self._low[layer] + self._high[layer] + 1) // 2

    @contextlib.contextmanager
    def _moved(self, gradient: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Moves the parameters by one plain gradient step while the block lasts."""
        before = {name: p.detach().clone() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.sub_(gradient[name], alpha=self._lr)
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.copy_(before[name])


@contextlib.contextmanager
def _restored(model: torch.nn.Module) -> Iterator[None]:
    """Leaves a model as it was when the block began, buffers that no state holds included."""
    saved = copy.deepcopy(model.state_dict())
    owners = [(module, dict(module._buffers)) for module in model.modules()]
    values = {
        buffer: buffer.detach().clone()
        for _, buffers in owners
        for buffer in buffers.values()
        if buffer is not None
    }
    try:
        yield
    finally:
        _restore_buffers(owners, values)
        model.load_state_dict(saved)


@torch.no_grad()
def _restore_buffers(
    owners: list[tuple[torch.nn.Module, dict[str, torch.Tensor | None]]],
    values: Mapping[torch.Tensor, torch.Tensor],
) -> None:
    """Gives modules the same buffer tensors with the same values again."""
    for module, buffers in owners:
        now = dict(module._buffers)
        for name in now.keys() - buffers.keys():
            delattr(module, name)
        for name, buffer in buffers.items():
            if now.get(name) is not buffer:
                module._buffers[name] = buffer
    for buffer, value in values.items():
        # An expanded tensor cannot be written to, and torch.equal takes no sparse one.
        if buffer.layout is not torch.strided or not torch.equal(buffer, value):
            buffer.copy_(value)


def _loss(model: torch.nn.Module, loss_fn: LossFunction, batch: Any, seed: int) -> torch.Tensor:
    """Returns the loss, with the same dropout for the same seed."""
    torch.manual_seed(seed)
    loss = loss_fn(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise ConfigError.about(
            f"loss_fn returned {type(loss).__name__}{shape}",
            "a scalar tensor is needed",
            setting="loss_fn",
            value=type(loss).__name__,
        )
    return loss.squeeze()


def _lose(
    gradient: torch.Tensor, p: float, chunk_elements: int, chance: torch.Generator
) -> torch.Tensor:
    """Returns the gradient with each chunk zeroed with probability p."""
    chunks = -(-gradient.numel() // chunk_elements)
    kept = (torch.rand(chunks, generator=chance) >= p).to(gradient.dtype)
    mask = kept.repeat_interleave(chunk_elements)[: gradient.numel()].to(gradient.device)
    return gradient * mask.reshape(gradient.shape)
