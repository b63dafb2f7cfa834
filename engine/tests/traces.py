"""Trace hashes: proof that a change of form changed no datagram, no time and no result.

Runs a table of scenarios in virtual time and compares the hash of each one's trace (everything that
was sent, when, and every result) with traces.json. A change of behaviour writes the file anew and
says in its commit which scenarios changed, and why.

    python engine/tests/traces.py             compares all; ends with 1 where one differs
    python engine/tests/traces.py policy-     compares those whose names begin so
    python engine/tests/traces.py --write     writes traces.json

The norms that policies decide by come from torch, whose last bits may differ between processors: on
another machine compare with what the parent commit gives there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.sim.fabric import NETWORK_A, NETWORK_B, Fabric, Link
from gradwire.sim.job import Job
from scenarios import EAGER, gradients, plan, random_job

TABLE = Path(__file__).with_name("traces.json")
ELEMENTS = 60_000
BOUNDED: dict[str, Any] = {"bound": 0.1, "spend": "anything", "schedule": EAGER}
LATE: dict[str, Any] = {
    "bound": 0.2,
    "spend": "late",
    "schedule": [("tail", "worker", 300_000, -1.0)],
}
SERVED: dict[str, Any] = {"servers": 2}
HOST: dict[str, Any] = {"host_delay": 10e-6, "host_jitter": 60e-6}


def transfers(
    workers: int = 4,
    *,
    ops: int = 3,
    elements: int = ELEMENTS,
    link: Link = NETWORK_A,
    skew: float = 0.0,
    lanes: int = 1,
    options: dict[str, Any] | None = None,
    before: Callable[[Fabric], None] | None = None,
    until: float = 60.0,
    **fabric: Any,
) -> Fabric:
    """All-reduces one after another, all asked for at once in each lane."""
    network = Fabric(workers, link=link, seed=7, **HOST, **fabric)
    if before is not None:
        before(network)
    shape = plan(elements, **(options or {}))
    for op in range(ops):
        for lane in range(lanes):
            starts = [op * 2e-3 + skew * worker for worker in range(workers)]
            network.all_reduce(op, shape, gradients(workers, elements, op), lane=lane, at=starts)
    network.run(until)
    return network


def rivals(network: Fabric) -> None:
    """Two hosts' ports are shared with others, one steadily and one in bursts."""
    network.cross_traffic(0, rate=60e6, length=10.0, start=0.0)
    network.cross_traffic(1, rate=400e6, length=2e-3, period=20e-3, start=1e-3, train=8)


def frozen(network: Fabric) -> None:
    """A rank stands still for 50 ms and goes on."""
    network.run(1e-3, until_done=False)
    network.pause(2)
    network.run(51e-3, until_done=False)
    network.resume(2)


def cut(network: Fabric) -> None:
    """Two hosts do not reach each other for 300 ms."""
    network.partition(0, 1)
    network.run(0.3, until_done=False)
    network.heal(0, 1)


def killed(network: Fabric) -> None:
    """A host goes without a word after a millisecond, with a transfer under way."""
    shape = plan(ELEMENTS)
    network.all_reduce(100, shape, gradients(network.workers, ELEMENTS), lane=9)
    network.run(1e-3, until_done=False)
    network.kill(1)


