"""All hosts of a job probe each other, pair by pair, when `gradwire doctor` runs on every rank.

The ranks meet through the job's store, as in `attach`, with the same checks and the same errors.
The lowest rank of each host measures for it. Only one pair measures at a time, because two
measurements would disturb each other. Every rank learns all results.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gradwire.core.errors import ConfigError, GradwireError, RendezvousError
from gradwire.core.settings import Settings
from gradwire.doctor.findings import Finding, as_json, lines, summary, wrapped
from gradwire.doctor.host import Host, check_host
from gradwire.doctor.judge import accept, path_findings, rate_text, rtt_text
from gradwire.doctor.prober import Measurement, Prober, RoundTrips, Way
from gradwire.doctor.responder import Responder
from gradwire.doctor.udp import UdpSocket
from gradwire.server import open_store
from gradwire.transport.addresses import (
    LocalAddress,
    host_identity,
    on_first_free,
    reachable_interfaces,
    scoped,
)
from gradwire.transport.introductions import (
    Introduction,
    agree_datagram,
    check_introductions,
    introduce,
)
from gradwire.transport.meeting import Meeting
from gradwire.transport.store import BoundedStore, Store

__all__ = ["Examined", "Place", "beside_others", "examine", "place_of_environment"]

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI's
    ("mpirun", "PMI_RANK", "PMI_SIZE"),  # MPICH's and its relatives'
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
)
"""Launchers that set no RANK and WORLD_SIZE, and the variables that they set instead.

An mpirun inside of a job of Slurm comes before Slurm, whose variables are then those of the
process that mpirun was started by."""
CONTACT_S = 2.0
"""How long a pair tries to reach each other, in seconds."""
PAIR_S = 30.0
"""How long a pair takes at most, in seconds."""
QUIET_S = 5.0
"""A responder goes on when its prober asks nothing for so long, in seconds."""
LEAVE_S = 5.0
"""How long rank 0, whose process may host the store, waits for the others at the end."""


@dataclass(frozen=True)
class Place:
    """This process's place in a job, from the environment that launchers set.

    Attributes:
        rank: Its rank.
        world: The number of ranks.
        address: The host of the job's store.
        port: The store's port.
        hosted: Whether the launcher hosts the store; else rank 0 does.
    """

    rank: int
    world: int
    address: str
    port: int
    hosted: bool


def place_of_environment(environment: Mapping[str, str] | None = None) -> Place | None:
    """Returns this process's place in a job; None where it is alone.

    Args:
        environment: Environment variables; None for os.environ.

    Raises:
        ConfigError: Some of the variables are missing or impossible; the error names them.
    """
    given = {name: text for name, text in _variables(environment).items() if text}
    launched = _launched(given)
    # In a batch script, outside of srun, the others are not there.
    started = launched is not None and launched.launcher != "Slurm"
    names = {name: name for name in VARIABLES}  # of the variables that are read
    if launched is not None and started and any(given.get(name) for name in VARIABLES):
        for name, read in (("RANK", launched.rank), ("WORLD_SIZE", launched.world)):
            if not given.get(name):
                names[name], given[name] = read, given[read]
    if not given.get("RANK") and not given.get("WORLD_SIZE"):
        return None
    for name in VARIABLES:
        if not given.get(name):
            there = [each for each in VARIABLES if given.get(each)]
            raise ConfigError.about(
                f"{name} is not set, but {', '.join(names[each] for each in there)}",
                f"a job sets all of {', '.join(names.values())}; unset "
                f"{', '.join(each for each in there if names[each] == each)} to check this host "
                "alone",
                setting=name,
            )
    numbers: dict[str, int] = {}
    for name, most in (("WORLD_SIZE", 1 << 20), ("RANK", 1 << 20), ("MASTER_PORT", 65_535)):
        text = given[name]
        if not (text.isascii() and text.isdigit() and int(text) <= most):
            raise ConfigError.of(names[name], text, f"a whole number up to {most}")
        numbers[name] = int(text)
    if not numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise ConfigError.of(
            names["RANK"],
            given["RANK"],
            f"below {names['WORLD_SIZE']}",
            beside=f"of {numbers['WORLD_SIZE']}",
        )
    if numbers["WORLD_SIZE"] == 1:
        return None
    hosted = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = given["MASTER_ADDR"], numbers["MASTER_PORT"]
    return Place(numbers["RANK"], numbers["WORLD_SIZE"], address, port, hosted)


def beside_others(environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Returns a warning where a launcher started several processes, each of which is alone.

    Args:
        environment: Environment variables; None for os.environ.
    """
    given = _variables(environment)
    launched = _launched(given)
    if launched is None:
        return []
    first, slurm = "HOST", launched.launcher in ("srun", "Slurm")
    if slurm:
        first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    typed = f"export MASTER_ADDR={first} MASTER_PORT=29500   # the host of rank 0, a free port"
    if launched.launcher == "Slurm":
        typed += "\nsrun gradwire doctor"
    text = (
        f"{launched.launcher} has {given[launched.world]} tasks, and this process checks its own "
        "host alone: without a meeting point nothing is known of the other hosts and of the "
        "network."
    )
    return [Finding("warning", "job", text, typed)]


