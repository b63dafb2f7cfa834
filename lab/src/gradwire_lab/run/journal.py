"""The journal of a folder: every finished run of a cell, a line each, so that none is lost.

A line is on the disk before the next cell begins. What a process was killed in the middle of
writing is no line; it is cut off when the journal is next opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.training.configure import configure
from gradwire_lab.run.build import build, machine, settings_outside
from gradwire_lab.run.checks import Calibration
from gradwire_lab.run.samples import CellRun, cell_run_of, cell_run_table
from gradwire_lab.scenario.load import Cell
from gradwire_lab.scenario.reader import ScenarioError

__all__ = ["NAME", "Journal", "Record", "fingerprint"]

NAME = "runs.jsonl"
FORMAT = 1
_WORDS = ("name", "title", "published", "marks", "map")
"""Of a scenario, what changes nothing that is measured."""
_TARGET = ("target_loss", "target_of", "target_within")
"""Of the model, what a training's losses are read for, afterwards."""
_LATER: tuple[tuple[str, str, object], ...] = (
    ("topology", "rates", ()),
    ("topology", "queues", ()),
    ("model", "gamma", 1.0),
)
"""Keys that the first journals did not know, and what stands for their absence."""


def fingerprint(cell: Cell, quick: bool) -> str:
    """Of all that a cell's numbers depend on, but for gradwire, the machine and the seed."""
    scenario = cell.scenario
    fields = {name: value for name, value in asdict(scenario).items() if name not in _WORDS}
    del fields["work"]["seeds"]
    for name in _TARGET:
        del fields["model"][name]
    for section, name, absent in _LATER:  # runs from before they were there: the same form
        if fields[section][name] == absent:
            del fields[section][name]
    if scenario.work.kind != "push":  # options may name files: what stands in them counts
        fields["policies"] = [
            configure(each.policy, each.options, environment={})[0].options()
            for each in scenario.contestants
            if each.transport == "gradwire"
        ]
    text = json.dumps({"quick": quick, **fields}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """One cell, one seed, as it was run once.

    Attributes:
        cell: its name.
        seed: the run's.
        scenario: fingerprint of the cell.
        date: when it began, ISO 8601, UTC.
        took_s: how long it took, set-up included.
        gradwire: version and fingerprint of what measured.
        commit: of a source checkout.
        machine: and its software.
        settings: GRADWIRE_* variables that were set.
        load: of the machine when it began.
        stolen: share of the processor time wanted meanwhile that a hypervisor gave to others; None:
            not known, as of runs that were made before it was written down.
        run: the samples.
    """

    cell: str
    seed: int
    scenario: str
    date: str
    took_s: float
    gradwire: str
    commit: str | None
    machine: dict[str, Any]
    settings: dict[str, str]
    load: float
    run: CellRun
    stolen: float | None = None


class Journal:
    """The runs of a folder; open while a ``with`` block lasts, for one process at a time unless
    it only reads.

    Attributes:
        here: build, machine and settings of this process, as they were when it was opened.
        records: in the order in which they were made.
        calibrations: what the machine carried, likewise.
    """

    def __init__(self, folder: Path, *, again: bool = False, reading: bool = False) -> None:
        """Read what is there; make the folder if it is not.

        Args:
            folder: of the run's other files.
            again: throw away what is there, whatever it is, as soon as there is a new run.
            reading: change nothing, and know the runs of every gradwire and machine.

        Raises:
            OSError: it cannot be made or written, or, if only to be read, is not there.
            ScenarioError: another process writes there, or the file is no journal.
        """
        self.path = folder / NAME
        self._reading, self._locked, self._starting_over = reading, False, again
        self._forgotten: list[tuple[str, int]] = []
        if reading:
            flags = os.O_RDONLY
        else:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._file = os.open(self.path, flags | os.O_CLOEXEC, 0o644)
        self.here = (build(), machine(), settings_outside())
        self.records: list[Record] = []
        self.calibrations: list[Calibration] = []
        try:
            if not reading:
                self._lock()
            if not again:
                self._read()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True
        else:
            taken = os.fstat(self._file).st_nlink == 0  # it ended this moment, with nothing run
        if taken:
            raise ScenarioError(
                f"{self.path}: another `gradwire lab run` writes there; wait for it, or name "
                "another folder with --out"
            )
        self._locked = True

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data) and not self._reading:
            os.ftruncate(self._file, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                found = json.loads(line)
                known = found["format"] == FORMAT
                if known:
                    self._take(found)
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ScenarioError(
                    f"{self.path}: line {number} is no run of this gradwire's lab; --again starts "
                    "over, and --out names another folder"
                ) from None
            if not known:
                raise ScenarioError(
                    f"{self.path}: line {number} has another format than {FORMAT}, which this "
                    "gradwire's lab writes and reads; --out names another folder"
                )

    def _take(self, line: dict[str, Any]) -> None:
        del line["format"]
        what = line.pop("what")
        if what == "calibration":
            self.calibrations.append(Calibration(**line))
        elif what == "forget":
            self._drop({(cell, seed) for cell, seed in line["runs"]})
        else:
            self.records.append(Record(**{**line, "run": cell_run_of(line["run"])}))

    def add(self, record: Record) -> None:
        """Write a run down; it is on the disk when this returns, and what it takes the place of is
        gone for good."""
        self._let_go()
        fields = {name: value for name, value in vars(record).items() if name != "run"}
        self._write({"what": "run", **fields, "run": cell_run_table(record.run)})

    def add_calibration(self, found: Calibration) -> None:
        """Write a calibration down; with the first run, where that one starts over."""
        if self._starting_over:
            self.calibrations.append(found)
        else:
            self._write_calibration(found)

    def _write_calibration(self, found: Calibration) -> None:
        self._write({"what": "calibration", **asdict(found)})

    def _let_go(self) -> None:
        """Throw away what a new run takes the place of: not before there is one, for nothing may
        come of starting over."""
        if self._starting_over:
            self._starting_over = False
            os.ftruncate(self._file, 0)
            calibrations, self.calibrations = self.calibrations, []
            for each in calibrations:
                self._write_calibration(each)
        if self._forgotten:
            self._write({"what": "forget", "runs": [list(each) for each in self._forgotten]})
            self._forgotten = []

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, **line}, allow_nan=False, separators=(",", ":"))
        data = text.encode() + b"\n"
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
        self._take(json.loads(text))  # what is reported is what was written

    def forget(self, runs: Collection[tuple[str, int]]) -> None:
        """Let these runs, by cell and seed, not have been; for good from the next new run on."""
        self._forgotten += runs
        self._drop(runs)

    def _drop(self, runs: Collection[tuple[str, int]]) -> None:
        self.records = [each for each in self.records if (each.cell, each.seed) not in runs]

    def known(self, cells: Iterable[Cell], quick: bool) -> dict[tuple[str, int], Record]:
        """The newest run of each cell and seed that goes with these cells, failed or not: of the
        same scenario, by the same gradwire, on the same machine. If it only reads: by any, and of
        another form of the cell where there is none of this one."""
        wanted = {cell.name: fingerprint(cell, quick) for cell in cells}
        if self._reading:
            ordered = sorted(self.records, key=lambda each: wanted.get(each.cell) == each.scenario)
            return {(each.cell, each.seed): each for each in ordered if each.cell in wanted}
        return {
            (each.cell, each.seed): each
            for each in self.records
            if wanted.get(each.cell) == each.scenario
            and (each.gradwire, each.machine, each.settings) == self.here
        }

    def close(self) -> None:
        """Close the file, and let none be where nothing was written. May be called again."""
        if self._file >= 0:
            if self._locked and os.fstat(self._file).st_size == 0:
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