def steps(policy: str, servers: int, loss: float, options: dict[str, Any]) -> Fabric:
    """Ten steps of a job of four ranks, three buckets each."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tensors = {f"layer{i}.weight": 9_000 - 1_000 * i for i in range(6)}
    job = Job(
        4,
        tensors,
        policy,
        buckets=[2, 2, 2],
        link=Link(loss=loss, loss_burst=4.0),
        servers=servers,
        seed=11,
        **options,
    )
    total = sum(tensors.values())
    for step in range(10):
        chance = np.random.default_rng(step)
        job.step(
            [chance.standard_normal(total, np.float32) / np.float32(step + 1) for _ in range(4)]
        )
        job.compute(5e-3)
    return job.fabric


def drawn(seed: int) -> Fabric:
    """A random job on a random network."""
    return random_job(seed).run()


SCENARIOS: dict[str, Callable[[], Fabric]] = {
    "exact-sharded": lambda: transfers(),
    "exact-served": lambda: transfers(**SERVED),
    "exact-one-server": lambda: transfers(servers=1),
    "exact-two-workers": lambda: transfers(2),
    "exact-eight-workers": lambda: transfers(8, ops=2),
    "exact-network-b": lambda: transfers(link=NETWORK_B),
    "exact-fast-rack": lambda: transfers(link=Link(rate=1.25e9, delay=2e-6, queue=1 << 20)),
    "exact-trains": lambda: transfers(whole_trains=True),
    "exact-small-datagrams": lambda: transfers(datagram_bytes=256, elements=9_000),
    "exact-skew": lambda: transfers(skew=8e-3),
    "exact-without-pacing": lambda: transfers(pacing=False),
    "loss-1-percent": lambda: transfers(link=Link(loss=0.01)),
    "loss-in-runs": lambda: transfers(link=Link(loss=0.05, loss_burst=10.0)),
    "loss-40-percent": lambda: transfers(link=Link(loss=0.4), ops=1),
    "loss-served": lambda: transfers(link=Link(loss=0.05), **SERVED),
    "reorder": lambda: transfers(link=Link(reorder=0.3, reorder_delay=1e-3)),
    "duplicates": lambda: transfers(link=Link(duplicate=0.3)),
    "garbage-and-flips": lambda: transfers(link=Link(garbage=0.1, flip=0.02)),
    "long-10-ms": lambda: transfers(link=Link(delay=2.5e-3, loss=0.01)),
    "long-40-ms": lambda: transfers(link=Link(delay=10e-3, loss=0.01)),
    "long-40-ms-served": lambda: transfers(link=Link(delay=10e-3), servers=1),
    "long-40-ms-bounded": lambda: transfers(link=Link(delay=10e-3, loss=0.05), options=BOUNDED),
    "rivals": lambda: transfers(before=rivals, elements=400_000),
    "rivals-served": lambda: transfers(before=rivals, elements=400_000, **SERVED),
    "rivals-bounded": lambda: transfers(before=rivals, elements=400_000, options=BOUNDED),
    "ecn-marks": lambda: transfers(link=Link(ecn=30_000), elements=200_000),
    "ecn-bleached": lambda: transfers(link=Link(bleach=True)),
    "ecn-dropped": lambda: transfers(link=Link(drop_ect=True)),
    "short-path": lambda: transfers(link=Link(longest=1200)),
    "bounded-anything": lambda: transfers(link=Link(loss=0.03), options=BOUNDED),
    "bounded-anything-served": lambda: transfers(link=Link(loss=0.03), options=BOUNDED, **SERVED),
    "bounded-late": lambda: transfers(link=Link(loss=0.03), options=LATE),
    "bounded-lost": lambda: transfers(link=Link(loss=0.1), options=LATE | {"spend": "lost"}),
    "bounded-shuffled": lambda: transfers(options=BOUNDED | {"order": "shuffled"}),
    "bounded-mean-fill": lambda: transfers(options=LATE | {"fill": "mean"}, skew=1e-3),
    "pull-committed": lambda: transfers(
        link=Link(loss=0.05), options=BOUNDED | {"pull": "committed", "pull_bound": 0.2}
    ),
    "pull-lossy": lambda: transfers(
        link=Link(loss=0.05), options=BOUNDED | {"pull": "lossy", "pull_bound": 0.2}
    ),
    "push-only": lambda: transfers(options=BOUNDED | {"pull": "none"}, **SERVED),
    "control-probe": lambda: transfers(
        link=Link(loss=0.03), options=BOUNDED | {"control": "probe"}, **SERVED
    ),
    "priorities": lambda: transfers(
        options=BOUNDED | {"order": "priority", "class_dscp": [10, 20, 30]}
    ),
    "encoding-f16": lambda: transfers(options={"encoding": "f16"}),
    "encoding-int8": lambda: transfers(options={"encoding": "int8"}, **SERVED),
    "encoding-topk": lambda: transfers(options=BOUNDED | {"encoding": "topk", "kept": 0.1}),
    "lanes": lambda: transfers(lanes=3, skew=1e-3),
    "lanes-served": lambda: transfers(lanes=2, link=Link(loss=0.02), **SERVED),
    "small-memory": lambda: transfers(memory_limit=1 << 20, elements=100_000, servers=1),
    "small-buffer": lambda: transfers(receive_buffer=65_536, elements=200_000, servers=1),
    "incast": lambda: transfers(12, servers=1, elements=30_000, link=NETWORK_B),
    "frozen-rank": lambda: transfers(before=frozen),
    "partition-healed": lambda: transfers(before=cut),
    "killed-rank": lambda: transfers(before=killed, peer_timeout=5.0),
}
POLICIES: dict[str, dict[str, Any]] = {
    "reliable": {},
    "dblp": {},
    "ltp": {},
    "plot": {"table": {"layer0.*": 0.0, "*": 0.3}},
    "mlt": {},
    "optireduce": {},
    "netsenseml": {},
    "adaptive": {},
}
for _policy, _options in POLICIES.items():
    for _path, _servers, _loss in (("sharded", 0, 0.01), ("served", 2, 0.01), ("lossy", 0, 0.2)):
        SCENARIOS[f"policy-{_policy}-{_path}"] = partial(steps, _policy, _servers, _loss, _options)
for _seed in range(24):
    SCENARIOS[f"random-{_seed}"] = partial(drawn, _seed)


def trace_hash(name: str) -> str:
    """The trace's hash of one scenario."""
    return f"{SCENARIOS[name]().trace_hash:016x}"


def main() -> int:
    """Compares or writes; see the module's text."""
    parser = argparse.ArgumentParser(description="Compare the simulator's traces with traces.json.")
    parser.add_argument("prefix", nargs="?", default="", help="only scenarios that begin so")
    parser.add_argument("--write", action="store_true", help="write traces.json anew")
    arguments = parser.parse_args()
    known: dict[str, str] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    names = [name for name in SCENARIOS if name.startswith(arguments.prefix)]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(names, pool.map(trace_hash, names), strict=True))
    differ = [name for name in names if known.get(name) != found[name]]
    for name in differ:
        print(f"{name}: {known.get(name, 'new')} -> {found[name]}")
    print(f"{len(names) - len(differ)} of {len(names)} traces are equal")
    if arguments.write:
        kept = {name: found.get(name) or known[name] for name in SCENARIOS}
        TABLE.write_text(json.dumps(kept, indent=2) + "\n")
        return 0
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
