"""Seat: this rank's place on its host, which the ranks agree on when a module is attached."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from gradwire.core.settings import Settings
from gradwire.training.groups import Group, Host
from gradwire.transport.addresses import host_identity
from gradwire.transport.host_link import HostLink, Listener, connect, hosts_of
from gradwire.transport.rendezvous import Meeting

__all__ = ["Seat", "share_number", "take_seat"]

CONNECTIONS = 2
"""Rendezvous time-outs that connecting within a host may take: the connections, an exchange."""

OPENINGS = 4
"""Rendezvous time-outs that opening an engine may take: an exchange, the connections, another."""


@dataclass(frozen=True)
class Seat:
    """A rank's place on its host, where ranks of one host sum among themselves.

    Attributes:
        place: Its place among the ranks of its host, 0 for the leader.
        hosts: The ranks of each host in the group.
        ranks: The ranks of its host in the job, in order.
        members: The ranks of all hosts in the job.
        link: Its connections with other ranks of its host.
    """

    place: int
    hosts: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    members: tuple[int, ...]
    link: HostLink

    @property
    def rank(self) -> int:
        """This rank, in the job."""
        return self.ranks[self.place]

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.place == 0

    @property
    def host(self) -> Host:
        """The ranks that this rank speaks for."""
        return Host(self.ranks if self.leads else (), self.members)

    @property
    def share(self) -> float:
        """What the sum of the host's gradients is multiplied by.

        It makes the mean over hosts the mean over ranks, also where hosts have different numbers
        of them.
        """
        return len(self.hosts) / len(self.members)


def take_seat(group: Group, meeting: Meeting, settings: Settings) -> Seat | None:
    """Agrees with all ranks which of them are on one host, and connects those; collective.

    Args:
        group: The group.
        meeting: A meeting of its members.
        settings: The settings.

    Returns:
        The seat; None where each rank speaks for itself: where that is set, beside servers, where
        there is one host only, and where no host has several ranks.

    Raises:
        RendezvousError: Ranks of a host have not connected; the error names them.
    """
    if settings.hosts is False or settings.server_count or group.world_size < 3:
        return None
    with contextlib.closing(Listener()) as listener:
        texts = meeting.exchange(json.dumps([host_identity(), listener.address]))
        places = [json.loads(text) for text in texts]
        hosts = hosts_of([identity for identity, _ in places])
        if len(hosts) in (1, group.world_size):
            return None
        own = next(host for host in hosts if group.rank in host)
        place = own.index(group.rank)
        if place > 0:
            link = _connected(meeting, places[own[0]][1], own, settings)
        else:
            link = _accepted(meeting, listener, own, settings)
    try:
        meeting.exchange("", CONNECTIONS * meeting.timeout_s)
    except BaseException:
        link.close()
        raise
    ranks = tuple(group.ranks[rank] for rank in own)
    return Seat(place, hosts, ranks, group.ranks, link)


def _connected(
    meeting: Meeting, address: str, own: tuple[int, ...], settings: Settings
) -> HostLink:
    """Connects this rank with the leader of its host, the first of its host's ranks."""
    here = meeting.endpoint
    try:
        return connect(address, own.index(here), settings.rendezvous_timeout)
    except OSError as error:
        raise meeting.error(
            f"{meeting.describe([here])} cannot connect to {meeting.describe(own[:1])}, which "
            f"leads its host: {error}; hosts=False lets every rank use the network",
            [here],
        ) from error


def _accepted(
    meeting: Meeting, listener: Listener, own: tuple[int, ...], settings: Settings
) -> HostLink:
    """Connects the leader, which is the first of its host's ranks, with the others."""
    timeout_s = settings.rendezvous_timeout
    link = listener.accept(range(1, len(own)), timeout_s)
    absent = [rank for place, rank in enumerate(own) if place and place not in link.places]
    if absent:
        link.close()
        origin = settings.origin("rendezvous_timeout")
        raise meeting.error(
            f"{meeting.describe(own[:1])} leads its host, and {meeting.describe(absent)} did not "
            f"connect to it (rendezvous_timeout={timeout_s:g} s, {origin}); hosts=False lets every "
            "rank use the network",
            absent,
        )
    return link


def share_number(meeting: Meeting, number: int) -> int:
    """Returns the number of the attachment, which rank 0 knows; collective.

    Followers wait here until the leaders have opened their engines, in which each one waits up to
    its own time-outs for the others.

    Args:
        meeting: A meeting of all ranks.
        number: What a leader's communicator has taken.

    Raises:
        RendezvousError: A rank has failed; the error names it.
    """
    return int(meeting.exchange(str(number), OPENINGS * meeting.timeout_s)[0])
