"""Opening an engine: the endpoints meet in the store, then over UDP."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from gradwire import rendezvous
from gradwire.addresses import (
    host_identity,
    local_addresses,
    reachable_interfaces,
    scoped,
)
from gradwire.errors import ConfigError, RendezvousError
from gradwire.native import load_engine
from gradwire.settings import Settings

if TYPE_CHECKING:
    from gradwire import _engine

__all__ = ["OpenEngine", "all_open", "meet_servers", "meet_workers", "open_engine"]


class OpenEngine:
    """An engine that has met all its peers. For communicators and `gradwire server`."""

    def __init__(
        self, engine: _engine.Engine, session: int, datagram: int, meeting: rendezvous.Meeting
    ) -> None:
        self.engine = engine
        self.session = session
        self.datagram = datagram
        self.meeting = meeting


def meet_servers(
    meeting: rendezvous.Meeting, store: rendezvous.Store, group: str, settings: Settings
) -> rendezvous.Meeting:
    """The meeting of workers and servers that the workers, who have met, open; collective.

    It is in the store under all prefixes, for servers know no process group.
    """
    base = rendezvous.base_store(store)
    number = str(base.add(_meetings(group), 1)) if meeting.endpoint == 0 else ""
    return rendezvous.Meeting(
        base,
        group,
        endpoint=meeting.endpoint,
        workers=meeting.workers,
        servers=settings.server_count,
        timeout_s=settings.rendezvous_timeout,
        number=int(meeting.exchange("number of the meeting with servers", number)[0]),
        ranks=meeting.names.ranks,
    )


def meet_workers(
    store: rendezvous.Store, group: str, index: int, workers: int, settings: Settings
) -> rendezvous.Meeting:
    """The meeting that the workers have opened and that waits for server `index`.

    One in which this server, maybe in a process that is gone, took part already, or which others
    gave up, is over. Raises RendezvousError when none comes within the time-out.
    """
    base = rendezvous.base_store(store)
    deadline = time.monotonic() + settings.rendezvous_timeout
    while True:
        with rendezvous.store_errors():
            number = base.add(_meetings(group), 0)
        if number:
            meeting = rendezvous.Meeting(
                base,
                group,
                endpoint=workers + index,
                workers=workers,
                servers=settings.server_count,
                timeout_s=settings.rendezvous_timeout,
                number=number,
            )
            if meeting.awaits_me("introduction"):
                return meeting
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"server {index}: no workers came within {settings.rendezvous_timeout:g} s; they "
                "come when they attach; setting rendezvous_timeout",
                list(range(workers)),
            )
        time.sleep(0.05)


def all_open(opened: OpenEngine) -> None:
    """Waits until all endpoints have opened and reached each other; raises RendezvousError.

    Longer than `open_engine` waits for answers over UDP, so that it is told what had none.
    """
    opened.meeting.exchange("opened", "1", 1.5 * opened.meeting.timeout_s + 1.0)


def _meetings(group: str) -> str:
    return f"gradwire/{group}/meetings"


def open_engine(
    store: rendezvous.Store, meeting: rendezvous.Meeting, settings: Settings
) -> OpenEngine:
    """Meets the other endpoints of the meeting, opens the engine and connects it; collective.

    Raises ConfigError for an address or port that cannot be had, and RendezvousError naming the
    endpoints that are absent, differ or do not answer.
    """
    native = load_engine()
    endpoint, workers, servers = meeting.endpoint, meeting.workers, meeting.servers
    try:
        places = local_addresses(settings.interface, rendezvous.store_host(store))
    except ConfigError as error:
        meeting.tell_failure("introduction", str(error))
        raise
    everybody = meeting.introduce(
        rendezvous.Introduction(
            endpoint=endpoint,
            protocol=int(native.PROTOCOL_VERSION),
            addresses=places,
            port=settings.port,
            datagram=settings.datagram,
            host=socket.gethostname(),
            identity=host_identity(),
            interfaces=reachable_interfaces(),
            configuration={"route": settings.route, "servers": servers, "workers": workers},
            session=rendezvous.new_session() if endpoint == 0 else 0,
        )
    )
    chosen = rendezvous.check_introductions(meeting, everybody)
    datagram = rendezvous.agree_datagram(meeting, everybody, chosen)
    own = chosen[endpoint]
    session = everybody[0].session
    try:
        engine = native.Engine(
            endpoint=endpoint,
            workers=workers,
            servers=servers,
            session=session,
            address=own.bound,
            port=settings.port,
            datagram_bytes=datagram,
            peer_timeout_ns=int(settings.peer_timeout * 1e9),
            memory_limit=settings.memory_limit,
            drop_rate=settings.drop_rate,
            drop_burst=settings.drop_burst,
            drop_seed=settings.drop_seed,
            dscp=settings.dscp,
            ecn=settings.ecn,
            ranks=meeting.names.ranks,
        )
    except (OSError, ValueError) as error:
        who = meeting.describe([endpoint])
        what = f"cannot open UDP {own.bound} port={settings.port}: {error}"
        meeting.tell_failure("port", what)
        if isinstance(error, OSError):
            allowed = "choose another port= or 0 for any free one"
            raise ConfigError(
                f"{who} {what}; {allowed}", setting="port", value=settings.port, allowed=allowed
            ) from error
        raise ConfigError(f"{who} {what}", setting="port", value=settings.port) from error
    try:
        ports = meeting.exchange("port", str(engine.address[1]))
        addresses = [
            (scoped(place.address, own.interface), int(port))
            for place, port in zip(chosen, ports, strict=True)
        ]
        engine.connect(addresses)
        _wait_connected(engine, meeting, everybody, addresses, settings.rendezvous_timeout)
    except BaseException as error:
        engine.close()
        for topic in ("port", "opened"):  # whichever the others wait on
            meeting.tell_failure(topic, str(error) or type(error).__name__)
        raise
    return OpenEngine(engine, session, datagram, meeting)


def _wait_connected(
    engine: _engine.Engine,
    meeting: rendezvous.Meeting,
    everybody: list[rendezvous.Introduction],
    addresses: list[tuple[str, int]],
    timeout_s: float,
) -> None:
    """Raises RendezvousError naming who has not answered, and why the engine failed if it did."""
    deadline = time.monotonic() + timeout_s
    while missing := list(engine.wait_connected(200_000_000)):
        failure = engine.failure()
        meeting.check_failures("opened")
        if time.monotonic() < deadline and not failure:
            continue
        where = ", ".join(
            f"{meeting.describe([m])} at {addresses[m][0]}:{addresses[m][1]} on "
            f"{everybody[m].host!r}"
            for m in missing
        )
        if failure:
            raise meeting.error(
                f"the engine failed before {where} answered over UDP: {failure.text}", missing
            )
        raise meeting.error(
            f"no answer over UDP from {where} within {timeout_s:g} s: a firewall, the wrong "
            "network, or a path that does not carry the longest datagrams; set interface= or "
            "GRADWIRE_INTERFACE, port= for a fixed port, datagram= for shorter ones",
            missing,
        )
