"""Threads that cannot start: the caller is told, and waits for none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path

import gradwire
from gradwire.core.begin import begin

SOURCE = Path(gradwire.__file__).parent

WITHOUT_MEMORY = """
import ctypes, resource, threading, time
from gradwire.core.begin import begin

others = [threading.Thread(target=time.sleep, args=(0.05,)) for _ in range(2)]
for other in others:
    other.start()
for other in others:
    other.join()  # their stacks are used again
ctypes.CDLL(None).mallopt(-3, 4096)  # what is freed is not
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), -1))
try:
    begin(lambda: None, "late")
except RuntimeError as error:
    print("refused" if "late" in str(error) else error)
"""


def test_a_thread_that_ends_before_it_runs_is_refused() -> None:
    """Python's own start waits for it for ever."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "refused", done.stderr


def test_a_thread_runs_under_its_name_when_it_is_returned() -> None:
    names: list[str] = []
    begin(lambda: names.append(threading.current_thread().name), "named").join(30)
    assert names == ["named"]


def test_no_other_thread_is_started() -> None:
    """Whatever starts a thread by itself waits for ever where memory has run out."""
    own = SOURCE / "core" / "begin.py"
    for path in SOURCE.rglob("*.py"):
        called = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        }
        assert path == own or not called & {"threading.Thread", "threading.Timer", "Thread"}, path
