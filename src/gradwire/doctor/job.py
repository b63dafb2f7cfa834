"""All hosts of a job probe each other when `gradwire doctor` runs on every rank.

The ranks meet through the job's store, as in `attach`, with the same checks and the same errors.
The lowest rank of each host measures for it. Every rank learns all results.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.core.errors import ConfigError, GradwireError, RendezvousError
from gradwire.core.settings import Settings
from gradwire.core.words import count
from gradwire.doctor.findings import Finding, as_json, lines, summary, table, wrapped
from gradwire.doctor.host import Host, check_host
from gradwire.doctor.judge import rate_text, rtt_text
from gradwire.doctor.pairs import Pair, measure_all, pair_findings
from gradwire.doctor.place import Place
from gradwire.server import open_store
from gradwire.transport.addresses import (
    LocalAddress,
    host_identity,
    reachable_interfaces,
    with_port,
)
from gradwire.transport.introductions import (
    Introduction,
    agree_datagram,
    check_introductions,
    introduce,
)
from gradwire.transport.meeting import Meeting
from gradwire.transport.store import BoundedStore, Store
from gradwire.transport.texts import read_all, read_mapping

LEAVE_S = 5.0
"""How long rank 0, whose process may host the store, waits for the others at the end."""


@dataclass
class Examined:
    """What `gradwire doctor` found out about a job; the same on all ranks.

    Attributes:
        findings: The findings, those of hosts first.
        met: Whether the ranks met, and stayed until the end.
        hosts: The name of each host by the rank that measures for it.
        ranks: The ranks of each host by the rank that measures for it.
        addresses: The address that each host uses, by the same.
        leave: Leaves the job; rank 0 waits for the others, because it may host the store.
    """

    findings: list[Finding] = field(default_factory=list)
    met: bool = False
    hosts: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, list[int]] = field(default_factory=dict)
    addresses: dict[int, LocalAddress] = field(default_factory=dict)
    versions: list[dict[str, str]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    leave: Callable[[], None] = lambda: None

    def as_json(self) -> dict[str, Any]:
        hosts = [
            {
                "name": self.hosts[first],
                "ranks": self.ranks[first],
                "address": asdict(self.addresses[first]) if first in self.addresses else None,
                "versions": self.versions[first],
            }
            for first in self.hosts
        ]
        pairs = [
            {
                "from": self.hosts[pair.prober],
                "to": self.hosts[pair.responder],
                "measurement": asdict(pair.found),
            }
            for pair in self.pairs
        ]
        return {**as_json(self.findings), "hosts": hosts, "pairs": pairs}

    def text(self) -> str:
        parts = []
        if self.hosts:
            ranks = sum(map(len, self.ranks.values()))
            hosts = count(len(self.hosts), "host")
            parts.append(f"gradwire doctor: {ranks} ranks on {hosts}\n")
            for first, name in self.hosts.items():
                own = self.addresses.get(first)
                where = ""
                if own is not None:
                    where = f" at {own.address} on {own.interface}, MTU {own.mtu or 'unknown'}"
                listed = f"{name}: {_ranges(self.ranks[first])}{where}"
                parts += [f"  {line}" for line in wrapped(listed, 2)]
            parts.append("")
        parts += lines(self.findings)
        if self.pairs:
            parts += ["", *self._table()]
        return "\n".join([*parts, "", summary(self.findings)])

    def _table(self) -> list[str]:
        """Returns the table host × host: rate and loss from each host to each, and the rtt."""
        cells: dict[tuple[int, int], str] = {}
        for pair in self.pairs:
            rtt = pair.found.rtt_s
            for way, ends in (
                (pair.found.there, (pair.prober, pair.responder)),
                (pair.found.back, (pair.responder, pair.prober)),
            ):
                cells[ends] = (
                    f"{rate_text(way.rate)}, {way.loss:.1%}, {rtt_text(rtt)}" if way.rate else "–"
                )
        rows = [["from", *self.hosts.values()]]
        for first, name in self.hosts.items():
            unknown = {to: "" if first == to else "–" for to in self.hosts}
            rows.append([name, *(cells.get((first, to), unknown[to]) for to in self.hosts)])
        return [*table(rows), "", "  Each cell: rate, loss, smallest round-trip time."]


def _ranges(ranks: list[int]) -> str:
    """Names rising ranks as text: "rank 3", "ranks 0–3, 6"."""
    steps = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in run] for _, run in steps]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"


def examine(place: Place, say: Callable[[str], None] = lambda text: None) -> Examined:
    """Meets the other ranks, checks every host, and measures the path between each two.

    Every wait has an end; what fails is a finding.

    Args:
        say: Gets what the ranks are about to do, as far as it takes seconds.
    """
    host = check_host(place.address)
    result = Examined()
    settings = host.settings
    try:
        store = _store(place, settings.rendezvous_timeout)
    except (ConfigError, GradwireError) as error:
        text = f"{error}."
        if not place.hosted and place.rank != 0:
            text += " rank 0 hosts it, and is absent or cannot be reached over TCP."
        result.findings = [Finding("problem", "store", text)]
        return result
    meeting = Meeting(
        store,
        "doctor",
        endpoint=place.rank,
        workers=place.world,
        servers=0,
        timeout_s=settings.rendezvous_timeout,
    )
    try:
        _examine(result, meeting, host, settings, say)
        result.leave = lambda: _leave(store, meeting, place)
    except (ConfigError, RendezvousError, OSError) as error:
        about = "ranks" if isinstance(error, RendezvousError) else "settings"
        result.findings.append(Finding("problem", about, f"{error}."))
        result.met = False
    finally:
        meeting.close()
    return result


def _store(place: Place, timeout_s: float) -> Store:
    try:
        from torch._C._distributed_c10d import TCPStore
    except ImportError as error:
        raise GradwireError(
            f"the ranks of a job meet through torch, which cannot be imported ({error}); "
            "`gradwire probe` needs no torch"
        ) from error
    if place.hosted or place.rank != 0:
        opened: Store = open_store(with_port(place.address, place.port), timeout_s)
        return opened
    import datetime

    try:
        made: Store = TCPStore(
            place.address,
            place.port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=max(1.0, timeout_s)),
        )
    except RuntimeError as error:
        raise GradwireError(
            f"rank 0 cannot host the job's store at {with_port(place.address, place.port)}: {error}"
        ) from error
    return made


def _leave(store: Store, meeting: Meeting, place: Place) -> None:
    store = BoundedStore(store, LEAVE_S)
    with contextlib.suppress(RuntimeError):
        key = f"{meeting.prefix}/done"
        until = time.monotonic() + LEAVE_S
        done = store.add(key, 1)
        while place.rank == 0 and done < place.world and time.monotonic() < until:
            time.sleep(0.02)
            done = store.add(key, 0)


# ---------------------------------------------------------------------------- the meeting


def _examine(
    result: Examined,
    meeting: Meeting,
    host: Host,
    settings: Settings,
    say: Callable[[str], None],
) -> None:
    rank = meeting.endpoint
    everybody = introduce(
        meeting,
        Introduction(
            endpoint=rank,
            protocol=int(host.versions["protocol"] or 0),
            addresses=host.addresses,
            port=settings.port,
            datagram=settings.datagram,
            host=socket.gethostname(),
            identity=host_identity(),
            interfaces=reachable_interfaces() if host.addresses else {},
            configuration={"cores": settings.cores},
        ),
    )
    mine = {
        "findings": [asdict(each) for each in host.findings],
        "versions": host.versions,
        "agreed": host.agreed,
    }
    texts = meeting.exchange(json.dumps(mine, default=str))
    reports = read_all(meeting, "the report", texts, read_mapping)
    result.met = True
    result.versions = [report["versions"] for report in reports]
    for each in everybody:
        first = next(e.endpoint for e in everybody if e.identity == each.identity)
        result.ranks.setdefault(first, []).append(each.endpoint)
    result.hosts = host_names([everybody[first] for first in result.ranks])
    result.findings += _of_hosts(result, [report["findings"] for report in reports])
    result.findings += _unlike(result)
    result.findings += _disagreeing([report.get("agreed", {}) for report in reports])
    if any(finding.level == "problem" for finding in result.findings):
        text = "The hosts have problems of their own, so the network was not measured."
        result.findings.append(Finding("warning", "network", text))
        return
    chosen = check_introductions(meeting, everybody)
    datagram = agree_datagram(meeting, everybody, chosen)
    result.addresses = {first: chosen[first] for first in result.hosts}
    if len(result.hosts) == 1:
        text = "All ranks are on one host, so there is no network to measure."
        result.findings.append(Finding("ok", "network", text))
        return
    result.pairs = measure_all(meeting, chosen[rank], result.addresses, datagram, settings, say)
    wrong = [
        finding
        for pair in result.pairs
        for finding in pair_findings(pair, result.hosts, result.addresses)
        if finding.level != "ok"
    ]
    result.findings += wrong
    if not wrong:
        text = f"Datagrams of {datagram} bytes pass both ways between all hosts."
        result.findings.append(Finding("ok", "network", text))


def host_names(introductions: Sequence[Introduction]) -> dict[int, str]:
    """Returns a name for each host by the rank that measures for it, no two of them equal.

    Equal names of hosts, as of namespaces or cloned machines, have an address or the rank beside
    them.
    """
    names = [each.host for each in introductions]
    addresses = [each.addresses[0].address if each.addresses else "" for each in introductions]
    found = {}
    for each, name, address in zip(introductions, names, addresses, strict=True):
        beside = address if addresses.count(address) == 1 else f"rank {each.endpoint}"
        found[each.endpoint] = name if names.count(name) == 1 else f"{name} ({beside})"
    return found


def _of_hosts(result: Examined, reports: list[list[dict[str, Any]]]) -> list[Finding]:
    """Returns what is wrong with each host, by what each rank has found there.

    Ranks of one host may have other settings or CPUs, so what the lowest one has not found is
    named with its ranks.
    """
    by_rank = [[Finding(**each) for each in report] for report in reports]
    findings = []
    for first, name in result.hosts.items():
        findings += [_named(finding, name) for finding in by_rank[first]]
        others: dict[Finding, list[int]] = {}
        for rank in result.ranks[first]:
            for finding in by_rank[rank]:
                if finding not in by_rank[first]:
                    others.setdefault(finding, []).append(rank)
        for finding, ranks in others.items():
            findings.append(_named(finding, f"{name}, {_ranges(ranks)}"))
    return [finding for finding in findings if finding.level != "ok"]


def _named(finding: Finding, where: str) -> Finding:
    typed = f"{finding.command}   # on {where}" if finding.command else ""
    return Finding(finding.level, finding.about, f"{where}: {finding.text}", typed)


def _unlike(result: Examined) -> list[Finding]:
    """Returns a finding for each version that differs between ranks."""
    findings = []
    for name in result.versions[0]:
        ranks: dict[str, list[int]] = {}
        for rank, versions in enumerate(result.versions):
            version = versions.get(name, "")
            if name == "python":  # patch releases work together
                version = version.rpartition(".")[0]
            ranks.setdefault(version, []).append(rank)
        if len(ranks) == 1 or name == "kernel":
            continue
        listed = "; ".join(
            f"{version or 'none'} on {_ranges(having)}" for version, having in ranks.items()
        )
        grave = name in ("gradwire", "protocol")
        text = f"The ranks have different versions of {name}: {listed}."
        typed = "pip install .   # in the same checkout of gradwire, on all hosts" if grave else ""
        findings.append(Finding("problem" if grave else "warning", "versions", text, typed))
    return findings


def _disagreeing(settings: list[dict[str, Any]]) -> list[Finding]:
    """Returns a finding that lists what attach() needs alike and the ranks have not.

    Args:
        settings: What each rank has. A name that a rank lacks, such as an option of a policy that
            it does not use, is not compared with it.
    """
    differing = []
    for name in dict.fromkeys(itertools.chain.from_iterable(settings)):
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(settings):
            if name in own:
                ranks.setdefault(repr(own[name]), []).append(rank)
        if len(ranks) > 1:
            listed = ", ".join(f"{value} ({_ranges(having)})" for value, having in ranks.items())
            differing.append(f"{name} is {listed}")
    if not differing:
        return []
    text = (
        "attach() needs the same settings on all ranks, and their environments differ: "
        f"{'; '.join(differing)}."
    )
    return [Finding("problem", "settings", text, "env | grep GRADWIRE_   # on each rank")]
