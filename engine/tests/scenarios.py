"""What the tests of the engine share: gradients, plans, and random jobs on random networks."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link

EAGER = (("open", "all", 0, -1.0),)

Array = NDArray[np.float32]


def gradients(workers: int, elements: int, seed: int = 0) -> list[Array]:
    """Standard normal, of magnitudes that differ by element, so that the order of sums shows."""
    random = np.random.default_rng(seed)
    scale = np.exp(random.standard_normal(elements, dtype=np.float32) * 4)
    return [random.standard_normal(elements, dtype=np.float32) * scale for _ in range(workers)]


def rank_order_sum(values: Sequence[Array], scale: float = 1.0) -> Array:
    total = reduce(np.add, values)
    return total if scale == 1.0 else total * np.float32(scale)


def plan(elements: int, bound: float = 0.0, **options: Any) -> _engine.Plan:
    """One region."""
    return _engine.Plan(elements=elements, regions=[(0, elements, bound)], **options)


def chunks_of(fabric: Fabric, of: _engine.Plan) -> tuple[NDArray[Any], ...]:
    """Offsets, lengths, region and aggregator of each chunk."""
    return _engine.chunk_grid(of, fabric.datagram_bytes, fabric.servers or fabric.workers)


def expand(fabric: Fabric, of: _engine.Plan, mask: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """A mask per chunk as one per element."""
    _, lengths, _, _ = chunks_of(fabric, of)
    return np.repeat(mask.astype(bool), lengths)


def same_bits(a: Array, b: Array) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def must_be_ok(fabric: Fabric, ops: int = 1) -> None:
    for op in range(ops):
        for worker in range(fabric.workers):
            done = fabric.completion(worker, op)
            assert done is not None, f"rank {worker}, op {op}: not done at {fabric.now:.3f} s"
            assert done.ok, f"rank {worker}, op {op}: {done.error}"


def own_drops(fabric: Fabric) -> int:
    """The endpoints' packets that queues, policers and socket buffers dropped."""
    hosts = range(fabric.workers + fabric.servers)
    queues = sum(
        fabric.link_counters(host, direction)[which]
        for host in hosts
        for direction in ("up", "down")
        for which in ("dropped_queue", "dropped_policer")
    )
    return queues + int(sum(fabric.counters(host)["dropped_by_socket"] for host in hosts))


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


def heap_growth() -> Callable[[], int]:
    """Tells what this process has allocated from C and C++ since, touched or not.

    The garbage of earlier tests goes before: collected meanwhile, it would count as less growth.
    """
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Heap

    def heap_bytes() -> int:
        heap = libc.mallinfo2()
        return int(heap.uordblks + heap.hblkhd)

    gc.collect()
    before = heap_bytes()
    return lambda: heap_bytes() - before


