"""The errors gradwire raises: each names the setting or the rank, the value and what is allowed.

Each error also holds what it names in fields, for programs. Errors can be pickled.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Literal

Cause = Literal[
    "bound", "closed", "engine", "left", "memory", "mtu", "plan", "silence", "timeout", "version"
]
"""Why a transfer failed; `TransferError` explains each cause."""


LONGEST_VALUE = 120
"""The most characters of a value that an error shows."""


_KEY = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{60,70}(?![0-9a-fA-F])")
"""What may be a key of the user's, given where something else belongs."""


class GradwireError(RuntimeError):
    """Base of gradwire's run-time errors."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that is unknown or impossible.

    Its text goes into logs, and to the other ranks, so a value that may be a key is left out.

    Attributes:
        setting: Name of the setting, argument, environment variable or key of a state that is at
            fault; "" where there is none to name.
        value: What it was set to; None where it is missing.
        allowed: What is allowed, or what to do instead, as text.
    """

    def __init__(
        self, text: str, *, setting: str = "", value: object = None, allowed: str = ""
    ) -> None:
        super().__init__(_KEY.sub("…", text))
        self.setting = setting
        self.value = _KEY.sub("…", value) if isinstance(value, str) else value
        self.allowed = allowed

    @staticmethod
    def of(setting: str, value: object, allowed: str, *, beside: str = "") -> ConfigError:
        """Makes the error of one setting, "setting=value beside: allowed".

        Args:
            setting: Name of the setting.
            value: What it was set to.
            allowed: What is allowed.
            beside: What the value does not go with, as in "with route='sharded'".

        Returns:
            The error, to be raised.
        """
        subject = f"{setting}={_short(value)}" + (f" {beside}" if beside else "")
        return ConfigError.about(subject, allowed, setting=setting, value=value)

    @staticmethod
    def about(
        subject: str, allowed: str, *, setting: str = "", value: object = None
    ) -> ConfigError:
        """Makes the error of anything that is not a setting with a value, "subject: allowed"."""
        return ConfigError(f"{subject}: {allowed}", setting=setting, value=value, allowed=allowed)


def _short(value: object) -> str:
    text = repr(value)
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


class EngineMissingError(GradwireError, ImportError):
    """The compiled engine `gradwire._engine` cannot be imported."""


class RendezvousError(GradwireError):
    """The processes of a job could not find each other, or do not agree.

    Attributes:
        ranks: The ranks at fault, as the job counts them: absent, of another version or of another
            configuration. Empty where nobody is at fault.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class TransferError(GradwireError):
    """A transfer failed.

    Attributes:
        rank: The rank at fault, as the job counts them; -1 where nobody is.
        step: The training step; -1 where there is none.
        cause: The kind of failure, for programs:
            "timeout": the transfer was not complete within `timeout`;
            "silence": a peer, or all of them, sent nothing for `peer_timeout`, or a rank of this
                host was stopped for as long;
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


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the nearest known name, "" when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
