"""The user's key, as settings give it: digits, or a file that nobody else may read."""

from __future__ import annotations

import hmac
import os
import re
import stat

from gradwire.core.errors import ConfigError

DIGITS = 64
"""Hexadecimal digits of a key: 32 bytes."""

AUTHS = ("none", "session", "whole")
"""The values of the setting `auth`."""

HOW = f"{DIGITS} hexadecimal digits, as `openssl rand -hex {DIGITS // 2}` prints them"


def check_key(auth: object, key: object, key_file: object) -> None:
    """Checks that `auth`, `key` and `key_file` go together; raises ConfigError."""
    if auth is not None and auth not in AUTHS:
        allowed = f"allowed are {', '.join(map(repr, AUTHS))}, or None"
        raise ConfigError.of("auth", auth, allowed)
    if key is not None and key_file is not None:
        raise ConfigError.about(
            "key and key_file", "give one of them", setting="key_file", value=key_file
        )
    if auth is not None and not (key is None and key_file is None):
        allowed = "a key authenticates all and encrypts; leave out one of them"
        raise ConfigError.of("auth", auth, allowed, beside="beside a key")


def check_key_kept(authentication: str, on_failure: object) -> None:
    """Checks that a job with a key never leaves its engine, which alone has the key.

    Else who drops datagrams could have the gradients sent in the clear.

    Raises:
        ConfigError: There is a key, and failed transfers go over the host's network.
    """
    if authentication == "key" and on_failure == "host":
        raise ConfigError.of(
            "on_failure",
            on_failure,
            "the host's network has no key, and gradients would go over it in the clear; use "
            "on_failure='raise', or leave out the key and encrypt all of the job's traffic below "
            "it (WireGuard, for instance)",
            beside="beside a key",
        )


def read_key(key: object, key_file: object) -> bytes:
    """Returns the key that the settings give, nothing where there is none.

    Raises:
        ConfigError: It has another form; or its file cannot be read, or can be by others, among
            whom are neither this process's user nor root.
    """
    if key_file is None:
        return b"" if key is None else _digits(key, "key", "…", "a key")
    if not isinstance(key_file, str) or not key_file:
        raise ConfigError.of("key_file", key_file, "the name of a file, or None")
    try:
        # Without O_NONBLOCK, to open a FIFO would take until somebody writes there.
        number = os.open(key_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, encoding="utf-8", errors="replace") as file:
            status = os.fstat(number)
            mode = status.st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError.of("key_file", key_file, "it is no ordinary file")
            if status.st_uid not in (os.geteuid(), 0):
                raise ConfigError.of(
                    "key_file",
                    key_file,
                    f"it belongs to user {status.st_uid}, who may read and change it; it has to be "
                    f"of this process's user ({os.geteuid()}) or of root: chown, or make a copy",
                )
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError.of(
                    "key_file",
                    key_file,
                    f"others than its owner may use it (mode {stat.S_IMODE(mode):o}); chmod 600",
                )
            text = file.read(4 * DIGITS)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the text can be no file's name
        why = getattr(error, "strerror", None) or error
        # The cause has the name again, which may be a key.
        raise ConfigError.of("key_file", key_file, f"cannot be read: {why}") from None
    return _digits(text.strip(), "key_file", key_file, "its key")


def fingerprint(key: bytes) -> str | None:
    """Returns what keys are compared by and may be shown, since no key follows from it.

    It is None where there is no key.
    """
    if not key:
        return None
    return "fingerprint " + hmac.new(key, b"gradwire fingerprint", "sha256").hexdigest()[:16]


def _digits(text: object, setting: str, value: object, what: str) -> bytes:
    if isinstance(text, str) and re.fullmatch(f"[0-9a-fA-F]{{{DIGITS}}}", text):
        return bytes.fromhex(text)
    length = f"{len(text)} characters" if isinstance(text, str) else "no text"
    raise ConfigError.of(setting, value, f"{what} has {HOW}; this one has {length}")
