"""Flows over shared ports and uplinks carry their max-min fair shares."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_lab.scenario.network import Topology

__all__ = ["carried", "crossing_flows", "route"]

Link = tuple[str, str, int]
"""A link is a port or an uplink, with its direction and its host or leaf."""


def crossing_flows(topology: Topology) -> list[tuple[int, int]]:
    """Choose one flow out of each host and one into it.

    Where there are leaves, flows go to another leaf, so that uplinks are busy as well; some stay
    within theirs where leaves differ in size.
    """
    hosts = topology.hosts
    step = 1 if topology.spread is None else max(topology.spread.sizes(hosts))
    return [(host, (host + step) % hosts) for host in range(hosts)]


def route(topology: Topology, source: int, target: int) -> list[Link]:
    """Return the links whose queues a flow crosses."""
    spread, hosts = topology.spread, topology.hosts
    links: list[Link] = [("port", "up", source), ("port", "down", target)]
    if spread is not None:
        home, away = spread.of(source, hosts), spread.of(target, hosts)
        if home != away:
            links += [("uplink", "up", home), ("uplink", "down", away)]
    return links


def carried(topology: Topology, flows: Sequence[tuple[int, int]]) -> float:
    """Return the bits per second of all flows together, when their shares are max-min fair.

    They are found by filling: all flows grow alike until a link is full, and its flows then keep
    their rate (Bertsekas and Gallager, Data Networks, section 6.5.2).
    """
    routes = [route(topology, source, target) for source, target in flows]
    left = {link: float(_rate(topology, link)) for each in routes for link in each}
    total, growing = 0.0, set(range(len(flows)))
    while growing:
        users = {link: sum(link in routes[n] for n in growing) for link in left}
        step = min(left[link] / count for link, count in users.items() if count)
        total += step * len(growing)
        for link, count in users.items():
            left[link] -= step * count
        full = {link for link, count in users.items() if count and left[link] <= 1e-6 * step}
        growing = {n for n in growing if not full & set(routes[n])}
    return total


def _rate(topology: Topology, link: Link) -> int:
    kind, _, number = link
    if kind == "uplink" and topology.spread is not None:
        return topology.spread.uplink.rate
    return topology.port(number).rate
