"""LayerSearch: the largest bound that each layer of a model bears, found by halving.

A layer bears the share p when random zeroing of that share of its gradient, chunk by chunk as
datagrams are lost, worsens the loss decrease of a plain gradient step by less than `eps`, in the
mean over some batches, the other layers being whole. That is our reading of PLOT, whose own
derivation is not public (`gradwire.policies.plot`). Norm layers and biases (tensors of one
dimension, and those named like them) are not searched: their bound is 0. Of the front layers, which
a whole training shows to be more fragile than single steps do, half of the largest bound is the
most.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.core.errors import ConfigError
from gradwire.policies.parts.fragile import is_fragile

__all__ = ["CANDIDATES", "HALVINGS", "LayerSearch", "LossFunction"]

CANDIDATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
"""The bounds that are tried, beside 0."""

FRONT = 0.1
"""The share of the layers that are in front: the first at least."""

HALVINGS = len(CANDIDATES).bit_length()

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]


class LayerSearch:
    """Weighs layers batch by batch; after each round of batches, `settle` halves what is left.

    parameters: those that are trained, by name. eps: the share of a step's loss decrease that a
    layer's loss may cost. lr: of the plain gradient steps. chunk_elements: of a datagram. Raises
    ConfigError without any.
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
                value=None,
            )
        self.eps, self.lr, self.chunk_elements = eps, lr, chunk_elements
        self.layers: dict[str, list[str]] = {}
        for name, parameter in self._parameters.items():
            if parameter.dim() > 1 and not is_fragile(name):
                self.layers.setdefault(name.rpartition(".")[0], []).append(name)
        self._low = dict.fromkeys(self.layers, 0)  # number of a candidate; 0 stands for bound 0
        self._high = dict.fromkeys(self.layers, len(CANDIDATES))
        for layer in list(self.layers)[: max(1, round(FRONT * len(self.layers)))]:
            self._high[layer] = sum(p <= CANDIDATES[-1] / 2 for p in CANDIDATES)
        self._decrease = 0.0  # of the loss, over this round's batches
        self._cost = dict.fromkeys(self.layers, 0.0)

    @property
    def done(self) -> bool:
        """Whether every layer's bound is found."""
        return self._low == self._high

    @property
    def bounds(self) -> dict[str, float]:
        """The bound of each parameter, as far as it is known to be borne."""
        bounds = dict.fromkeys(self._parameters, 0.0)
        for layer, names in self.layers.items():
            for name in names:
                bounds[name] = (0.0, *CANDIDATES)[self._low[layer]]
        return bounds

    def weigh(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        *,
        seed: int,
        chance: torch.Generator,
    ) -> None:
        """Adds what one batch says of this round's candidates; leaves the model as it was.

        loss_fn(model, batch): a scalar tensor. seed: of the model's own chances, alike in all its
        evaluations. chance: what is zeroed. Evaluates loss_fn once and once more for each layer
        that is still searched, and takes one gradient. Raises ConfigError for a loss that is no
        scalar tensor with a gradient.
        """
        saved = copy.deepcopy(model.state_dict())
        buffers = _Buffers(model)  # a state has the persistent ones only
        try:
            with torch.random.fork_rng():
                self._weigh(model, loss_fn, batch, seed, chance)
        finally:
            buffers.restore()
            model.load_state_dict(saved)

    def _weigh(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        seed: int,
        chance: torch.Generator,
    ) -> None:
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
            self._decrease += whole
            for layer in self._open():
                p = CANDIDATES[self._middle(layer) - 1]
                holed = dict(gradient)
                for name in self.layers[layer]:
                    holed[name] = _lose(gradient[name], p, self.chunk_elements, chance)
                with self._moved(holed):
                    less = float(start) - float(_loss(model, loss_fn, batch, seed))
                self._cost[layer] += whole - less

    def sums(self) -> list[float]:
        """What this round's batches said, to be added over the workers."""
        return [self._decrease, *self._cost.values()]

    def settle(self, sums: list[float] | None = None) -> None:
        """Ends a round, by its own sums or those of all workers (`sums` added up).

        Raises ConfigError when the steps did not decrease the loss, or it was not finite.
        """
        decrease, *costs = self.sums() if sums is None else sums
        if not math.isfinite(decrease):
            raise ConfigError.about(
                f"the losses of the calibration steps are not finite (lr={self.lr!r})",
                "a smaller lr, or a model that has not diverged",
                setting="lr",
                value=self.lr,
            )
        if not decrease > 0.0:
            raise ConfigError.of(
                "lr",
                self.lr,
                "the calibration steps do not decrease the loss; a smaller one, or more batches",
            )
        cost = dict(zip(self.layers, costs, strict=True))
        for layer in self._open():
            middle = self._middle(layer)
            if cost[layer] < self.eps * decrease:
                self._low[layer] = middle
            else:
                self._high[layer] = middle - 1
        self._decrease, self._cost = 0.0, dict.fromkeys(self.layers, 0.0)

    def _open(self) -> list[str]:
        return [layer for layer in self.layers if self._low[layer] < self._high[layer]]

    def _middle(self, layer: str) -> int:
        return (self._low[layer] + self._high[layer] + 1) // 2

    def _moved(self, gradient: Mapping[str, torch.Tensor]) -> _Moved:
        return _Moved(self._parameters, gradient, self.lr)


class _Buffers:
    """The buffers of a model as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._of = [(module, dict(module._buffers)) for module in model.modules()]
        self._values = {
            buffer: buffer.detach().clone()
            for _, buffers in self._of
            for buffer in buffers.values()
            if buffer is not None
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Brings them back: the same tensors with the same values."""
        for module, buffers in self._of:
            now = dict(module._buffers)
            for name in now.keys() - buffers.keys():
                delattr(module, name)
            for name, buffer in buffers.items():
                if now.get(name) is not buffer:
                    module._buffers[name] = buffer
        for buffer, value in self._values.items():
            # An expanded one takes no copy; torch.equal takes none that is sparse.
            if buffer.layout is not torch.strided or not torch.equal(buffer, value):
                buffer.copy_(value)


class _Moved:
    """The parameters one plain gradient step away, for as long as the block lasts."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        gradient: Mapping[str, torch.Tensor],
        lr: float,
    ) -> None:
        self.parameters, self.gradient, self.lr = parameters, gradient, lr
        self.before = {name: p.detach().clone() for name, p in parameters.items()}

    def __enter__(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.sub_(self.gradient[name], alpha=self.lr)

    def __exit__(self, *_: object) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.before[name])


def _loss(model: torch.nn.Module, loss_fn: LossFunction, batch: Any, seed: int) -> torch.Tensor:
    """The loss, with the same dropout each time."""
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
    """The gradient without about a share p of its chunks."""
    chunks = -(-gradient.numel() // chunk_elements)
    kept = (torch.rand(chunks, generator=chance) >= p).to(gradient.dtype)
    mask = kept.repeat_interleave(chunk_elements)[: gradient.numel()].to(gradient.device)
    return gradient * mask.reshape(gradient.shape)
