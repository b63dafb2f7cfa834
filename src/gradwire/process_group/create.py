"""Makes a process group for torch, once all its members agree that they can take part."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from gradwire.core.environment import check_environment
from gradwire.core.errors import ConfigError, EngineMissingError, RendezvousError
from gradwire.core.settings import OF_ENGINES, Settings
from gradwire.policies.registry import all_names
from gradwire.process_group import BACKEND
from gradwire.process_group.backend import GradwireBackend
from gradwire.process_group.group import GradwireGroup
from gradwire.training.groups import Group
from gradwire.transport.introductions import agree
from gradwire.transport.native import load_engine

TAKES_BACKENDS = "2.14"
"""The first version of torch in which a backend for one device can be made in Python."""

OPTIONS = (
    *(name for name in OF_ENGINES if name != "route"),
    "key",
    "key_file",
    "rendezvous_timeout",
    "timeout",
    "min_bytes",
)
"""The settings that a process group has; all others belong to attached modules."""


def create(options: Any, pg_options: object) -> GradwireGroup | GradwireBackend:
    """Makes a group, or a backend for one device of a group, as torch asks for it; collective.

    Args:
        pg_options: What the user gave as `pg_options`: settings, a mapping of them, or None for
            those of the default group.

    Returns:
        The group, or where the backend string names another one beside this, the backend.

    Raises:
        ConfigError: The backend string names another backend, and this torch knows no backends in
            Python; or a setting is impossible.
        EngineMissingError: The engine was not built.
        RendezvousError: Another member failed, or has other settings; the error names it.
    """
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    seconds = options.timeout.total_seconds()
    name = f"group-{options.group_id}"
    group = Group(options.store, name, options.group_rank, members, seconds)
    with contextlib.closing(group.meeting("create", seconds)) as meeting:
        try:
            beside = _beside()
            check_environment(all_names())
            if beside and isinstance(pg_options, Backend.Options):
                pg_options = None  # the other backend's: torch hands them to each of the string
            settings = _settings(pg_options)
            load_engine()
            agree(meeting, {"min_bytes": settings.min_bytes})
        except (ConfigError, EngineMissingError, RendezvousError) as error:
            # Rank 0 often hosts the store, so it stays until the others have read the answers.
            meeting.tell_failure(error)
            raise
    made = GradwireGroup(group, settings, options.timeout, default=dist.group.WORLD is None)
    return GradwireBackend(made) if beside else made


def _settings(pg_options: object) -> Settings:
    if pg_options is None:
        pg_options = _default_settings()
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
            f"a process group of backend {BACKEND!r} has no servers; use route='sharded', or "
            "attach modules over another backend",
        )
    return settings


def _default_settings() -> Settings | Mapping[str, object]:
    world = dist.group.WORLD
    if world is None or isinstance(world, GradwireGroup):
        return {} if world is None else world.settings
    for device in world._device_types:
        backend = world._get_backend(device)
        if isinstance(backend, GradwireBackend):
            return backend.settings
    return {}


def _beside() -> bool:
    """Returns whether the backend string names another backend for another device.

    Raises:
        ConfigError: It does, and torch would put one of the two in the other's place without a
            word.
    """
    text = _backend_string()
    others = [part for part in text.split(",") if ":" in part and part.split(":")[1] != BACKEND]
    if others and torch.__version__ < TAKES_BACKENDS:
        raise ConfigError.of(
            "backend",
            text,
            f"torch {torch.__version__} makes {BACKEND!r} the only backend of its group, and "
            f"{others[0]!r} would never be used; give {BACKEND!r} alone, take torch "
            f"{TAKES_BACKENDS} or later, or attach modules over another backend",
        )
    for other in others:
        # A group keeps its backends by their types, and all from outside of torch are of one.
        known = dist.Backend.backend_type_map.get(other.split(":")[1])
        if known in (None, dist.ProcessGroup.BackendType.CUSTOM):
            raise ConfigError.of(
                "backend",
                text,
                f"torch would take {BACKEND!r} and {other!r} for one and the same backend of the "
                f"group; give {BACKEND!r} beside a backend of torch's own, such as nccl or gloo, "
                "or attach modules over another backend",
            )
    return bool(others)


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
