"""How the ranks of a group agree which engine they use: one that is open, or a new one."""

from __future__ import annotations

import json

from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.transport import registry
from gradwire.transport.engines import SharedEngine
from gradwire.transport.meeting import Meeting
from gradwire.transport.notices import Notices
from gradwire.transport.open_engine import meet_servers, open_engine
from gradwire.transport.store import Store, identity_of
from gradwire.transport.texts import read_all, read_truth


def join_engine(meeting: Meeting, store: Store, group: str, settings: Settings) -> SharedEngine:
    """Returns the open engine of this group in this store, or opens one; release it after use.

    The call is collective: all ranks agree whether they reuse their engines or open new ones.

    Raises:
        ConfigError: The open engine runs with other transport settings and is in use; or what
            `open_engine` raises.
        RendezvousError: That is so on another rank; or an engine is in use that others have closed
            or lost; or what `open_engine` raises.
    """
    identity = identity_of(store, settings.rendezvous_timeout)
    try:
        engine = _take(meeting, identity, group, settings)
    except ConfigError as error:
        meeting.tell_failure(error)
        raise
    try:
        alike = _all_alike(meeting, engine)
    except BaseException:
        _give_back(engine)
        raise
    if engine is not None:
        if alike:
            return engine
        _give_back(engine)
        registry.drop(engine, used=False)
    engine = _open(meeting, store, identity, group, settings)
    with registry.lock:
        registry.open_engines.append(engine)
        registry.close_at_exit()
    return engine


def _take(meeting: Meeting, identity: str, group: str, settings: Settings) -> SharedEngine | None:
    with registry.lock:
        engine = _find(identity, group, meeting.endpoint, meeting.workers)
    if engine is not None and engine.settings.transport() != settings.transport():
        registry.collect_forgotten()
        if registry.drop(engine, used=False):
            engine = None
    if engine is not None and engine.failure():
        registry.drop(engine)
        engine = None
    if engine is None:
        return None
    _check_same_transport(engine.settings, settings)
    with registry.lock:
        engine.users += 1  # before the check, so that nobody closes it in between
        return engine if engine in registry.open_engines else None


def _all_alike(meeting: Meeting, engine: SharedEngine | None) -> bool:
    own = str(0 if engine is None else engine.session)
    if all(session == own for session in meeting.exchange(own)):
        return True
    if engine is not None and engine.users > 1:
        registry.collect_forgotten()
    used = json.dumps(engine is not None and engine.users > 1)
    every = read_all(meeting, "the use of an engine", meeting.exchange(used), read_truth)
    users = [rank for rank, uses in enumerate(every) if uses]
    if users:
        raise meeting.error(
            f"{meeting.describe(users)} still has an attachment over an engine that was closed, or "
            "failed, on another rank: detach it there first",
            users,
        )
    return False


def _give_back(engine: SharedEngine | None) -> None:
    if engine is not None:
        with registry.lock:
            engine.users -= 1


def _find(identity: str, group: str, rank: int, world_size: int) -> SharedEngine | None:
    wanted = (identity, group, rank, world_size)
    for engine in registry.open_engines:
        if (engine.store, engine.group, engine.rank, engine.world_size) == wanted:
            return engine
    return None


def _open(
    meeting: Meeting,
    store: Store,
    identity: str,
    group: str,
    settings: Settings,
) -> SharedEngine:
    rank, world_size = meeting.endpoint, meeting.workers
    # Engines of a store that is gone would keep port and threads.
    alike = (group, rank, world_size)
    stale = [old for old in registry.open_engines if (old.group, old.rank, old.world_size) == alike]
    if any(old.users > 0 for old in stale):
        registry.collect_forgotten()
    for old in stale:
        registry.drop(old, used=False)
    if settings.server_count:
        meeting = meet_servers(
            store,
            group,
            settings,
            endpoint=rank,
            workers=world_size,
            ranks=meeting.names.ranks,
        )
    opened = open_engine(store, meeting, settings)
    return SharedEngine(
        opened.engine,
        store=identity,
        group=group,
        rank=rank,
        world_size=world_size,
        settings=settings,
        session=opened.session,
        datagram=opened.datagram,
        meeting=opened.meeting,
        notices=Notices(store, opened.session, rank, meeting.names),
        tag=opened.tag,
    )


def _check_same_transport(open_: Settings, wanted: Settings) -> None:
    for name, value in wanted.transport().items():
        have = open_.transport()[name]
        if value != have:
            raise ConfigError.of(
                name,
                value,
                f"this process's engine already runs with {name}={have!r}, and one engine "
                "serves all attachments of a group; use the same value",
            )