@dataclass(frozen=True)
class Launched:
    """What a launcher's own variables say.

    Attributes:
        launcher: Its name.
        rank: The variable with the rank of this process.
        world: The variable with the number of processes.
    """

    launcher: str
    rank: str
    world: str


def _launched(given: Mapping[str, str]) -> Launched | None:
    """Returns what a launcher of several processes has set; None where there is none."""
    if given.get("RANK") and given.get("WORLD_SIZE"):
        return None
    step = [given.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    for name, rank, world in LAUNCHERS:
        if given.get(rank) and given.get(world):
            if given[world] == "1":
                return None
            # srun sets PMI's variables as well, to the same numbers as its own.
            same = [given[rank], given[world]] == step
            return Launched("srun" if same else name, rank, world)
    return None


def _variables(environment: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environment is None else environment


@dataclass(frozen=True)
class Pair:
    """What became of the path between two hosts.

    Attributes:
        prober: The rank that measured.
        responder: The rank that answered.
        found: What it measured.
        heard: Datagrams of the prober that the responder received.
    """

    prober: int
    responder: int
    found: Measurement
    heard: int


@dataclass
class Examined:
    """What `gradwire doctor` found out about a job; the same on all ranks.

    Attributes:
        findings: The findings, those of hosts first.
        met: Whether the ranks met, and stayed until the end.
        hosts: The name of each host by the rank that measures for it.
        ranks: The ranks of each host by the rank that measures for it.
        addresses: The address that each host uses, by the same.
        versions: The versions by rank.
        pairs: The pairs of hosts.
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
        """Returns everything, for --json."""
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
        """Returns the findings and the tables as text."""
        parts = []
        if self.hosts:
            count, hosts = sum(map(len, self.ranks.values())), len(self.hosts)
            plural = "s" if hosts > 1 else ""
            parts.append(f"gradwire doctor: {count} ranks on {hosts} host{plural}\n")
            for first, name in self.hosts.items():
                ranks = _ranges(self.ranks[first])
                kind = "rank" if len(self.ranks[first]) == 1 else "ranks"
                own = self.addresses.get(first)
                where = ""
                if own is not None:
                    where = f" at {own.address} on {own.interface}, MTU {own.mtu or 'unknown'}"
                parts += [f"  {line}" for line in wrapped(f"{name}: {kind} {ranks}{where}", 2)]
            parts.append("")
        parts += lines(self.findings)
        if self.pairs:
            parts += ["", *self._table()]
        return "\n".join([*parts, "", summary(self.findings)])

    def _table(self) -> list[str]:
        """Returns the table host × host: rate and loss from each host to each, and the rtt."""
        cells: dict[tuple[int, int], str] = {}
        for pair in self.pairs:
            rtt = pair.found.rtt.median
            for way, ends in (
                (pair.found.there, (pair.prober, pair.responder)),
                (pair.found.back, (pair.responder, pair.prober)),
            ):
                cells[ends] = (
                    f"{rate_text(way.rate, way.limit)}, {way.loss:.1%}, {rtt_text(rtt)}"
                    if way.rate
                    else "–"
                )
        widths = {
            to: max([len(name), *(len(cells.get((first, to), "")) for first in self.hosts)])
            for to, name in self.hosts.items()
        }
        longest = max([len("from"), *map(len, self.hosts.values())])
        head = "  ".join(f"{name:>{widths[to]}}" for to, name in self.hosts.items())
        rows = [f"  {'from':{longest}}  {head}"]
        for first, name in self.hosts.items():
            row = "  ".join(
                f"{cells.get((first, to), '' if first == to else '–'):>{widths[to]}}"
                for to in self.hosts
            )
            rows.append(f"  {name:{longest}}  {row}")
        return [*rows, "", "  Each cell: rate, loss at half of it, median round-trip time."]


def _ranges(ranks: list[int]) -> str:
    """Returns rising numbers as text: "0–3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def examine(place: Place) -> Examined:
    """Meets the other ranks, checks every host, and measures the path between each two.

    Every wait has an end; what fails is a finding.

    Args:
        place: This process's place in the job.
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
        _examine(result, meeting, host, settings)
        result.leave = lambda: _leave(store, meeting, place)
    except (ConfigError, RendezvousError, OSError) as error:
        about = "ranks" if isinstance(error, RendezvousError) else "settings"
        result.findings.append(Finding("problem", about, f"{error}."))
        result.met = False
    finally:
        meeting.close()
    return result


def _store(place: Place, timeout_s: float) -> Store:
    """Opens the job's store; hosts it where nobody else does and this is rank 0."""
    try:
        from torch._C._distributed_c10d import TCPStore
    except ImportError as error:
        raise GradwireError(
            f"the ranks of a job meet through torch, which cannot be imported ({error}); "
            "`gradwire probe` needs no torch"
        ) from error
    if place.hosted or place.rank != 0:
        host = f"[{place.address}]" if ":" in place.address else place.address
        opened: Store = open_store(f"{host}:{place.port}", timeout_s)
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
            f"rank 0 cannot host the job's store at {place.address}:{place.port}: {error}"
        ) from error
    return made


def _leave(store: Store, meeting: Meeting, place: Place) -> None:
    """Says goodbye; rank 0 waits a little for the others."""
    store = BoundedStore(store, LEAVE_S)
    with contextlib.suppress(RuntimeError):
        key = f"{meeting.prefix}/done"
        until = time.monotonic() + LEAVE_S
        done = store.add(key, 1)
        while place.rank == 0 and done < place.world and time.monotonic() < until:
            time.sleep(0.02)
            done = store.add(key, 0)


# ---------------------------------------------------------------------------- the meeting


def _examine(result: Examined, meeting: Meeting, host: Host, settings: Settings) -> None:
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
        ),
    )
    mine = {
        "findings": [asdict(each) for each in host.findings],
        "versions": host.versions,
        "agreed": host.agreed,
    }
    reports = [json.loads(text) for text in meeting.exchange(json.dumps(mine, default=str))]
    result.met = True
    result.versions = [report["versions"] for report in reports]
    for each in everybody:
        first = next(e.endpoint for e in everybody if e.identity == each.identity)
        result.ranks.setdefault(first, []).append(each.endpoint)
    names = [everybody[first].host for first in result.ranks]
    for first in result.ranks:
        name = everybody[first].host
        result.hosts[first] = name if names.count(name) == 1 else f"{name} (rank {first})"
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
    leaders = list(result.hosts)
    if len(leaders) == 1:
        text = "All ranks are on one host, so there is no network to measure."
        result.findings.append(Finding("ok", "network", text))
        return
    _measure_all(result, meeting, chosen[rank], leaders, datagram, settings)
    wrong = [
        finding
        for pair in result.pairs
        for finding in _pair_findings(result, pair)
        if finding.level != "ok"
    ]
    result.findings += wrong
    if not wrong:
        text = f"Datagrams of {datagram} bytes pass both ways between all hosts."
        result.findings.append(Finding("ok", "network", text))


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
            which = f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)}"
            findings.append(_named(finding, f"{name}, {which}"))
    return [finding for finding in findings if finding.level != "ok"]


