"""The text that the model learns is the sources of Python's standard library, byte by byte.

Every Python carries it, so nothing is downloaded, and every rank reads the same files in the same
order.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

SYMBOLS = 256
"""Size of the vocabulary: a character is a byte."""

HELD_OUT_EVERY = 12
"""One of so many files is kept whole from training, for validation."""

SMALLEST_TEXT = 200_000


class NoText(RuntimeError):
    """This Python has no readable standard library; the message says where it was looked for."""


@dataclass(frozen=True)
class Text:
    """A text has a part to train with, and a part that is held out.

    Attributes:
        train: bytes as a one-dimensional uint8 tensor.
        held_out: likewise; whole files that are not in ``train``.
        files: how many files both were read from.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    files: int

    def batch(
        self, *, step: int, rank: int, seed: int, size: int, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one rank's samples of one training step, a pure function of the arguments.

        Returns:
            Inputs and targets, int64 of shape (size, context).
        """
        return _sample(self.train, (seed, step, rank), size, context)

    def validation(
        self, *, rank: int, seed: int, size: int, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one rank's share of the validation samples, the same at every call."""
        return _sample(self.held_out, (seed, -1, rank), size, context)


def load(folder: Path | None = None) -> Text:
    """Read the sources, sorted by name.

    Args:
        folder: where they are; this Python's own standard library if not given.

    Raises:
        NoText: there are too few.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py")) + sorted(folder.glob("asyncio/*.py"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for number, path in enumerate(paths):
        parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(path.read_bytes())
    train, held_out = (b"".join(parts[kept]) for kept in (False, True))
    if len(train) + len(held_out) < SMALLEST_TEXT or len(held_out) < SMALLEST_TEXT // 40:
        raise NoText(f"{folder} holds too few .py files to learn from ({len(paths)} found)")
    return Text(_tensor(train), _tensor(held_out), len(paths))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _sample(
    text: torch.Tensor, key: tuple[int, int, int], size: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    seed, step, rank = key
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step + 1) * 1_009 + rank)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    window = text[starts + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]
