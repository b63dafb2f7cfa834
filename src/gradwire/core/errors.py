"""The errors gradwire raises: each names the setting or the rank, the value and what is allowed.

What an error names is in its fields as well, for programs; they survive pickling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

__all__ = [
    "Cause",
    "ConfigError",
    "EngineMissingError",
    "GradwireError",
    "RendezvousError",
    "TransferError",
    "suggestion",
]

Cause = Literal[
    "bound", "closed", "engine", "left", "memory", "mtu", "plan", "silence", "timeout", "version"
]
"""Why a transfer failed; `TransferError` explains each word."""


class GradwireError(RuntimeError):
    """Base of gradwire's run-time errors."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that is unknown or impossible.

    Attributes:
        setting: the name of the setting, argument, environment variable or key of a state that
            is at fault; "" where there is none to name.
        value: what it was set to; None where it is missing.
        allowed: what is allowed, or what to do instead, in words.
    """

    def __init__(
        self, text: str, *, setting: str = "", value: object = None, allowed: str = ""
    ) -> None:
        super().__init__(text)
        self.setting = setting
        self.value = value
        self.allowed = allowed

    @staticmethod
    def of(setting: str, value: object, allowed: str, *, beside: str = "") -> ConfigError:
        """The error of one setting in gradwire's usual form, "setting=value beside: allowed".

        beside: what the value does not go with, as in "with route='sharded'".
        """
        subject = f"{setting}={value!r}" + (f" {beside}" if beside else "")
        return ConfigError.about(subject, allowed, setting=setting, value=value)

    @staticmethod
    def about(
        subject: str, allowed: str, *, setting: str = "", value: object = None
    ) -> ConfigError:
        """The error of something that is no setting with a value, "subject: allowed"."""
        return ConfigError(f"{subject}: {allowed}", setting=setting, value=value, allowed=allowed)


class EngineMissingError(GradwireError, ImportError):
    """The compiled engine `gradwire._engine` cannot be imported."""


class RendezvousError(GradwireError):
    """The processes of a job could not find each other, or do not agree.

    Attributes:
        ranks: the ranks at fault, as the job counts them (absent, of another version or of
            another configuration); empty where nobody is.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class TransferError(GradwireError):
    """A transfer failed.

    Attributes:
        rank: the rank at fault, as the job counts them; -1 where nobody is.
        step: the training step; -1 where there is none.
        cause: one word, for programs:
            "timeout": not complete within `timeout`;
            "silence": a peer, or all of them, sent nothing for `peer_timeout`;
            "left": a peer ended, or closed its engine, before the transfer was complete;
            "plan": the ranks have different plans for the same transfer, or multiply their
                gradients by different scales;
            "bound": a peer gave up more than its bound allows;
            "mtu": the path does not carry datagrams of the agreed size any more;
            "memory": the transfer needs more than `memory_limit`;
            "version": a peer speaks another version of the protocol;
            "closed": this rank's own engine or communicator was closed;
            "engine": anything else that the engine reports.
    """

    def __init__(
        self, text: str, *, rank: int = -1, step: int = -1, cause: Cause = "engine"
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.step = step
        self.cause: Cause = cause


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the nearest known word, "" when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
