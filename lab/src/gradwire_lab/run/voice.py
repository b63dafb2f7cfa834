"""A line on the terminal shows a run's progress."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text

from gradwire_lab.run.course import Audience

__all__ = ["Voice"]


class Voice(Audience):
    """A voice shows stages and rounds; where no line can be drawn anew, stages only."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._status = Status("starting", console=console)

    def stage(self, text: str) -> None:
        self._stage = text
        if self._console.is_interactive:
            self._status.update(Text(text))
        else:
            self._console.print(Text(text), highlight=False, soft_wrap=True)

    def tick(self, contestant: str, done: int) -> None:
        if self._console.is_interactive:
            self._status.update(Text(f"{self._stage}: {contestant} {done}"))

    def __enter__(self) -> Voice:
        if self._console.is_interactive:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
