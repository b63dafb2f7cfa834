"""The tasks are listed here by name."""

from __future__ import annotations

from gradwire_lab.study.digits import DIGITS, DIGITS_DECAY
from gradwire_lab.study.lesson import Task
from gradwire_lab.study.text import TEXT
from gradwire_lab.study.tuning import TUNING

__all__ = ["TASKS"]

TASKS: dict[str, Task] = {task.name: task for task in (DIGITS, DIGITS_DECAY, TEXT, TUNING)}
