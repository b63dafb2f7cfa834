"""The variables GRADWIRE_* of the environment, read by the types of settings and options."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from gradwire.core.checks import is_whole, plain
from gradwire.core.errors import ConfigError, suggestion

log = logging.getLogger("gradwire")

PREFIX = "GRADWIRE_"
"""The prefix of the environment variables' names."""


FREE_PREFIXES = ("GRADWIRE_LAB_", "GRADWIRE_DEMO_", "GRADWIRE_BENCH_", "GRADWIRE_TEST_")
"""Prefixes of variables that belong to gradwire's own tools and are no settings."""


_SERVICE = re.compile(
    r"GRADWIRE(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


_SERVICE_PORT = re.compile(r"GRADWIRE(_[A-Z0-9_]+)?_PORT")


_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")


LAST_PORT = 65535

PORT = int | str | tuple[int, int]
"""The type of a port, or of a range of them as text or a pair."""

ALLOWED_PORTS = (
    f"a whole number from 0 to {LAST_PORT}, or a range of ports above 0, as in '29600-29700'"
)

EXPORTERS = ("prometheus", "tensorboard", "wandb", "opentelemetry")
"""The names of gradwire's own exporters."""

EXPORT = str | Sequence[object] | None
"""The type of what is exported to, as text with commas, or as a list."""

ALLOWED_EXPORTS = (
    "prometheus:PORT, prometheus:FILE.prom, tensorboard:FOLDER, wandb, opentelemetry, or an object "
    "with write(record) and close(); several in a list, or in one text with commas"
)


def from_environment(
    hints: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Reads the environment variables GRADWIRE_<NAME> of some settings.

    Args:
        environment: Environment variables; None for os.environ. An empty one counts as unset.
    """
    variables = os.environ if environment is None else environment
    found: dict[str, object] = {}
    for name, hint in hints.items():
        variable = PREFIX + name.upper()
        text = variables.get(variable, "").strip()
        if text and not _links_service(variable, text):
            found[name] = _convert(variable, text, hint)
    return found


@contextlib.contextmanager
def naming_variables(read: Collection[str]) -> Iterator[None]:
    """Names the variable in the ConfigError of a setting that was read from the environment.

    Args:
        read: The names of those that were.
    """
    try:
        yield
    except ConfigError as error:
        if error.setting not in read:
            raise
        raise ConfigError(
            f"{error} (from {PREFIX}{error.setting.upper()})",
            setting=error.setting,
            value=error.value,
            allowed=error.allowed,
        ) from None


def service_links(environment: Mapping[str, str] | None = None) -> list[str]:
    """Returns the names of the variables by which Kubernetes announces a Service.

    A pod gets them for every Service of its namespace, one named `gradwire` or `gradwire-…`
    included, unless its spec has `enableServiceLinks: false`. They are no settings.
    """
    variables = os.environ if environment is None else environment
    return [variable for variable, text in variables.items() if _links_service(variable, text)]


def _links_service(variable: str, text: str) -> bool:
    """Returns whether a variable has the shape of a service link.

    GRADWIRE_PORT is one as well as a setting, so that its value decides.
    """
    if _SERVICE.fullmatch(variable):
        return True
    return bool(_SERVICE_PORT.fullmatch(variable) and _SERVICE_URL.fullmatch(text.strip()))


def check_environment(known: Iterable[str], environment: Mapping[str, str] | None = None) -> None:
    """Checks that each variable GRADWIRE_* names a setting; raises ConfigError for a misspelt one.

    Kubernetes' service links are ignored, with one line in the log of a process.
    """
    variables = os.environ if environment is None else environment
    allowed = [PREFIX + name.upper() for name in known]
    links = service_links(variables)
    if links:
        _log_links(tuple(links))
    for variable in variables:
        if not variable.startswith(PREFIX) or variable.startswith(FREE_PREFIXES):
            continue
        if variable in links:
            continue
        if variable not in allowed:
            near = suggestion(variable, allowed)
            shown = "…" if "KEY" in variable else variables[variable]  # it may be a secret
            raise ConfigError(
                f"environment variable {variable}={shown!r} names no setting{near}",
                setting=variable,
                value=shown,
                allowed=near.strip(" ()"),
            )


@functools.cache
def _log_links(links: tuple[str, ...]) -> None:
    log.warning(
        "ignored: %s, set by Kubernetes to announce a Service; enableServiceLinks: false in the "
        "pod's spec leaves out what it sets so",
        ", ".join(links),
    )


def _convert(variable: str, text: str, hint: object) -> object:
    readers = _readers(hint)
    for read, _ in readers:
        with contextlib.suppress(ValueError):
            return read(text)
    raise ConfigError.about(
        f"environment variable {variable}={text!r}",
        f"expected {' or '.join(words for _, words in readers)}",
        setting=variable,
        value=text,
    )


def _alternatives(hint: object) -> list[object]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for part in typing.get_args(hint) for inner in _alternatives(part)]
    return [hint]


def _readers(hint: object) -> list[tuple[Callable[[str], object], str]]:
    """Returns what reads the values of a type, each with what it takes, in words."""
    if hint == PORT:
        return [(read_ports, ALLOWED_PORTS)]
    if hint == EXPORT:
        return [(read_exports, ALLOWED_EXPORTS)]
    found: list[tuple[Callable[[str], object], str]] = []
    for part in _alternatives(hint):
        if typing.get_origin(part) is Literal:
            words = typing.get_args(part)
            found.append((functools.partial(_one_of, words), " or ".join(map(repr, words))))
        elif part in _READERS:
            found.append(_READERS[part])
    return found


def _one_of(words: tuple[object, ...], text: str) -> object:
    if text in words:
        return text
    truth = _truth(text)
    if truth not in words:
        raise ValueError(text)
    return truth


def _truth(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


_READERS: dict[object, tuple[Callable[[str], object], str]] = {
    bool: (_truth, "true or false"),
    int: (lambda text: int(text, 0), "a whole number"),
    float: (float, "a number"),
    str: (str, "text"),
}


def ports_of(port: object) -> range:
    """Returns the ports that a checked value of the setting `port` stands for."""
    low, _, high = str(port).partition("-")
    return range(int(low), int(high or low) + 1)


def read_ports(value: object) -> int | str:
    """Returns a port as a number, and a range of ports as "low-high"; raises ConfigError."""
    ends: list[object] = [value]
    if isinstance(value, str):
        ends = [int(end) if end.isascii() and end.isdigit() else end for end in value.split("-")]
    elif isinstance(value, (tuple, list)):
        ends = [plain(end) for end in value]
    low, high = ends[0] if ends else None, ends[-1] if ends else None
    within = is_whole(low) and is_whole(high) and 0 <= low <= high <= LAST_PORT
    if not within or len(ends) > 2 or (low == 0 and len(ends) == 2):
        raise ConfigError.of("port", ends[0] if len(ends) == 1 else value, ALLOWED_PORTS)
    return low if low == high else f"{low}-{high}"  # type: ignore[return-value]


def read_exports(value: object) -> tuple[object, ...] | None:
    """Returns what is exported to, one by one; raises ConfigError where one is unknown."""
    if value is None:
        return None
    listed = value if isinstance(value, (list, tuple)) else [value]
    found: list[object] = []
    for each in listed:
        if not isinstance(each, str):
            if not (hasattr(each, "write") and hasattr(each, "close")):
                raise ConfigError.of("export", each, ALLOWED_EXPORTS)
            found.append(each)
            continue
        for part in each.split(","):
            kind, colon, target = part.strip().partition(":")
            aimed = kind in EXPORTERS[:2]
            if kind not in EXPORTERS or {bool(colon), bool(target)} != {aimed}:
                near = suggestion(kind, EXPORTERS) if kind not in EXPORTERS else ""
                raise ConfigError.of("export", part.strip(), f"{ALLOWED_EXPORTS}{near}")
            found.append(part.strip())
    return tuple(found)
