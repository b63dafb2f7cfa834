"""One model stands for all replicas, which are identical to the bit."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Replica", "exact_mean"]

Flat = NDArray[np.float32]


class Replica:
    """A replica is a model with its optimizer.

    Gradients are flat, the last parameter first, as in DDP.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: float | None = None,
    ) -> None:
        """Train this model by this optimizer; clip: see `lesson.Task`."""
        self.optimizer = optimizer
        self._clip = clip
        self._parameters = list(reversed(list(model.parameters())))
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    def gradient(self, loss: torch.Tensor) -> Flat:
        parts = torch.autograd.grad(loss, self._parameters)
        flat: Flat = torch.cat([part.reshape(-1) for part in parts]).numpy()
        return flat

    def apply(self, gradient: Flat) -> None:
        flat = torch.from_numpy(gradient)
        at = 0
        for parameter in self._parameters:
            length = parameter.numel()
            parameter.grad = flat[at : at + length].view_as(parameter)
            at += length
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.optimizer.step()

    def set_rate(self, factor: float) -> None:
        """Set the learning rate to this share of what it began with."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor


def exact_mean(gradients: list[Flat]) -> Flat:
    """Return the sum in rank order times 1/N, as the aggregators take it of exact plans."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total * np.float32(1.0 / len(gradients))
