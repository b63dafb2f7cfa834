"""`gradwire bench soak` trains for long under bursts, loss and restarts."""

from __future__ import annotations

import datetime
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.contest.measure import environment
from gradwire_lab.network.network import probe
from gradwire_lab.network.presets import Burst

PLACES = (0, 0, 1, 2)
"""The hosts of the ranks: one leads its host, one follows it, and two are alone on theirs."""
VICTIMS = (3, 1, 2)
"""The ranks that die, in turn; rank 0 lives through the whole soak."""
POLICIES = ("reliable", "mlt")
HELD = ("memory", "descriptors", "threads")
GROWTH = {"memory": 0.03, "descriptors": 0.0, "threads": 0.0}
"""By how much of what it was a figure may grow from the second quarter to the last."""
WEATHER_S = 2.0
PATIENCE_S = 120.0
"""Seconds in which a step has to come, and a life has to end once a rank has died."""


@dataclass
class Soak:
    """What came of a soak.

    Attributes:
        replicas: fingerprints by life, step and rank.
        held: rank 0's figures, with the time of each in seconds.
        faults: what was wrong.
    """

    replicas: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    held: list[dict[str, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def note(self, rank: str, said: dict[str, Any], at: float) -> None:
        """Take a replica's message."""
        key = said["life"], said["step"]
        self.replicas.setdefault(key, {})[rank] = said["fingerprint"]
        if rank == "rank 0" and "memory" in said:
            self.held.append({"at": at, **{name: said[name] for name in HELD}})

    def judged(self) -> list[str]:
        """Return all that was wrong."""
        found = list(self.faults)
        for (life, step), prints in self.replicas.items():
            if len(set(prints.values())) > 1:
                found.append(f"life {life}, step {step}: replicas differ: {sorted(prints)}")
        for name, quarters in self.quarters().items():
            if len(quarters) == 4 and quarters[3] > quarters[1] * (1 + GROWTH[name]):
                found.append(f"{name} of rank 0 grew from {quarters[1]:g} to {quarters[3]:g}")
        return found

    def quarters(self) -> dict[str, list[float]]:
        """Return the medians of rank 0's figures in each quarter of the soak."""
        if not self.held:
            return {}
        end = self.held[-1]["at"]
        parts: Sequence[list[dict[str, float]]] = ([], [], [], [])
        for each in self.held:
            parts[min(3, int(4 * each["at"] / max(end, 1e-9)))].append(each)
        return {name: [statistics.median(s[name] for s in p) for p in parts if p] for name in HELD}


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="how long to train")] = 60.0,
    restart_every: Annotated[
        float, typer.Option(min=0.1, help="minutes from one death of a rank to the next")
    ] = 5.0,
    loss: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="the most that links lose at a time, as a share")
    ] = 0.05,
    peer_timeout: Annotated[float, typer.Option(min=1.0, help="of the job, in seconds")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="write all figures as JSON there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Train for long under bursts, loss and restarts; what processes hold has to stay as it is.

    Each few minutes a rank is killed. The others stop by their errors and train on with a new
    process in its place, from the last checkpoint and under the next policy. Status 1: replicas
    differed, a life did not end or begin, or memory, descriptors or threads of the rank that lives
    throughout grew.
    """
    if (reason := probe(lossy=True)) is not None:
        Console(stderr=True).print(f"gradwire bench: no lab network here: {reason}", markup=False)
        raise typer.Exit(2)
    found = run_soak(minutes * 60.0, restart_every * 60.0, loss, peer_timeout)
    faults = found.judged()
    lives = 1 + max((life for life, _ in found.replicas), default=-1)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "minutes": minutes,
        "restart_every": restart_every,
        "lives": lives,
        "checkpoints": len(found.replicas),
        "steps": max((step for _, step in found.replicas), default=0),
        "quarters": found.quarters(),
        "held": found.held,
        "faults": faults,
        "environment": environment(),
    }
    if out is not None:
        out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _show(result)
    if faults:
        raise typer.Exit(1)


def run_soak(seconds: float, life_s: float, loss: float, peer_timeout: float) -> Soak:
    """Train for so long, with a death every `life_s` seconds."""
    from gradwire_lab.faults.ground import PORTS, Ground
    from gradwire_lab.network.bursts import BurstTraffic

    found, progress, chance = Soak(), Console(stderr=True), random.Random(0)
    burst = Burst(rate=PORTS.rate, on=0.05, period=0.5)
    with (
        Ground(1 + max(PLACES)) as ground,
        tempfile.TemporaryDirectory() as folder,
        ground.job() as prefix,
        BurstTraffic(ground.network, burst, source=2, target=0),
    ):
        config = {
            "store": ground.store,
            "prefix": prefix,
            "world": len(PLACES),
            "folder": folder,
            "policies": POLICIES,
            "peer_timeout": peer_timeout,
        }

        def start(rank: int, life: int) -> Any:
            own = {**config, "rank": rank, "life": life}
            return ground.start(f"rank {rank}", PLACES[rank], "soak", **own)

        ranks = [start(rank, 0) for rank in range(len(PLACES))]
        began = time.monotonic()
        for life in range(1 + int(seconds / life_s)):
            until = min(began + seconds, began + (1 + life) * life_s)
            heard = time.monotonic()
            while (now := time.monotonic()) < until and now - heard < PATIENCE_S:
                _weather(ground, chance, loss)
                ground.await_event(min(WEATHER_S, until - now), lambda process, said: False)
                for each in ranks:
                    for said in each.said:
                        if said["event"] == "replica":
                            found.note(each.name, said, said["at"] - began)
                            heard = now
                        else:
                            found.faults.append(f"life {life}: {each.name}: {said['text']}")
                    each.said.clear()
            if found.faults or now < until:
                found.faults.append(f"life {life} stood still, or ended by itself")
                break
            if until >= began + seconds:
                break
            victim = VICTIMS[life % len(VICTIMS)]
            ground.signal(ranks[victim], signal.SIGKILL)
            ground.status(ranks[victim], PATIENCE_S)
            others = [each for rank, each in enumerate(ranks) if rank != victim]
            if (slow := _ended(ground, others, f"rank {victim}")) is not None:
                found.faults.append(f"life {life}: {slow}")
                break
            for each in others:
                each.said.clear()
                each.channel.sendall(b"g")
            ranks[victim] = start(victim, life + 1)
            steps = max((step for _, step in found.replicas), default=0)
            text = f"life {life}: {steps} steps; rank {victim} was killed, and all began anew"
            progress.print(text, markup=False, highlight=False)
    return found


def _weather(ground: Any, chance: random.Random, loss: float) -> None:
    """Have links lose other shares than before; one in ten loses all for a moment."""
    hosts = range(1 + max(PLACES))
    links = [(host, way) for host in hosts for way in ("uplink", "downlink")]
    if chance.random() < 0.1:
        ground.network.set_loss([(*chance.choice(links), 1.0)])
        time.sleep(0.2)
    ground.network.set_loss([(*link, loss * chance.random() ** 2) for link in links])


def _ended(ground: Any, others: Sequence[Any], victim: str) -> str | None:
    """Wait until all others have told the end of their life; returns what is wrong with it."""
    until = time.monotonic() + PATIENCE_S
    while any(each.told("ended") is None for each in others):
        if time.monotonic() > until:
            late = [each.name for each in others if each.told("ended") is None]
            return f"{', '.join(late)} trained on for {PATIENCE_S:g} s after {victim} had died"
        ground.await_event(0.1, lambda process, said: False)
    for each in others:
        text = each.told("ended")["text"]
        if victim not in text:
            return f"{each.name} does not name {victim}: {text}"
    return None


def _show(result: dict[str, Any]) -> None:
    """Print rank 0's figures by quarter, and what was wrong."""
    quarters = ("first quarter", "second", "third", "last")
    shown = Table("of rank 0", *quarters[: len(next(iter(result["quarters"].values()), []))])
    for name, values in result["quarters"].items():
        texts = [f"{v / 2**20:.1f} MiB" if name == "memory" else f"{v:g}" for v in values]
        shown.add_row(name, *texts)
    console = Console()
    console.print(shown)
    console.print(
        f"{result['lives']} lives, {result['steps']} steps, replicas compared at "
        f"{result['checkpoints']} checkpoints",
        markup=False,
        highlight=False,
    )
    for fault in result["faults"]:
        console.print(fault, markup=False, highlight=False)