def resident_bytes() -> int:
    """What of this process's memory has been touched."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


# ---------------------------------------------------------------------------- random jobs


@dataclass
class Job:
    """Everything about one random run; a pure function of its seed."""

    seed: int
    workers: int
    servers: int
    plan: _engine.Plan
    plan_options: dict[str, Any]
    link: Link
    fabric_options: dict[str, Any]
    ops: list[dict[str, Any]] = field(repr=False)

    def fabric(self, **options: Any) -> Fabric:
        return Fabric(
            self.workers,
            servers=self.servers,
            seed=self.seed,
            link=self.link,
            **self.fabric_options,
            **options,
        )

    def run(self, until: float = 300.0, **options: Any) -> Fabric:
        fabric = self.fabric(**options)
        for number, op in enumerate(self.ops):
            fabric.all_reduce(number, self.plan, **op)
        fabric.run(until)
        return fabric


def random_regions(random: np.random.Generator, elements: int) -> list[tuple[int, int, float]]:
    cuts = random.integers(1, elements + 1, int(random.integers(0, 6)))
    edges = np.unique(np.concatenate([[0], cuts, [elements]]))
    bounds = random.choice([0.0, 0.02, 0.2, 0.5, 0.9], len(edges) - 1)
    return [
        (int(a), int(b - a), float(p)) for a, b, p in zip(edges, edges[1:], bounds, strict=False)
    ]


def random_schedule(random: np.random.Generator, spend: str) -> list[tuple[str, str, int, float]]:
    scope = str(random.choice(["worker", "all"]))
    delay = int(random.integers(0, 3_000_000))
    kinds: list[list[tuple[str, str, int, float]]] = [[("open", "all", 0, 1.0)]]
    if spend in ("late", "anything"):
        kinds += [
            [("open", scope, 0, -1.0)],
            [("open", scope, delay, -1.0)],
            [("tail", "worker", delay // 10, -1.0)],
            [
                ("first_arrival", scope, 0, 1.0),
                ("first_arrival", scope, delay, 0.8),
                ("first_arrival", scope, delay + 5_000_000, 0.0),
            ],
        ]
    return kinds[int(random.integers(len(kinds)))]


def random_link(random: np.random.Generator) -> Link:
    """From a metropolitan line to a fast rack; a fifth of all links lose nothing."""
    loss = float(random.choice([0.0, 0.001, 0.02, 0.1, 0.25]))
    return Link(
        rate=float(10 ** random.uniform(6.3, 9.3)),
        delay=float(10 ** random.uniform(-6, -2.7)),
        queue=int(2 ** random.uniform(14, 19)),
        loss=loss,
        loss_burst=float(random.choice([1, 3, 10])) if loss <= 0.1 else 1.0,
        reorder=float(random.choice([0.0, 0.05, 0.5])),
        reorder_delay=float(10 ** random.uniform(-5, -2.7)),
        duplicate=float(random.choice([0.0, 0.02, 0.3])),
        garbage=float(random.choice([0.0, 0.0, 0.05])),
    )


def random_encoding(seed: int) -> dict[str, Any]:
    """Of a third of all jobs; by draws of its own."""
    random = np.random.default_rng([seed, 1])
    if random.random() < 2 / 3:
        return {}
    encoding = str(random.choice(["f16", "bf16", "int8", "topk"]))
    kept = float(10 ** random.uniform(-3, 0)) if encoding == "topk" else 1.0
    return {"encoding": encoding, "kept": kept}


def random_classes(seed: int, workers: int) -> tuple[dict[str, Any], list[int]]:
    """Of a third of all jobs; by draws of its own. How many classes each worker uses, 0: none."""
    random = np.random.default_rng([seed, 2])
    if random.random() < 2 / 3:
        return {}, []
    table = random.integers(0, 64, int(random.integers(0, 9))).tolist()
    used = random.choice([0, 1, 2, 8], workers).tolist()
    return {"order": "priority", "class_dscp": table}, used


def random_control(seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Passes in a third of all jobs that may have them, a lossy pull in a third; own draws."""
    random = np.random.default_rng([seed, 3])
    chosen: dict[str, Any] = {}
    if (
        options["spend"] != "lost"
        and options.get("order") != "priority"
        and random.random() < 1 / 3
    ):
        chosen["control"] = "probe"
    if random.random() < 1 / 3:
        chosen |= {"pull": "lossy", "pull_bound": float(random.choice([0.0, 0.02, 0.3, 0.7]))}
    return chosen


def random_job(seed: int) -> Job:
    random = np.random.default_rng(seed)
    workers = int(random.integers(2, 9))
    servers = int(random.choice([0, 0, 1, 2]))
    elements = int(10 ** random.uniform(0, 4.5))
    spend = str(random.choice(["nothing", "late", "lost", "anything"]))
    pull = str(random.choice(["exact", "exact", "committed", "none"]))
    datagram = int(random.choice([256, 600, 1472]))
    options: dict[str, Any] = {
        "regions": random_regions(random, elements),
        "spend": spend,
        "schedule": random_schedule(random, spend),
        "fill": str(random.choice(["zero", "mean"])),
        "order": str(random.choice(["shuffled", "sequential"])),
        "pull": pull,
        "pull_bound": float(random.choice([0.0, 0.1, 0.4])) if pull == "committed" else 0.0,
        "scale": float(random.choice([1.0, 1 / workers, -0.3])),
        "seed": int(random.integers(2**63)),
        **random_encoding(seed),
    }
    order, used = random_classes(seed, workers)
    options.update(order)
    options |= random_control(seed, options)
    made = _engine.Plan(elements=elements, **options)
    chunks = len(_engine.chunk_grid(made, datagram, servers or workers)[0])
    least = _engine.least_memory_limit(made, datagram, workers, servers)
    ops = []
    starts = np.zeros(workers)
    for _ in range(int(random.integers(1, 5))):
        starts = starts + random.uniform(0, 5e-3, workers) * random.integers(0, 2)
        ops.append(
            {
                "data": [random.standard_normal(elements, dtype=np.float32)] * workers
                if random.random() < 0.1
                else [random.standard_normal(elements, dtype=np.float32) for _ in range(workers)],
                "critical": [
                    random.integers(0, chunks, int(random.integers(0, 4))) for _ in range(workers)
                ],
                "priorities": [
                    np.random.default_rng([seed, 3, rank]).integers(0, n, chunks, np.uint8)
                    if n
                    else None
                    for rank, n in enumerate(used)
                ]
                or None,
                "stats": random.standard_normal((workers, 8)).tolist(),
                "at": starts.tolist(),
            }
        )
    return Job(
        seed=seed,
        workers=workers,
        servers=servers,
        plan=made,
        plan_options=options,
        link=random_link(random),
        fabric_options={
            "whole_trains": bool(random.random() < 0.3),
            "host_delay": float(random.choice([0.0, 20e-6])),
            "host_jitter": float(random.choice([0.0, 50e-6, 1e-3])),
            "datagram_bytes": datagram,
            "memory_limit": int(random.choice([least, 2**31])),
            "receive_buffer": int(random.choice([65_536, 2**20])),
        },
        ops=ops,
    )
