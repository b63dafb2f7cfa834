"""A job that trains while somebody on its wire sends hostile datagrams, for tests and by hand.

    python tests/hostile_job.py [--auth session|whole|none|key] [--policy NAME] [--rate N] …
    python tests/hostile_job.py --datagrams N …
    python tests/hostile_job.py --tamper bit|ones [--races] [--share S] …

Two ranks on hosts of their own train; beside each rank somebody reads what leaves the host, and
sends datagrams to the other one: old ones once more, changed, cut, lengthened, oversized and made
up, in the rank's name and from foreign addresses. Three kinds of blocks of steps take turns: left
alone, under attack, and with as many datagrams for a port that discards them, which shows what
sending them costs on this machine. With --datagrams the blocks go on until so many have been sent.
The line that is printed has the ratios of their times ("engine" is that of attacked and elsewhere),
the processor time that a rank takes for each hostile datagram, which is the same on a busy machine,
and whether the replicas are those of a job left alone. The status is 1 unless they are, or if a
rank's memory has grown by more than 32 MiB.

With --tamper somebody between the hosts hands on what they send each other, and alters payloads of
chunks. The line has what becomes of the job, so the status is 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from array import array
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from ddp_jobs import batch, fingerprint, model, wrap
from host_ranks import Builder, HostRanks
from hostile_wire import ADDRESSES, DATAGRAM, KINDS, attacks, sent_by_all, tampers

KEY = "5a" * 32
WARM = 3
"""Steps at the start of a block that are not timed."""
LOOK = 10
"""Steps by which the hostile ones see what travels."""
MOST_GROWTH = 32 << 20
"""Bytes by which a process may grow after the first three blocks."""
LONGEST_PACKET = 65_535
"""The MTU, so that a packet of any length arrives in one piece."""
LINK = 253
"""RT_SCOPE_LINK"""
TIMEOUT_S = 10.0
"""Of a step whose payloads are altered."""
POLICIES = {"int8": {"policy": "netsenseml", "start": 0.3, "compress": "int8"}}
"""Policies that need options to do what their name says."""
COUNTERS = (
    "strangers",
    "receive_truncated",
    "receive_overflows",
    "forged",
    "replayed",
    "malformed",
)


def two_hosts(network: Builder) -> None:
    network.cable(0, 1, "eth0", mtu=LONGEST_PACKET)
    for host, address in enumerate(ADDRESSES):
        network.address(host, "eth0", address, 24)
        network.neighbour(host, "eth0", ADDRESSES[1 - host], 1 - host)


def hosts() -> HostRanks:
    """Ranks 0 and 1 train, and 2 and 3 are the hostile ones beside them."""
    names = ("a", "b", "x", "y")
    return HostRanks(two_hosts, places=(0, 1, 0, 1), names=names, GLOO_SOCKET_IFNAME="eth0")


def one_between(network: Builder) -> None:
    """Hosts 0 and 1 reach each other over host 2, and for Gloo over a cable of their own."""
    network.cable(0, 1, "eth9")
    for host, address in enumerate(ADDRESSES):
        name = f"eth{host}"
        network.cable(host, 2, name)
        network.address(host, name, address, 24)
        network.address(host, "eth9", f"10.0.9.{1 + host}", 24)
        network.neighbour(host, name, ADDRESSES[1 - host], 2)
        network.neighbour(2, name, address, host)
        network.route(2, name, f"{address}/32", scope=LINK)


def hosts_apart() -> HostRanks:
    """Ranks 0 and 1 train, and rank 2 is between them."""
    names = ("a", "b", "m")
    return HostRanks(one_between, hosts=3, places=(0, 1, 2), names=names, GLOO_SOCKET_IFNAME="eth9")


def lives(rank: int, world: int, place: str, hostile: dict[str, Any], **job: Any) -> dict[str, Any]:
    if rank < 2:
        try:
            return trains(rank, Path(place), **job)
        finally:  # the hostile ones end with the job, also where it fails
            (Path(place) / "over").touch()
    return attacks(rank - 2, Path(place), payloads=job["auth"] != "session", **hostile)


def lives_apart(
    rank: int, world: int, place: str, hostile: dict[str, Any], **job: Any
) -> dict[str, Any]:
    if rank == 2:
        return tampers(Path(place), **hostile)
    try:
        return suffers(rank, Path(place), **job)
    finally:  # what the other one still needs goes through rank 2
        (Path(place) / f"over{rank}").touch()


# ------------------------------------------------------------------------------------------- a job


def trains(
    rank: int,
    place: Path,
    *,
    blocks: int,
    steps: int,
    width: int,
    longer: int = 1,
    datagrams: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Trains in so many blocks, whose kinds take turns, and in more until so many hostile datagrams
    have been sent. Blocks under attack are so many times longer."""
    ddp, attachment = starts(rank, place, width, interface="eth0", **options)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    used: dict[str, list[float]] = {kind: [] for kind in KINDS}
    least, before = 1.0, 0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    step = 0
    while step < LOOK:
        learn(ddp, optimizer, batch(rank, step))
        step += 1
    wait_for(place, "ready0", "ready1")
    for block in itertools.count():
        kind = KINDS[block % 3]
        more = torch.tensor([block % 3 > 0 or block < blocks or sent_by_all(place) < datagrams])
        dist.broadcast(more, 0)
        if not more:
            break
        if rank == 0:
            for each in KINDS:
                (place / each).unlink(missing_ok=True)
            (place / kind).touch()
        dist.barrier()
        timed = array("d")
        used_before = time.process_time()
        for index in range(steps * (longer if kind == "attacked" else 1)):
            began = time.perf_counter()
            learn(ddp, optimizer, batch(rank, step))
            step += 1
            if index >= WARM:
                timed.append(time.perf_counter() - began)
            report = attachment.report()
            least = min(least, report.delivered + report.bound)
        times[kind].append(median(timed))
        used[kind].append(time.process_time() - used_before)
        if block == 2:
            before = resident()
    grown = resident() - before
    counters = attachment.counters()
    attachment.detach()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "replica": fingerprint(ddp),
        "times": times,
        "used": {kind: sum(each) for kind, each in used.items()},
        "least": least,
        "grown": grown,
        "blocks": block,
        "step": report.step,
        "counters": {name: int(counters[name]) for name in COUNTERS},
    }


