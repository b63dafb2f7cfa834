"""The errors gradwire raises: each names the setting or the rank, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "EngineMissingError",
    "GradwireError",
    "RendezvousError",
    "TransferError",
    "suggestion",
]


class GradwireError(RuntimeError):
    """Base of gradwire's run-time errors."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that is unknown or impossible."""


class EngineMissingError(GradwireError, ImportError):
    """The compiled engine `gradwire._engine` cannot be imported."""


class RendezvousError(GradwireError):
    """The processes of a job could not find each other, or do not agree.

    `ranks` are the ranks at fault (absent, of another version or of another configuration).
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TransferError(GradwireError):
    """A transfer failed: `rank` is the rank at fault (-1: none), `step` the training step."""

    def __init__(self, message: str, *, rank: int = -1, step: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the nearest known word, "" when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
