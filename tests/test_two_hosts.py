"""`examples/two_hosts.sh`, by which the first pages make two hosts out of one machine."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("namespaces")]

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "two_hosts.sh"
PAGE = ROOT / "docs" / "getting-started.md"


def test_the_lines_of_the_first_page_meet_on_two_hosts_of_one_machine() -> None:
    (block,) = re.findall(r"^```sh\n(job\(\) .*?)^```", PAGE.read_text(), re.M | re.S)
    begins, examines = block.splitlines()[:2]
    assert "two_hosts.sh` before `torchrun`" in PAGE.read_text()
    typed = begins.replace("torchrun", f"{SCRIPT.relative_to(ROOT)} torchrun")
    done = subprocess.run(
        ["sh", "-c", f"{typed}\n{examines.partition('#')[0].rstrip()} --json"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [host["name"] for host in found["hosts"]] == ["alpha", "beta"]
    addresses = [host["address"]["address"] for host in found["hosts"]]
    assert addresses == ["10.77.0.1", "10.77.0.2"]
    (pair,) = found["pairs"]
    assert pair["measurement"]["answered"]


def running(marker: str) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "cmdline").read_text():
                yield process
        except OSError:  # it has ended
            continue


def test_nothing_is_left_of_hosts_that_are_killed() -> None:
    marker = f"987654.{secrets.randbits(32)}"
    with subprocess.Popen(
        [SCRIPT, "sh", "-c", f"hostname; sleep {marker}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as script:
        assert script.stdout is not None
        assert {script.stdout.readline(), script.stdout.readline()} == {"alpha\n", "beta\n"}
        script.kill()
        assert script.wait(10)
        deadline = time.monotonic() + 30
        while left := list(running(marker)):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def test_a_command_that_fails_on_either_host_is_the_exit_status() -> None:
    for host in ("alpha", "beta"):
        command = f"[ $(hostname) != {host} ] || exit 7"
        assert subprocess.run([SCRIPT, "sh", "-c", command], stderr=subprocess.DEVNULL).returncode