def suffers(rank: int, place: Path, *, steps: int, width: int, **options: Any) -> dict[str, Any]:
    """Trains for so many steps, or until one fails."""
    more = {"interface": f"eth{rank}", "timeout": TIMEOUT_S, **options}
    ddp, attachment = starts(rank, place, width, **more)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    error = ""
    for step in range(steps):
        began = time.perf_counter()
        try:
            learn(ddp, optimizer, batch(rank, step))
        except RuntimeError as failed:  # torch's, with the text of gradwire's
            error = str(failed).split("callback: ")[-1].splitlines()[0]
            break
    seconds = time.perf_counter() - began
    counters = attachment.counters()
    return {
        "parameters": torch.cat([each.detach().flatten() for each in ddp.parameters()]),
        "steps": step + (not error),
        "error": error,
        "seconds": seconds,
        "counters": {name: int(counters[name]) for name in COUNTERS},
    }


def starts(rank: int, place: Path, width: int, *, auth: str, **options: Any) -> Any:
    """A model and its attachment."""
    store = dist.FileStore(str(place / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    given = {"key": KEY} if auth == "key" else {"auth": auth}
    ddp = wrap(model(width=width))
    return ddp, gradwire.attach(ddp, datagram=DATAGRAM, **given, **options)


def wait_for(place: Path, *names: str) -> None:
    while not all((place / name).exists() for name in names):
        time.sleep(0.01)


def learn(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    ddp(data).square().mean().backward()
    optimizer.step()


def resident() -> int:
    """Bytes of memory that this process has."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


# ---------------------------------------------------------------------------------------- outcomes


def outcome(
    ranks: HostRanks, *, rate: int, longer: int = 1, timeout: float = 150.0, **job: Any
) -> dict[str, Any]:
    """What has become of a job under attack."""
    with tempfile.TemporaryDirectory() as place:
        first, second, *others = ranks.run(
            lives, timeout=timeout, place=place, hostile={"rate": rate}, longer=longer, **job
        )
    alone, attacked, elsewhere = (first["times"][kind] for kind in KINDS)
    used, aimed = first["used"], others[1]["sent"].get("all", 0)  # by the one beside rank 1
    sent = sum((Counter(each["sent"]) for each in others), Counter())
    seconds = {kind: sum(each["seconds"][kind] for each in others) for kind in KINDS}
    return {
        "replica": first["replica"],
        "identical": first["replica"] == second["replica"],
        "least": min(first["least"], second["least"]),
        "grown": max(first["grown"], second["grown"]),
        "blocks": first["blocks"],
        "steps": first["step"] + 1,
        "sent": sent["all"],
        "oversized": sent["oversized"],
        "foreign": sent["foreign"],
        "per_second": round(sent["all"] / seconds["attacked"]),
        "discarded_per_second": round(sent["discarded"] / seconds["elsewhere"]),
        "alone_ms": 1e3 * median(alone),
        "attacked": ratio(attacked, alone),
        "elsewhere": ratio(elsewhere, alone),
        "engine": ratio(attacked, elsewhere),
        "us_each": 1e6 * (used["attacked"] - longer * used["elsewhere"]) / max(1, aimed),
        "counters": {name: first["counters"][name] + second["counters"][name] for name in COUNTERS},
    }


def ratio(times: list[float], others: list[float]) -> float:
    """Of blocks that follow each other, since what else the machine does changes with time."""
    return median(one / other for one, other in zip(times, others, strict=False))


def faults(attacked: dict[str, Any], alone: dict[str, Any], policy: str) -> list[str]:
    """What is wrong with a job under attack beside the same one left alone."""
    found = []
    if not attacked["identical"]:
        found.append("the replicas differ")
    if policy == "reliable" and attacked["replica"] != alone["replica"]:
        found.append("the replicas are not those of the job left alone")
    if attacked["least"] < 1 - 1e-9 and policy != "ltp":  # whose deadline may exceed its bound
        found.append(f"a step got {attacked['least']} of what its bound allows")
    if attacked["grown"] > MOST_GROWTH:
        found.append(f"memory grew by {attacked['grown']} bytes")
    return found


def tampered(
    ranks: HostRanks,
    *,
    how: str,
    share: float,
    races: bool = False,
    timeout: float = 150.0,
    **job: Any,
) -> dict[str, Any]:
    """What has become of a job of whose chunks so many were altered on the way."""
    hostile = {"how": how, "share": share, "races": races}
    with tempfile.TemporaryDirectory() as place:
        first, second, between = ranks.run(
            lives_apart, timeout=timeout, place=place, hostile=hostile, **job
        )
    replicas = [each.pop("parameters").double() for each in (first, second)]
    finite = all(each.isfinite().all() for each in replicas)
    return {
        "replicas": replicas,
        "altered": between["altered"],
        "identical": torch.equal(*replicas),
        "apart": float((replicas[0] - replicas[1]).abs().max()) if finite else None,
        "largest": float(max(each.abs().max() for each in replicas)) if finite else None,
        "not_finite": max(int((~each.isfinite()).sum()) for each in replicas),
        "of": len(replicas[0]),
        "steps": min(first["steps"], second["steps"]),
        "error": first["error"] or second["error"],
        "seconds": max(first["seconds"], second["seconds"]),
        "counters": {name: first["counters"][name] + second["counters"][name] for name in COUNTERS},
    }


# ---------------------------------------------------------------------------------------- by hand


def compare(asked: dict[str, Any], job: dict[str, Any]) -> int:
    with hosts() as ranks:
        attacked = outcome(ranks, timeout=7200, **asked, **job)
        quiet = {**asked, "rate": 0, "datagrams": 0, "blocks": attacked["blocks"]}
        alone = outcome(ranks, timeout=7200, **quiet, **job)
    found = faults(attacked, alone, job["policy"])
    attacked["undisturbed"] = attacked.pop("replica") == alone["replica"]
    print(json.dumps({**job, **asked, **attacked, "cores": os.cpu_count(), "faults": found}))
    return 1 if found else 0


def tamper(asked: dict[str, Any], job: dict[str, Any]) -> None:
    with hosts_apart() as ranks:
        altered = tampered(ranks, timeout=600, **asked, **job)
    with hosts_apart() as ranks:  # ranks that failed are of no further use
        alone = tampered(ranks, timeout=600, **{**asked, "share": 0.0}, **job)
    with_it, without = altered.pop("replicas"), alone["replicas"]
    altered["undisturbed"] = torch.equal(with_it[0], without[0])
    print(json.dumps({**job, **asked, **altered}))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--auth", default="whole", choices=("session", "whole", "key", "none"))
    parser.add_argument("--policy", default="reliable")
    parser.add_argument("--rate", type=int, default=20_000, help="datagrams a second at each rank")
    parser.add_argument("--datagrams", type=int, default=0, help="go on until so many are sent")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument(
        "--steps", type=int, default=100, help="of a block, or with --tamper of all"
    )
    parser.add_argument("--longer", type=int, default=1, help="blocks under attack, times --steps")
    parser.add_argument("--width", type=int, help="of the model: 2000, or 100 with --tamper")
    parser.add_argument("--tamper", choices=("bit", "ones"), help="what payloads become")
    parser.add_argument("--share", type=float, default=1e-3, help="of the chunks that are altered")
    parser.add_argument("--races", action="store_true", help="the true chunk follows")
    asked = parser.parse_args()
    job = {"auth": asked.auth, "steps": asked.steps, **POLICIES.get(asked.policy, {})}
    job.setdefault("policy", asked.policy)
    if asked.tamper:
        hostile = {"how": asked.tamper, "share": asked.share, "races": asked.races}
        tamper(hostile, {**job, "width": asked.width or 100})
        return 0
    attack = {name: getattr(asked, name) for name in ("rate", "datagrams", "blocks", "longer")}
    return compare(attack, {**job, "width": asked.width or 2000})


if __name__ == "__main__":
    sys.exit(main())
