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


STORE = """
import threading, time
import torch.distributed as dist
from gradwire.transport.store import BoundedStore

host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store = BoundedStore(host, 60.0)
begun = threading.Event()

def ask():
    while True:
        store.set("key", "value" * 10_000)
        begun.set()

threading.Thread(target=ask, daemon=True).start()
begun.wait()
"""
OPENING = """
import threading, time
import torch.distributed as dist
from gradwire.transport import open_engine
from gradwire.transport.communicator import Communicator

waits, store, begun = open_engine._waits, dist.HashStore(), threading.Event()

def looks(engine):
    begun.set()
    return waits(engine) or True  # as if a peer had not answered

def join(rank):
    Communicator(store, rank, 2, {"interface": "lo"})

open_engine._waits = looks
for rank in range(2):
    threading.Thread(target=join, args=(rank,), daemon=True).start()
begun.wait()
time.sleep(0.5)
"""
THREADS = """
import threading, time, torch
from gradwire.transport.threads import CompletionPool, StartQueue, apart

begun, values = threading.Event(), torch.zeros(1 << 20)

def works(*_):
    begun.set()
    for _ in range(50):
        values.add_(1)
    return values

{start}
begun.wait()
time.sleep(0.02)
"""
STARTS = "queue = StartQueue('starts')\nfor _ in range(1000): queue.submit(works)"
APART = "for _ in range(8): apart(works)"
HANDLES = "pool = CompletionPool(lambda: 1, works, 'pool', print)"
POLLS = "pool = CompletionPool(works, id, 'pool', print)"


@pytest.mark.parametrize(
    "start", [STARTS, APART, HANDLES, POLLS], ids=["starts", "apart", "handles", "polls"]
)
def test_what_an_engines_users_run_on_threads_does_not_abort_the_end(start: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS.format(start=start)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("program", [STORE, OPENING], ids=["store", "opening"])
def test_a_daemon_thread_inside_of_a_store_or_an_engine_does_not_abort_the_end(
    program: str,
) -> None:
    """As the one that opens an engine again after on_failure="host" has gone over."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")


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
