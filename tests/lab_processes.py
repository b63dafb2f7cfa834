"""What the tests of the lab's networks find out about processes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from gradwire_calls import until

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT / "src"),
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Of Python processes that others than this user may start."""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_dead(pids: list[int]) -> None:
    assert until(lambda: not any(map(alive, pids)), 10.0), "processes are left behind"


def own_and_kill(command: list[str], count: int) -> None:
    """Kills a program that prints the process ids of `count` others, which must end with it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as owner:
        assert owner.stdout is not None
        pids = [int(text) for text in owner.stdout.readline().split()]
        assert len(pids) == count
        assert all(map(alive, pids))
        owner.send_signal(signal.SIGKILL)
    wait_until_dead(pids)
