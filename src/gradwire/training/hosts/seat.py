"""Seat: this rank's place on its host, which the ranks agree on when a module is attached."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass

from gradwire.core.settings import Settings
from gradwire.training.groups import Group, HostRanks
from gradwire.transport.addresses import host_identity
from gradwire.transport.host_link import HostLink, Listener, check_memory, connect, hosts_of
from gradwire.transport.meeting import Meeting
from gradwire.transport.texts import read_all, read_list, read_text, read_whole

log = logging.getLogger("gradwire")

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
        return self.ranks[self.place]

    @property
    def leads(self) -> bool:
        return self.place == 0

    @property
    def host(self) -> HostRanks:
        return HostRanks(self.ranks if self.leads else (), self.members)

    @property
    def share(self) -> float:
        """What the sum of the host's gradients is multiplied by.

        It makes the mean over hosts the mean over ranks, also where hosts have different numbers
        of them.
        """
        return len(self.hosts) / len(self.members)


def take_seat(group: Group, meeting: Meeting, settings: Settings) -> Seat | None:
    """Agrees with all ranks which of them are on one host, and connects those; collective.

    The kernel may refuse sockets or memory between ranks of a host (seccomp, SELinux, a limit of
    file descriptors). That is tried here, where all ranks can still decide alike.

    Returns:
        The seat; None where each rank sends for itself: where that is set, beside servers, where
        there is one host only, where no host has several ranks, and where hosts="auto" and a kernel
        refuses.

    Raises:
        RendezvousError: A kernel refuses and hosts=True; the error names the ranks.
    """
    if settings.hosts is False or settings.server_count or group.world_size < 3:
        return None
    with contextlib.ExitStack() as done, contextlib.ExitStack() as undo:
        trouble, address, listener = "", "", None
        try:
            check_memory()
            listener = done.enter_context(contextlib.closing(Listener()))
            address = listener.address
        except OSError as error:
            trouble = f"cannot lead its host: {error}"
        texts = meeting.exchange(json.dumps([host_identity(), address, trouble]))
        offers = read_all(meeting, "what is known of the host", texts, _offer)
        hosts = hosts_of([identity for identity, _, _ in offers])
        if len(hosts) in (1, group.world_size):
            return None
        leaders = [host[0] for host in hosts if len(host) > 1]
        troubles = {leader: offers[leader][2] for leader in leaders if offers[leader][2]}
        own = next(host for host in hosts if group.rank in host)
        link: HostLink | None = None
        if not troubles:
            try:
                link = _link(meeting, listener, offers[own[0]][1], own, settings)
                trouble = ""
            except _TroubleError as error:
                trouble = str(error)
                meeting.hurry()
            if link is not None:
                undo.callback(link.close)
            texts = meeting.exchange(trouble, CONNECTIONS * meeting.timeout_s)
            troubles = {rank: text for rank, text in enumerate(texts) if text}
        if troubles or link is None:
            _refuse(meeting, settings, troubles)
            return None
        undo.pop_all()
    ranks = tuple(group.ranks[rank] for rank in own)
    return Seat(own.index(group.rank), hosts, ranks, group.ranks, link)


def _offer(value: object) -> tuple[str, str, str]:
    """Reads the identity of a rank's host, the address to lead it by, and what hinders that."""
    identity, address, trouble = map(read_text, read_list(value))
    return identity, address, trouble


class _TroubleError(Exception):
    """This rank cannot be connected within its host; the text says why."""


IN_VAIN = "waited in vain"
"""The trouble of a rank that gave up because another one of the job has trouble."""


def _link(
    meeting: Meeting,
    listener: Listener | None,
    address: str,
    own: tuple[int, ...],
    settings: Settings,
) -> HostLink:
    """Connects this rank within its host, whose first rank leads it, and tries shared memory."""
    here, timeout_s = meeting.endpoint, settings.rendezvous_timeout
    leads = here == own[0]

    def stop() -> bool:
        meeting.check_failures()
        return meeting.hurried()

    if len(own) == 1:
        return HostLink({})
    with contextlib.ExitStack() as undo:
        try:
            if leads:
                assert listener is not None  # else this rank has said that it cannot lead
                link = listener.accept(range(1, len(own)), timeout_s, stop)
            else:
                link = connect(address, own.index(here), timeout_s)
            undo.callback(link.close)
            if leads:
                _check_present(meeting, link, own, settings)
                link.offer_trial()
            else:
                link.take_trial(timeout_s, stop)
        except EOFError as error:
            raise _TroubleError(IN_VAIN) from error
        except OSError as error:
            leader = f"{meeting.describe(own[:1])}, which leads its host"
            what = "leads its host" if leads else f"cannot connect to {leader}"
            raise _TroubleError(f"{what}: {error}") from error
        undo.pop_all()
        return link


def _check_present(
    meeting: Meeting, link: HostLink, own: tuple[int, ...], settings: Settings
) -> None:
    """Raises EOFError or OSError where not all ranks of a host have connected to its leader."""
    absent = [rank for place, rank in enumerate(own) if place and place not in link.places]
    if absent and meeting.hurried():
        raise EOFError
    if absent:
        raise OSError(
            f"{meeting.describe(absent)} did not connect to it (rendezvous_timeout="
            f"{settings.rendezvous_timeout:g} s, {settings.origin('rendezvous_timeout')})"
        )


def _refuse(meeting: Meeting, settings: Settings, troubles: dict[int, str]) -> None:
    """Raises, or logs on one rank, that ranks of a host cannot sum among themselves."""
    causes = {rank: text for rank, text in troubles.items() if text != IN_VAIN} or troubles
    named = "; ".join(f"{meeting.describe([rank])} {text}" for rank, text in causes.items())
    if settings.hosts is True:
        raise meeting.error(
            f"hosts=True: ranks of one host cannot sum among themselves: {named}; hosts='auto' or "
            "False lets every rank send its own gradient",
            causes,
        )
    if meeting.endpoint == 0:
        log.warning(
            "ranks of one host cannot sum among themselves: %s; every rank sends its own gradient, "
            "as with hosts=False",
            named,
        )


def share_number(meeting: Meeting, number: int) -> int:
    """Returns the number of the attachment, which rank 0 knows; collective.

    Followers wait here until the leaders have opened their engines, in which each one waits up to
    its own time-outs for the others.

    Args:
        number: What a leader's communicator has taken.
    """
    texts = meeting.exchange(str(number), OPENINGS * meeting.timeout_s)
    return read_all(meeting, "the number", texts[:1], read_whole)[0]
