"""This benchmark times steps of training under policy "adaptive", beside fixed encodings."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gradwire_lab.bench.transport_grid import NETWORKS as FAST
from gradwire_lab.bench.transport_grid import port
from gradwire_lab.contest.measure import environment, percentile
from gradwire_lab.network.addresses import STORE_PORT
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import KIB
from gradwire_lab.training import crew
from gradwire_lab.training.block import join
from gradwire_lab.training.recipe import Entry, Recipe

HOSTS = 4
NETWORKS = {
    **{name: FAST[name] for name in ("unshaped", "5g", "1g")},
    "100m": port("100m", 100_000_000, 64 * KIB),
}
FIXED = ("exact", "f16", "int8")
ENTRIES = (
    Entry("gloo", "Gloo f32", None),
    Entry("gloo-fp16", "Gloo fp16", None, hook="fp16"),
    Entry("exact", "gradwire exact", "fixed", {"encoding": "f32"}),
    Entry("f16", "gradwire f16", "fixed", {"encoding": "f16"}),
    Entry("int8", "gradwire int8", "fixed", {"encoding": "int8"}),
    Entry("adaptive", "gradwire adaptive", "adaptive"),
)
TIMEOUT = 1200.0
_LEAD_SECONDS = 0.02
_WARM_UP = 2


def run_encodings(
    network: str,
    before: int,
    timed_steps: int,
    block: int = 10,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train on four hosts of a quiet network, by contestants that take turns.

    Args:
        before: steps of "adaptive" that come before, in which it tries encodings.
        block: steps of one contestant before the next has its turn; two more come before and are
            not timed.
        progress: a function that is called with a line of text at each turn.

    Returns:
        By contestant the median seconds of a step, of each turn too, and which shares of the bytes
        its steps had; of "adaptive" the time over the best fixed encoding's, turn by turn, since
        the machine's speed drifts.
    """
    seconds: dict[str, list[list[float]]] = {entry.name: [] for entry in ENTRIES}
    encoded: dict[str, list[float]] = {entry.name: [] for entry in ENTRIES}
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(Network(HOSTS, NETWORKS[network]))
        configs = [
            {
                "rank": rank,
                "store_host": net.address(0),
                "store_port": STORE_PORT,
                "recipe": asdict(Recipe(ranks=HOSTS)),
                "entries": [asdict(entry) for entry in ENTRIES],
            }
            for rank in range(HOSTS)
        ]
        worker = "gradwire_lab.bench.encodings_worker"
        ranks = stack.enter_context(crew.start(net.spawn, worker, configs, HOSTS))
        parameters = ranks.gather(time.monotonic() + TIMEOUT)[0]["parameters"]

        def turn(name: str, count: int, warm_up: int) -> None:
            if progress is not None:
                progress(f"{network}: {name}")
            start = time.monotonic() + _LEAD_SECONDS
            done = crew.train(
                ranks,
                name,
                warm_up + count,
                start,
                start + TIMEOUT,
                warm_up=warm_up,
                validate=False,
            )
            steps = [step for step in join(done, 0, start) if step.timed]
            seconds[name].append([step.took for step in steps])
            encoded[name] += [step.encoded for step in steps if step.encoded is not None]

        turn("adaptive", before, 0)
        first = seconds["adaptive"].pop()
        tried, encoded["adaptive"] = encoded["adaptive"], []
        for done in range(0, timed_steps, block):
            for entry in ENTRIES:
                turn(entry.name, min(block, timed_steps - done), _WARM_UP)
        ranks.ask({"command": "close"}, time.monotonic() + TIMEOUT)
    timed = {name: list(itertools.chain(*turns)) for name, turns in seconds.items()}
    medians = {name: percentile(each, 50) for name, each in timed.items()}
    turns = {name: [statistics.median(turn) for turn in each] for name, each in seconds.items()}
    best = min(FIXED, key=medians.__getitem__)
    return {
        "case": "encodings",
        "network": asdict(NETWORKS[network]),
        "parameters": parameters,
        "before": {
            "steps": before,
            "median": percentile(first, 50),
            "seconds": first,
            "encoded": tried,
        },
        "best": best,
        "over_best": statistics.median(
            ours / theirs for ours, theirs in zip(turns["adaptive"], turns[best], strict=True)
        ),
        "contestants": {
            name: {
                "steps": len(timed[name]),
                "median": medians[name],
                "p90": percentile(timed[name], 90),
                "turns": turns[name],
                "encoded": _shares(encoded[name]),
            }
            for name in seconds
        },
        "environment": environment(),
    }


def _shares(encoded: list[float]) -> dict[str, int]:
    """Return how many steps had each share of float32's bytes."""
    rounded = [f"{share:.2f}" for share in encoded]
    return {share: rounded.count(share) for share in sorted(set(rounded))}
