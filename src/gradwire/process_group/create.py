"""Makes a process group for torch, once all its members agree that they can take part."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError, EngineMissingError
from gradwire.core.settings import Settings, check_environment
from gradwire.process_group.group import GradwireGroup
from gradwire.training.configure import all_names
from gradwire.training.groups import Group
from gradwire.transport import rendezvous
from gradwire.transport.native import load_engine

__all__ = ["create"]

OPTIONS = (
    "interface",
    "port",
    "datagram",
    "rendezvous_timeout",
    "peer_timeout",
    "timeout",
    "memory_limit",
    "drop_rate",
    "drop_burst",
    "drop_seed",
    "dscp",
    "ecn",
    "min_bytes",
)
"""The settings that a process group has; all others belong to attached modules."""


def create(options: Any, pg_options: object) -> GradwireGroup:
    """Makes a group, as torch asks for it; collective.

    Args:
        options: What torch says of the group (`_DistributedBackendOptions`).
        pg_options: What the user gave as `pg_options`: settings, a mapping of them, or None for
            those of the default group.

    Returns:
        The group.

    Raises:
        ConfigError: The backend string is a composite, or a setting is impossible.
        EngineMissingError: The engine was not built.
        RendezvousError: Another member failed, or has other settings; the error names it.
    """
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    seconds = options.timeout.total_seconds()
    name = f"group-{options.group_id}"
    group = Group(options.store, name, options.group_rank, members, seconds)
    with contextlib.closing(group.meeting("create", seconds)) as meeting:
        try:
            _check_alone()
            check_environment(all_names())
            settings = _settings(pg_options)
            load_engine()
        except (ConfigError, EngineMissingError) as error:
            meeting.tell_failure(error)
            raise
        rendezvous.agree(meeting, {"min_bytes": settings.min_bytes})
    return GradwireGroup(group, settings, options.timeout)


def _settings(pg_options: object) -> Settings:
    if pg_options is None:
        world = dist.group.WORLD
        pg_options = world.settings if isinstance(world, GradwireGroup) else {}
    if isinstance(pg_options, Settings):
        settings = pg_options
    elif isinstance(pg_options, Mapping):
        for name, value in pg_options.items():
            if name not in OPTIONS:
                raise ConfigError.of(
                    f"pg_options[{name!r}]",
                    value,
                    f"the settings of a process group are {', '.join(OPTIONS)}",
                )
        settings = Settings.build(pg_options)
    else:
        raise ConfigError.of(
            "pg_options",
            pg_options,
            "a mapping of settings, as in {'interface': 'eth1'}, or gradwire.Settings",
        )
    if settings.route != "sharded":
        raise ConfigError.of(
            "route",
            settings.route,
            "a process group of backend 'gradwire' has no servers; use route='sharded', or attach "
            "modules over another backend",
        )
    return settings


def _check_alone() -> None:
    """Raises ConfigError where the backend string names another backend for another device.

    torch replaces the whole group by a Python group without a word, so the other backend would
    never be used.
    """
    text = _backend_string()
    others = [part for part in text.split(",") if ":" in part and part.split(":")[1] != "gradwire"]
    if others:
        raise ConfigError.of(
            "backend",
            text,
            f"torch {torch.__version__} makes a Python backend the only one of its group, and "
            f'{others[0]!r} would never be used; use "gradwire" alone, or another backend with '
            "gradwire.attach for the gradients",
        )


def _backend_string() -> str:
    """Returns the backend string for which torch makes a group; "" where it cannot be found.

    torch hands only the device's own store to the function that makes a group, hence the look at
    the variables of the function that calls it.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_new_process_group_helper":
            return str(frame.f_locals.get("backend", "")).lower()
    return ""
