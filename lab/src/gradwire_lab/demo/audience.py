"""Progress bars show on the terminal while the demo runs."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from gradwire_lab.demo.course import Audience
from gradwire_lab.demo.ground import Ground
from gradwire_lab.demo.scenario import Scenario
from gradwire_lab.training.recipe import Entry

_SMOOTH = 0.9
_LINE_SECONDS = 15.0
"""Where no terminal can draw bars, a line says so often how far it is."""


class _Clock(TimeElapsedColumn):
    """This column shows the time since the start, once and not on every line."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.id == 0 else Text("")


class Bars(Audience):
    """Bars show each contestant's progress, its last communication time and its loss."""

    def __init__(self, console: Console, scenario: Scenario) -> None:
        """Prepare the bars; they show while the ``with`` block lasts."""
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TextColumn("{task.fields[count]:>8}"),
            TextColumn("{task.fields[comm]:>11}"),
            TextColumn("{task.fields[loss]:>10}"),
            _Clock(),
            console=console,
            refresh_per_second=4,
            disable=not console.is_interactive,
        )
        self._stage = self._add("making the network")
        self._bars: dict[str, TaskID] = {
            entry.name: self._add(entry.label) for entry in scenario.entries
        }
        self._losses: dict[str, float] = {}
        self._steps: int | None = None
        self._told = time.monotonic()

    def _add(self, text: str) -> TaskID:
        return self._progress.add_task(text, total=None, count="", comm="", loss="")

    def stage(self, text: str) -> None:
        if self._console.is_interactive:
            self._progress.update(self._stage, description=text)
        else:
            self._console.print(text)

    def grounded(self, ground: Ground) -> None:
        if ground.reason is not None:
            self._console.print(
                f"{ground.reason}; on loopback instead, with injected loss",
                soft_wrap=True,
                markup=False,
            )

    def plan(self, steps: int) -> None:
        self._steps = steps
        for bar in self._bars.values():
            self._progress.update(bar, total=steps)

    def tick(self, entry: Entry, step: dict[str, Any]) -> None:
        loss = self._losses.get(entry.name, step["loss"]) * _SMOOTH + step["loss"] * (1 - _SMOOTH)
        self._losses[entry.name] = loss
        if not self._console.is_interactive and time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            of = "" if self._steps is None else f" of about {self._steps}"
            self._console.print(f"  {entry.label}: step {step['step'] + 1}{of}", highlight=False)
        self._progress.update(
            self._bars[entry.name],
            completed=step["step"] + 1,
            count=f"{step['step'] + 1} steps",
            comm=f"comm {(step['end'] - step['start']) * 1000:.0f} ms",
            loss=f"loss {loss:.2f}",
        )

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
