"""A ledger has a line of JSON for each cell that is done, so that a study can be resumed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from gradwire_lab.scenario.reader import build
from gradwire_lab.study.cell import Cell, Outcome

__all__ = ["Ledger", "LedgerError"]


class LedgerError(RuntimeError):
    """The file is no ledger; the message names file and line."""


class Ledger:
    """A ledger holds outcomes by cell; with a path, every new one is appended there at once."""

    def __init__(self, path: Path | None = None) -> None:
        """Read what is there.

        Raises:
            LedgerError: a line is no cell. A last line that was cut short is dropped instead.
            OSError: the file cannot be read or written.
        """
        self.outcomes: dict[Cell, Outcome] = {}
        self._path = path
        if path is None:
            return
        path.touch()
        text = path.read_text(encoding="utf-8")
        whole, _, cut = text.rpartition("\n")
        if cut:  # the machine stopped within a line
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                cell = build(Cell, entry["cell"], "cell")
                self.outcomes[cell] = build(Outcome, entry["outcome"], "outcome")
            except (ValueError, KeyError, TypeError) as error:
                raise LedgerError(
                    f"{path}, line {number}: no cell of this study: {error}"
                ) from error

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Note what came of a cell."""
        self.outcomes[cell] = outcome
        if self._path is None:
            return
        line = json.dumps({"cell": asdict(cell), "outcome": asdict(outcome)}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
