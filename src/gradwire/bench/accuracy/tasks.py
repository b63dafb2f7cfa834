"""The tasks by name."""

from __future__ import annotations

from gradwire.bench.accuracy.digits import DIGITS, DIGITS_DECAY
from gradwire.bench.accuracy.lesson import Task
from gradwire.bench.accuracy.text import TEXT
from gradwire.bench.accuracy.tuning import TUNING

__all__ = ["TASKS"]

TASKS: dict[str, Task] = {task.name: task for task in (DIGITS, DIGITS_DECAY, TEXT, TUNING)}
