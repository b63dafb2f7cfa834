"""The interpreter's end while daemon threads complete torch's futures."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading, time, torch
from gradwire.process_group.work import EngineWork
from gradwire.training.staging import Stage

def complete():
    for each in made:
        begun.set()
        {complete}

made = [{make} for _ in range(200)]
after = [{future}.then(lambda _: time.sleep(0.05)) for each in made]
begun = threading.Event()
threading.Thread(target=complete, daemon=True).start()
begun.wait()
time.sleep({later})
"""
STAGE = {"make": "Stage(torch.zeros(8))", "future": "each.future()", "complete": "each.deliver()"}
WORK = {
    "make": "EngineWork([torch.zeros(8)], 'all_reduce')",
    "future": "each.get_future()",
    "complete": "each.finish()",
}


@pytest.mark.parametrize("later", [0.0, 0.02])
@pytest.mark.parametrize("parts", [STAGE, WORK], ids=["stage", "work"])
def test_a_thread_inside_of_a_future_does_not_abort_the_end(
    parts: dict[str, str], later: float
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(**parts, later=later)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
