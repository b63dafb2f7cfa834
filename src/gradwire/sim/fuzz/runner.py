"""Runs ranges of seeds in processes of their own, and keeps what became of them in a file.

A batch of seeds is one line of JSON: a run that is interrupted goes on with the batches that are
missing. A process that a seed ends, or that takes too long with one, counts as a failure of it.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gradwire.sim.fuzz.draw import draw
from gradwire.sim.fuzz.judge import Verdict, judge
from gradwire.sim.fuzz.life import Cut, Life
from gradwire.sim.fuzz.shrink import shrink

BATCH = 50
CPU_SECONDS = 300
"""Processor seconds that one seed may take."""

Batch = dict[str, Any]
FIELDS = ("seeds", "outcomes", "faults", "causes", "failed")
BEGINNING = '{"seeds": ['
"""How each line of the file begins."""


def verdict_of(seed: int, cut: Cut | None = None) -> Verdict:
    """Runs one seed, or what a cut leaves of it; any exception is a failure of kind "crash"."""
    life = draw(seed)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        return judge(life if cut is None else cut.of(life))
    except Exception as error:  # whatever it is, the seed shows it
        return Verdict("crash", f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def smallest(seed: int, outcome: str) -> Cut:
    """Shrinks a seed that fails."""
    life = draw(seed)

    def fails(cut: Cut) -> bool:
        return not impossible(cut.of(life)) and verdict_of(seed, cut).outcome == outcome

    return shrink(life, fails)


def impossible(life: Life) -> str:
    """Returns why the options that a cut has left do not go together; "" where they do."""
    from gradwire.sim.fuzz.transfers import plan_of
    from gradwire.training.configure import configure

    try:
        if life.shape == "transfers":
            plan_of(life)
        else:
            options = {name: value for name, value in life.options.items() if name != "policy"}
            configure(life.options["policy"], {**options, "error_feedback": True}, {})
    except ValueError as error:
        return str(error)
    return ""


def run_batch(first: int, last: int) -> Batch:
    """Runs the seeds from the first to the last; returns counts, and those that failed."""
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    failed: list[list[Any]] = []
    for seed in range(first, last + 1):
        verdict = verdict_of(seed)
        life = draw(seed)
        outcomes[f"{life.shape} {verdict.outcome}"] += 1
        faults.update({fault.kind for fault in life.faults} or {"none"})
        causes.update(set(verdict.causes))
        if verdict.wrong:
            failed.append([seed, verdict.outcome, verdict.text.splitlines()[0][:400]])
    return {
        "seeds": [first, last],
        "outcomes": outcomes,
        "faults": faults,
        "causes": causes,
        "failed": failed,
    }


def known(path: Path | None) -> list[Batch]:
    """The batches that a file holds.

    Raises:
        ValueError: A line is neither a batch nor the beginning of one.
    """
    if path is None or not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            batch = json.loads(line)
        except ValueError:
            if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                raise ValueError(f"line {number} is not of this command") from None
            continue  # it was cut off
        if not _is_batch(batch):
            raise ValueError(f"line {number} is not of this command")
        found.append(batch)
    return found


def _is_batch(batch: object) -> bool:
    if not isinstance(batch, dict) or batch.keys() != set(FIELDS):
        return False
    counts = [batch[name] for name in FIELDS[1:4]]
    seeds, failed = batch["seeds"], batch["failed"]
    return (
        isinstance(seeds, list)
        and [type(each) for each in seeds] == [int, int]
        and all(
            isinstance(each, dict) and all(type(count) is int for count in each.values())
            for each in counts
        )
        and isinstance(failed, list)
        and all(
            isinstance(each, list) and [type(part) for part in each] == [int, str, str]
            for each in failed
        )
    )


def check_state(path: Path | None) -> None:
    """Checks that a file can hold what has run.

    Raises:
        OSError: It cannot be read or written.
        ValueError: It holds something else.
    """
    if path is not None:
        known(path)
        with path.open("a", encoding="utf-8"):
            pass


def run(first: int, last: int, jobs: int, path: Path | None) -> Iterator[Batch]:
    """Runs all seeds of a range that a file does not hold, and adds them to it.

    Yields:
        Batches as they end, those of the file before.
    """
    done = known(path)
    yield from done
    ends = {batch["seeds"][0]: batch["seeds"][1] for batch in done}
    todo = []
    for begin in range(first, last + 1, BATCH):
        end = min(begin + BATCH - 1, last)
        while begin <= end and begin in ends:  # a batch of the file may be shorter
            begin = ends[begin] + 1
        if begin <= end:
            todo.append((begin, end))
    for batch in _batches(todo, jobs):
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(batch) + "\n")
        yield batch


def _batches(todo: list[tuple[int, int]], jobs: int) -> Iterator[Batch]:
    if jobs == 1 and len(todo) == 1:
        yield run_batch(*todo[0])
        return
    while todo:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            running: dict[Future[Batch], tuple[int, int]] = {}
            rest = iter(list(todo))
            try:
                while True:
                    while len(running) < jobs and (each := next(rest, None)):
                        running[pool.submit(run_batch, *each)] = each
                    if not running:
                        break
                    for future in wait(running, return_when="FIRST_COMPLETED").done:
                        batch = future.result()
                        todo.remove(running.pop(future))
                        yield batch
            except BrokenProcessPool:
                dead = list(running.values())
        if not todo:
            return
        for first, last in dead:  # one of these seeds ends a process: which?
            todo.remove((first, last))
            if first == last:
                yield _ended(first)
            else:
                todo[:0] = [(seed, seed) for seed in range(first, last + 1)]
        if dead and len(dead) > 1 and all(first == last for first, last in dead):
            jobs = 1


def _ended(seed: int) -> Batch:
    return {
        "seeds": [seed, seed],
        "outcomes": {"process ended": 1},
        "faults": {},
        "causes": {},
        "failed": [[seed, "ended", "the process ended, or took too long"]],
    }
