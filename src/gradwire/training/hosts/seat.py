"""Seat: this rank's place on its host, which the ranks agree on when a module is attached."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from gradwire.core.errors import RendezvousError
from gradwire.core.settings import Settings
from gradwire.training.groups import Group, Host
from gradwire.transport.addresses import host_identity
from gradwire.transport.host_link import HostLink, Listener, connect, hosts_of
from gradwire.transport.rendezvous import Meeting

__all__ = ["Seat", "share_number", "sharing_meeting", "take_seat"]

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
        RendezvousError: Ranks of this host have not connected.
    """
    if settings.hosts is False or settings.server_count or group.world_size < 3:
        return None
    with contextlib.closing(Listener()) as listener:
        told = [
            json.loads(t) for t in meeting.exchange(json.dumps([host_identity(), listener.address]))
        ]
        hosts = hosts_of([identity for identity, _ in told])
        if len(hosts) in (1, group.world_size):
            return None
        own = next(host for host in hosts if group.rank in host)
        place = own.index(group.rank)
        ranks = tuple(group.ranks[rank] for rank in own)
        try:
            link = _connected(listener, told[own[0]][1], place, ranks, meeting.timeout_s)
        except BaseException as error:
            sharing_meeting(group, settings).tell_failure(error)  # where the others wait by now
            raise
    return Seat(place, hosts, ranks, group.ranks, link)


def _connected(
    listener: Listener, address: str, place: int, ranks: tuple[int, ...], timeout_s: float
) -> HostLink:
    """Connects this rank with its host's leader, or the leader with its followers."""
    if place > 0:
        return connect(address, place, timeout_s)
    try:
        return listener.accept(range(1, len(ranks)), timeout_s)
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {ranks[0]} leads its host, and not all of ranks "
            f"{', '.join(map(str, ranks[1:]))} connected within {timeout_s:g} s",
            ranks[1:],
        ) from error


def sharing_meeting(group: Group, settings: Settings) -> Meeting:
    """Makes the meeting in which ranks that sum within hosts `share_number`."""
    return group.meeting("hosts", settings.rendezvous_timeout)


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
