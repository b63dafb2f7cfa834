"""JobCalibration: policy "plot" finds its table in the first steps of the job itself.

Each call weighs this worker's own batch (`gradwire.calibration.search`); at the end of a round of
`calibrate` calls what all workers found is added up exactly, so that every rank halves the same
way and ends with the same table, which rests on all workers' batches. Until then all is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.calibration.search import LayerSearch, LossFunction
from gradwire.core.names import named_parameters
from gradwire.core.plan import mix_seed
from gradwire.policies import PLOT, Calibration

__all__ = ["JobCalibration"]


class JobCalibration:
    """One worker's part of the calibration of `model` for `policy` (with calibrate > 0).

    rank, seed: what this worker's chances are drawn from. chunk_elements: of a datagram.
    """

    def __init__(
        self, policy: PLOT, model: torch.nn.Module, *, rank: int, seed: int, chunk_elements: int
    ) -> None:
        self._policy = policy
        self._model = model
        self._rank = rank
        self._seed = seed
        self._parameters = {n: p for n, p in named_parameters(model).items() if p.requires_grad}
        self._search = LayerSearch(
            self._parameters, eps=policy.eps, lr=policy.lr, chunk_elements=chunk_elements
        )
        self._calls = 0

    @property
    def calls(self) -> int:
        """How often `weigh` was called."""
        return self._calls

    def weigh(self, loss_fn: LossFunction, batch: Any) -> NDArray[np.float32] | None:
        """Weighs one batch. At the end of a round: what the workers have to add up, else None."""
        seed = mix_seed(self._seed, self._rank, self._calls) >> 1
        chance = torch.Generator().manual_seed(seed)
        self._search.weigh(self._model, loss_fn, batch, seed=seed, chance=chance)
        self._calls += 1
        if self._calls % self._policy.calibrate:
            return None
        return np.array(self._search.sums(), np.float32)

    def take(self, sums: NDArray[np.float32]) -> None:
        """Takes the sums over all workers; the policy gets its table when all is found.

        Raises ConfigError, on all ranks alike, when the steps did not decrease the loss.
        """
        self._search.settle([float(value) for value in sums])
        if not self._search.done:
            return
        sizes = {name: parameter.numel() for name, parameter in self._parameters.items()}
        settings = {
            "eps": self._search.eps,
            "steps": self._policy.calibrate,
            "lr": self._search.lr,
            "chunk_elements": self._search.chunk_elements,
        }
        self._policy.learn(
            Calibration(Calibration.fingerprint(sizes), self._search.bounds, settings)
        )
