"""What a seed draws: the shape of a job, its plan or policy, its network and its faults.

Lengths within a job are drawn as shares of its elements, so that a cut life stays possible.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from gradwire.sim.fuzz.faults import DEADLY, KINDS
from gradwire.sim.fuzz.life import Fault, Life

CHUNKS = 200
"""The most chunks of nearly all ops."""
TRAINING = 0.1
"""Share of lives whose steps are those of a policy."""
HARMLESS = 0.75
"""Share of lives without a fault that a job ends by."""

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("reliable", {}),
    ("mlt", {"p": 0.3}),
    ("mlt", {"p": 0.3, "pull": "committed"}),
    ("mlt", {"p": 0.3, "priority": "both"}),
    ("mlt", {"p": 0.3, "priority": "magnitude", "spend": "lost", "pull": "committed"}),
    ("mlt", {"p": 0.3, "control": "probe", "pull": "exact"}),
    ("dblp", {"p_low": 0.1, "every": 2}),
    ("dblp", {"p_low": 0.1, "every": 2, "control": "probe", "pull": "committed"}),
    ("dblp", {"p_low": 0.3, "spend": "lost", "pull": "committed"}),
    ("ltp", {"every": 3, "slack": 0.0, "floor": 0.0}),
    ("plot", {"table": {"layer0.*": 0.0, "*": 0.3}}),
    ("plot", {"table": {"*": 0.2}, "pull": "committed"}),
    ("optireduce", {"warmup": 2, "floor": 0.0, "halt_after": 0}),
    ("netsenseml", {"start": 0.2, "share": 0.1}),
    ("netsenseml", {"start": 0.3, "momentum": 0.5, "prune": 0.5, "guard": "off"}),
    ("adaptive", {"every": 2, "p_low": 0.2}),
)
"""The policies, with settings that show within few steps."""


def draw(seed: int) -> Life:
    """Draws the life of a seed."""
    chance = random.Random(seed)
    life = _training(chance, seed) if chance.random() < TRAINING else _transfers(chance, seed)
    return replace(life, faults=tuple(_faults(chance, life)))


def _workers(chance: random.Random) -> int:
    if chance.random() < 0.85:
        return chance.randint(2, 6)
    return chance.randint(7, 16) if chance.random() < 0.8 else chance.randint(17, 62)


def _network(chance: random.Random) -> dict[str, Any]:
    """From a metropolitan line to a fast rack."""
    timeout = chance.choice([1.0, 2.0, 4.0])
    return {
        "rate": 10 ** chance.uniform(6.3, 9.3),
        "delay": 10 ** chance.uniform(-6, -2),
        "queue": int(2 ** chance.uniform(14, 19)),
        "whole_trains": chance.random() < 0.3,
        "peer_timeout": timeout,
        "ping": timeout / chance.choice([5, 5, 10]),
        "timeout": chance.choice([120.0, 600.0]),
    }


def _transfers(chance: random.Random, seed: int) -> Life:
    workers = _workers(chance)
    servers = chance.choice([0, 0, 0, 1, 2])
    datagram = chance.choice([256, 600, 1472, 1472, 8972])
    lanes = chance.choice([1, 1, 1, 2, 3]) if workers <= 16 else 1
    most = min(CHUNKS, 1200 // workers) * datagram // 4
    return Life(
        seed,
        "transfers",
        workers,
        servers,
        elements=1 + int(most ** chance.random()),
        steps=chance.randint(1, 4) if workers <= 16 else 1,
        lanes=lanes,
        datagram=datagram,
        apart=chance.choice([0.0, 0.0, 1e-3, 20e-3]) * chance.random(),
        skew=chance.choice([0.0, 1e-3, 10e-3]) * chance.random(),
        leave=chance.random() < 0.3,
        again=chance.random() < 0.5,
        options=_plan(chance, servers),
        **_network(chance),
    )


def _plan(chance: random.Random, servers: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if chance.random() < 0.65:
        cuts = sorted(chance.random() for _ in range(chance.randint(0, 5)))
        options["regions"] = [
            (cut, chance.choice([0.0, 0.02, 0.2, 0.5, 0.9])) for cut in [*cuts, 1.0]
        ]
        spend = chance.choice(["late", "lost", "anything"])
        options["spend"] = spend
        if spend != "lost":
            options["schedule"] = _schedule(chance)
    if chance.random() < 0.3:
        options["fill"] = "mean"
    options["order"] = chance.choice(["sequential", "shuffled", "shuffled", "priority"])
    if options["order"] == "priority":
        options["class_dscp"] = [chance.randrange(64) for _ in range(chance.randrange(9))]
    elif options.get("spend") != "lost" and chance.random() < 0.2:
        options["control"] = "probe"
    pull = chance.choice(["exact", "exact", "committed", "none", "none", "lossy"])
    if pull != "exact":
        options["pull"] = pull
    if pull == "none" and chance.random() < 0.7 and not servers:
        options["shards"] = [chance.choice([0.0, 1.0, 1.0, chance.random()]) for _ in range(64)]
    if pull in ("committed", "lossy"):
        options["pull_bound"] = chance.choice([0.0, 0.02, 0.3, 0.7])
    options["scale"] = chance.choice([1.0, 0.25, -0.3])
    if chance.random() < 0.35:
        options["encoding"] = chance.choice(["f16", "bf16", "int8", "topk"])
        if options["encoding"] == "topk":
            options["kept"] = 10 ** chance.uniform(-3, 0)
    options["seed"] = chance.randrange(1 << 63)
    options["critical"] = chance.choice([0, 0, 1, 3])
    return options


def _schedule(chance: random.Random) -> list[tuple[str, str, int, float]]:
    scope, delay = chance.choice(["worker", "all"]), chance.randrange(3_000_000)
    return chance.choice(
        [
            [("open", "all", 0, -1.0)],
            [("open", scope, delay, -1.0)],
            [("tail", "worker", delay // 10, -1.0)],
            [
                ("first_arrival", scope, 0, 1.0),
                ("first_arrival", scope, delay, 0.8),
                ("first_arrival", scope, delay + 5_000_000, 0.0),
            ],
        ]
    )


def _training(chance: random.Random, seed: int) -> Life:
    policy, options = chance.choice(POLICIES)
    return Life(
        seed,
        "training",
        chance.randint(2, 5),
        chance.choice([0, 0, 0, 1, 2]),
        elements=int(10 ** chance.uniform(2.0, 4.3)),
        steps=chance.randint(3, 8),
        lanes=chance.choice([1, 1, 2, 3]),
        datagram=chance.choice([256, 600, 1472]),
        apart=chance.choice([0.0, 1e-3, 20e-3]) * chance.random(),
        skew=chance.choice([0.0, 1e-3]) * chance.random(),
        options={"policy": policy, **options},
        **_network(chance),
    )


def _faults(chance: random.Random, life: Life) -> list[Fault]:
    of_shape = [name for name, kind in KINDS.items() if life.shape in kind.shapes]
    mild = [name for name in of_shape if name not in DEADLY]
    count = chance.choice([0, 1, 1, 2, 2, 3, 3, 4, 6])
    faults = [KINDS[chance.choice(mild)].draw(chance, life) for _ in range(count)]
    if chance.random() > HARMLESS:
        deadly = chance.choice([name for name in of_shape if name in DEADLY])
        faults.append(KINDS[deadly].draw(chance, life))
    return faults
