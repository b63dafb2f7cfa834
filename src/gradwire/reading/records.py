"""Records: the lines of report files, read as far as they are there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.core.report import FORMAT
from gradwire.core.words import count

NEEDED = ("step", "rank", "policy", "comm_s", "delivered")
"""Keys that every version has written; a line without them is none of a report file."""

LARGEST = 1e30
"""No number of a report comes near it."""


def number(value: object, default: float = math.nan) -> float:
    """Returns a number that JSON held; `default` for anything else, and for what is not finite."""
    if isinstance(value, (int, float)) and abs(value) < LARGEST:
        return float(value)
    return default


class UnreadableError(Exception):
    """A path holds no steps; the text says why in one line."""


@dataclass(frozen=True)
class Record:
    """One step as one rank reported it; the keys are explained at `gradwire.StepReport`.

    Attributes:
        values: The line's values; those that an older version lacks are not there.
        names: Names of the regions.
        delivered: float32, what was delivered of each region.
        bounds: float32, the bound of each region.
        took_s: Seconds from this step's start to the next one's; NaN where that is not recorded.
    """

    step: int
    rank: int
    values: Mapping[str, Any]
    names: tuple[str, ...]
    delivered: NDArray[np.float32]
    bounds: NDArray[np.float32]
    took_s: float = math.nan

    def number(self, key: str, default: float = math.nan) -> float:
        """Returns a number of the line; `default` where it is missing or null."""
        return number(self.values.get(key), default)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        return value if isinstance(value, str) else ""

    @property
    def waited_s(self) -> float:
        """Seconds in which nothing was left to compute."""
        return self.number("exposed_s", self.number("comm_s"))

    @property
    def slowest(self) -> Mapping[str, Any] | None:
        """What the slowest bucket waited for (`SlowestBucket`); None where it is not recorded."""
        value = self.values.get("slowest")
        return value if isinstance(value, Mapping) else None

    @property
    def loss(self) -> float:
        """The training loss that the ranks agreed on; NaN where none was given."""
        agreed = self.values.get("agreed")
        return number(agreed.get("loss")) if isinstance(agreed, Mapping) else math.nan


@dataclass
class Run:
    """The steps of one module, as one rank reported them.

    Attributes:
        name: The file, and the module's number where that is not 0.
        records: Its steps, in order.
        others: The records of other ranks, by rank and step, from files beside this one.
        missing: What is not there, one sentence each.
    """

    name: str
    rank: int
    records: list[Record]
    others: dict[int, dict[int, Record]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def at(self, step: int) -> Record | None:
        return next((each for each in self.records if each.step == step), None)


def read(path: Path) -> list[Run]:
    """Reads a report file, or all those of a folder; files of several ranks make one run."""
    try:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        found = [run for file in files for run in _read_file(file)]
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from error
    if not files:
        raise UnreadableError(f"{path}: no *.jsonl in it, as report= of gradwire.attach writes")
    if not found:
        raise UnreadableError(f"{path}: no step of gradwire in it; report= of attach writes them")
    jobs: dict[tuple[str, str], list[Run]] = {}
    for run in found:
        file, _, module = run.name.partition(", module ")
        numbers = [each.span() for each in re.finditer(r"\d+", file) if int(each[0]) == run.rank]
        at, end = numbers[-1] if numbers else (len(file), len(file))
        jobs.setdefault((f"{file[:at]}{{rank}}{file[end:]}", module), []).append(run)
    return [_joined(sorted(ranks, key=lambda run: run.rank)) for ranks in jobs.values()]


def _joined(ranks: list[Run]) -> Run:
    first = ranks[0]
    for other in ranks[1:]:
        first.others[other.rank] = {each.step: each for each in other.records}
        first.missing += [f"rank {other.rank}: {text}" for text in other.missing]
    return first


def _read_file(path: Path) -> list[Run]:
    modules: dict[int, list[Record]] = {}
    broken = foreign = later = 0
    names: dict[tuple[str, ...], tuple[str, ...]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        whole = True
        for line in lines:
            whole = line.endswith("\n")
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                broken += 1
                continue
            if not isinstance(values, dict) or any(key not in values for key in NEEDED):
                foreign += 1
                continue
            try:
                record = _record(values, names)
                module = int(values.get("attachment", 0))
                later += int(values.get("format", 1) > FORMAT)
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
                broken += 1
                continue
            modules.setdefault(module, []).append(record)
    cut = " (the last one is cut off, as by a crash)" if broken and not whole else ""
    runs = []
    for module, records in modules.items():
        name = f"{path}, module {module}" if len(modules) > 1 else str(path)
        run = Run(name, records[0].rank, [])
        if broken:
            run.missing.append(f"{count(broken, 'line')} cannot be read{cut}")
        if foreign:
            run.missing.append(f"{count(foreign, 'line')} of another kind: no step of gradwire")
        if later:
            run.missing.append(
                f"{count(later, 'line')} of a later gradwire; what is new there is left out"
            )
        run.records = list(_timed(records, run.missing))
        runs.append(run)
    return runs


def _record(values: dict[str, Any], names: dict[tuple[str, ...], tuple[str, ...]]) -> Record:
    regions = values.pop("regions", [])
    own = tuple(str(region["name"]) for region in regions)
    return Record(
        int(values["step"]),
        int(values["rank"]),
        values,
        names.setdefault(own, own),
        np.array([number(region["delivered"], 1.0) for region in regions], np.float32),
        np.array([number(region["bound"], 0.0) for region in regions], np.float32),
    )


def _timed(records: Iterable[Record], missing: list[str]) -> Iterator[Record]:
    """Yields a file's steps in order, each with its duration, which the next line holds."""
    kept: dict[int, Record] = {}
    starts = lacking = unexplained = 0
    before: Record | None = None
    for record in records:
        lacking += "exposed_s" not in record.values
        unexplained += "slowest" not in record.values
        if before is not None and record.step <= before.step:
            starts += 1
        period = record.number("period_s", 0.0)
        if before is not None and record.step == before.step + 1 and period > 0:
            kept[before.step] = replace(before, took_s=period)
        kept[record.step] = before = record
    if lacking:
        missing.append(
            f"{count(lacking, 'line')} of a version that did not record exposed_s: "
            "the whole communication stands for the waiting"
        )
    if unexplained:
        missing.append(
            f"{count(unexplained, 'line')} of a version that did not record what a step waits for"
        )
    if starts:
        missing.append(
            f"the job went back {count(starts, 'time')} (it was started again): the last counts; a "
            "new experiment needs a file of its own"
        )
    if gaps := max(kept) - min(kept) + 1 - len(kept):
        missing.append(f"{count(gaps, 'step')} between the first and the last one: no line")
    yield from (kept[step] for step in sorted(kept))
