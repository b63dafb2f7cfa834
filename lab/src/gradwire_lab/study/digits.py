"""In task "digits" a small conv net learns scikit-learn's 1,797 digits, in five folds.

Task "digits-decay" is the same with a learning rate that falls by thirds of training, for the
question when in training loss hurts.

The data come with the package; nothing is downloaded.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from gradwire_lab.study.lesson import WORKERS, MissingDataError, Task

__all__ = ["DIGITS", "DIGITS_DECAY"]

FOLDS = 5
BATCH = 16
EPOCHS = 10
BRIGHTEST = 16.0


class DigitsModel(nn.Module):
    """This net has two convolutions and two linear layers, with 31,000 parameters."""

    def __init__(self) -> None:
        """Make it; the weights come from torch's global random generator."""
        super().__init__()
        self.front = nn.Conv2d(1, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * 4 * 4, 112)
        self.head = nn.Linear(112, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = functional.relu(self.middle(functional.relu(self.front(images))))
        pooled = functional.max_pool2d(seen, 2).flatten(1)
        logits: torch.Tensor = self.head(functional.relu(self.hidden(pooled)))
        return logits


class DigitsLesson:
    """This lesson is one fold of one seed.

    Attributes:
        labels: the labels of all images.
        own: the images of each worker.
        held_out: the images of the fold, which no worker trains on.
    """

    def __init__(self, seed: int, fold: int, data: str) -> None:
        self._images, self.labels = load()
        self._key = (seed, fold)
        order = np.random.default_rng(seed).permutation(len(self.labels))
        self.held_out = torch.from_numpy(order[fold::FOLDS].copy())
        train = np.concatenate([order[other::FOLDS] for other in range(FOLDS) if other != fold])
        if data == "own":
            train = train[np.argsort(self.labels.numpy()[train], kind="stable")]
            self.own = np.array_split(train, WORKERS)
        else:
            self.own = [train] * WORKERS
        self._mixed = data != "own"
        self.rounds_per_epoch = len(train) // (WORKERS * BATCH)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * seed + fold)
            self.model: nn.Module = DigitsModel()

    def loss(self, round_number: int, worker: int) -> torch.Tensor:
        epoch, place = divmod(round_number, self.rounds_per_epoch)
        batch = torch.from_numpy(self.order(epoch, worker)[place * BATCH : (place + 1) * BATCH])
        return functional.cross_entropy(self.model(self._images[batch]), self.labels[batch])

    def score(self) -> float:
        """Return the share of the held-out digits that are recognised, in points (per cent)."""
        with torch.no_grad():
            found = self.model(self._images[self.held_out]).argmax(dim=1)
        return 100.0 * float((found == self.labels[self.held_out]).double().mean())

    def order(self, epoch: int, worker: int) -> NDArray[np.int64]:
        """Return the worker's images in the order of this epoch."""
        key = (*self._key, epoch) if self._mixed else (*self._key, epoch, worker)
        order: NDArray[np.int64] = np.random.default_rng(key).permutation(self.own[worker])
        return order[worker::WORKERS].copy() if self._mixed else order


@functools.cache
def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images (float32, 1 × 8 × 8) and labels.

    Raises:
        MissingDataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDataError(
            f"the digits come with scikit-learn, which cannot be imported ({error}): "
            "pip install './lab[accuracy]' in a checkout, or take --task text"
        ) from error
    found = load_digits()
    images = torch.from_numpy(found.images.astype(np.float32) / BRIGHTEST).unsqueeze(1)
    return images, torch.from_numpy(found.target.astype(np.int64))


def rate(done: float) -> float:
    return 0.1 if done >= 0.75 else 1.0


DIGITS = Task(
    name="digits",
    optimizers={
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adam": lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
    },
    rounds=EPOCHS * 22,
    parts=FOLDS,
    unit="points",
    margin=0.5,
    more_is_better=True,
    rate=rate,
    open=DigitsLesson,
)


def decay(done: float) -> float:
    """Return the factor of step decay, as in dblp_phases: 0.3 in the second third, then 0.09."""
    return 0.3 ** int(3 * done)


DIGITS_DECAY = replace(DIGITS, name="digits-decay", rate=decay, sections=("thirds",))