def _named(finding: Finding, where: str) -> Finding:
    """Returns a finding with the host, or the host and ranks, of which it is."""
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
            f"{version or 'none'} on rank{'s' if len(having) > 1 else ''} "
            f"{', '.join(map(str, having))}"
            for version, having in ranks.items()
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
            listed = ", ".join(
                f"{value} (rank{'s' if len(having) > 1 else ''} {_ranges(having)})"
                for value, having in ranks.items()
            )
            differing.append(f"{name} is {listed}")
    if not differing:
        return []
    text = (
        "attach() needs the same settings on all ranks, and their environments differ: "
        f"{'; '.join(differing)}."
    )
    return [Finding("problem", "settings", text, "env | grep GRADWIRE_   # on each rank")]


# ---------------------------------------------------------------------------- the pairs


def _measure_all(
    result: Examined,
    meeting: Meeting,
    own: LocalAddress,
    leaders: list[int],
    datagram: int,
    settings: Settings,
) -> None:
    """Lets each two hosts measure, one pair after the other; collective."""
    rank = meeting.endpoint
    opened: UdpSocket | None = None
    port = 0
    try:
        if rank in leaders:
            try:
                opened = on_first_free(
                    settings.ports, lambda port: UdpSocket(own.bound, port, settings.dscp)
                )
            except OSError as error:
                meeting.tell_failure(error)
                raise
            port = opened.place[1]
        # A token for each measurement: the responder has to know it before the first datagram.
        token = secrets.randbits(48)
        texts = meeting.exchange(json.dumps({"port": port, "token": token}))
        ends = [json.loads(text) for text in texts]
        for prober, responder in itertools.combinations(leaders, 2):
            text = "{}"
            if opened is not None and rank in (prober, responder):
                other = responder if rank == prober else prober
                there = scoped(result.addresses[other].address, own.interface)
                peer = socket.getaddrinfo(there, ends[other]["port"], type=socket.SOCK_DGRAM)[0][4]
                token = ends[prober]["token"] ^ responder
                if rank == prober:
                    found = Prober(opened, peer, datagram, PAIR_S, token).measure(CONTACT_S)
                    text = json.dumps(asdict(found))
                else:
                    answers = Responder([opened], limit=lambda message: datagram, token=token)
                    answers.serve(
                        QUIET_S,
                        once=True,
                        knock=peer,
                        contact_s=CONTACT_S,
                        longest_s=PAIR_S + QUIET_S,
                    )
                    text = json.dumps({"heard": answers.hellos})
            # The pair may take its whole time before it comes here.
            texts = meeting.exchange(text, meeting.timeout_s + PAIR_S + QUIET_S)
            found = _measurement(json.loads(texts[prober]))
            heard = int(json.loads(texts[responder]).get("heard", 0))
            result.pairs.append(Pair(prober, responder, found, heard))
    finally:
        if opened is not None:
            opened.close()


