"""The journal of a results folder keeps every finished run of a cell as one line of JSON.

A line is on the disk before the next cell begins, so a run that ends early loses at most the cell
under way. A line that was cut short, because its process was killed, is removed when the journal
is opened next.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire.training.configure import configure
from gradwire_lab.run.build import build as build_here
from gradwire_lab.run.build import machine, settings_outside
from gradwire_lab.run.model import Calibration, Record, as_json
from gradwire_lab.scenario.load import Cell
from gradwire_lab.scenario.reader import ScenarioError, build

__all__ = ["NAME", "Journal", "fingerprint"]

NAME = "runs.jsonl"
FORMAT = 1
_WORDS = ("name", "title", "published", "marks", "map")
"""Fields of a scenario that change nothing that is measured."""
_TARGET = ("target_loss", "target_of", "target_within")
"""Fields of the model that only say how a training's losses are read afterwards."""
_LATER: tuple[tuple[str, str, object], ...] = (
    ("topology", "rates", ()),
    ("topology", "queues", ()),
    ("model", "gamma", 1.0),
)
"""Fields that a fingerprint leaves out where they have this value.

The runs in experiments/results were made before these fields existed, and keep their fingerprints
this way.
"""


def fingerprint(cell: Cell, quick: bool) -> str:
    """Hash all that a cell's numbers depend on, but for gradwire, the machine and the seed.

    Args:
        quick: whether it is the file's short form.
    """
    scenario = cell.scenario
    fields = {name: value for name, value in asdict(scenario).items() if name not in _WORDS}
    del fields["work"]["seeds"]
    for name in _TARGET:
        del fields["model"][name]
    for section, name, absent in _LATER:
        if fields[section][name] == absent:
            del fields[section][name]
    if scenario.work.kind != "push":  # the contents of files that options name count
        fields["policies"] = [
            configure(each.policy, each.options, environment={})[0].options()
            for each in scenario.contestants
            if each.transport == "gradwire"
        ]
    text = json.dumps({"quick": quick, **fields}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """A journal reads and adds the runs of a folder; it is open while a ``with`` block lasts.

    One process at a time may add runs; any number may read.

    Attributes:
        here: build, machine and settings of this process, as they were when it was opened.
        records: the runs in the order in which they were made.
        calibrations: what the machine carried, in the same order.
    """

    def __init__(self, folder: Path, *, again: bool = False, reading: bool = False) -> None:
        """Read what is there; make the folder if it is not.

        Args:
            folder: the folder of the run's other files.
            again: start over: what is there is thrown away as soon as there is a new run.
            reading: change nothing, and use the runs of every gradwire and machine.

        Raises:
            OSError: the file cannot be made or written, or is missing and should only be read.
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
        self.here = (build_here(), machine(), settings_outside())
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
            # Another run has just removed the empty file.
            taken = os.fstat(self._file).st_nlink == 0
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
            self.calibrations.append(build(Calibration, line, what))
        elif what == "forget":
            self._drop({(cell, seed) for cell, seed in line["runs"]})
        else:
            self.records.append(build(Record, line, what))

    def add(self, record: Record) -> None:
        """Write a run; it is on the disk when this returns, and what it replaces is gone."""
        self._let_go()
        self._write({"what": "run", **as_json(record)})

    def add_calibration(self, found: Calibration) -> None:
        """Write a calibration; where the journal starts over, with the first run."""
        if self._starting_over:
            self.calibrations.append(found)
        else:
            self._write_calibration(found)

    def _write_calibration(self, found: Calibration) -> None:
        self._write({"what": "calibration", **as_json(found)})

    def _let_go(self) -> None:
        """Throw away what a new run replaces.

        This waits for the first new run, because a run that starts over may fail before it.
        """
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
        self._take(json.loads(text))  # reports show what was written

    def forget(self, runs: Collection[tuple[str, int]]) -> None:
        """Leave out these runs, by cell and seed; the next new run removes them from the file."""
        self._forgotten += runs
        self._drop(runs)

    def _drop(self, runs: Collection[tuple[str, int]]) -> None:
        self.records = [each for each in self.records if (each.cell, each.seed) not in runs]

    def known(self, cells: Iterable[Cell], quick: bool) -> dict[tuple[str, int], Record]:
        """Find the newest run of each cell and seed, failed or not.

        A run counts if its cell had the same fingerprint, and gradwire, machine and settings were
        those of this process. A journal that is only read takes the runs of any of them, and a run
        of another form of the cell where there is none of this form.
        """
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
        """Close the file, and remove it if it is empty. May be called again."""
        if self._file >= 0:
            if self._locked and os.fstat(self._file).st_size == 0:
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