def _measurement(values: dict[str, Any]) -> Measurement:
    known = {each.name for each in fields(Measurement)}
    plain = {name: value for name, value in values.items() if name in known}
    plain["rtt"] = RoundTrips(**plain.get("rtt", {}))
    plain["there"] = Way(**plain.get("there", {}))
    plain["back"] = Way(**plain.get("back", {}))
    return Measurement(**plain)


def _pair_findings(result: Examined, pair: Pair) -> list[Finding]:
    here, there = result.hosts[pair.prober], result.hosts[pair.responder]
    if pair.found.answered:
        return path_findings(pair.found, here, there)
    addresses = [result.addresses[rank].address for rank in (pair.prober, pair.responder)]
    ways = []
    if not pair.heard:
        ways.append((here, there, accept(there, addresses[0], None)))
    if not pair.found.heard:
        ways.append((there, here, accept(here, addresses[1], None)))
    if not ways:
        text = f"{here} and {there} hear each other, but answers are lost: the network loses most."
        return [Finding("problem", "UDP", text)]
    findings = []
    for sender, receiver, typed in ways:
        text = (
            f"{sender} → {receiver}: no UDP datagram arrives. A firewall of {receiver}, or one "
            "between, drops it."
        )
        if pair.found.refusal and sender == here:
            text = f"{sender} → {receiver}: the sender's kernel refuses: {pair.found.refusal}."
        findings.append(Finding("problem", "UDP", text, typed))
    return findings
