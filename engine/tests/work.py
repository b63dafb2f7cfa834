"""The engine's work: instructions for each datagram at 4 and 64 ranks, and the simulator's speed.

An all-reduce runs in virtual time under valgrind, which counts the instructions of the endpoints'
entry points with all that they call. They are divided by the datagrams that the ranks sent, data
and ACKs. A protocol whose work does not grow with the ranks has the same figure at 4 and at 64
ranks. The simulator hands over each datagram by itself, real hosts take batches of trains that have
arrived, each as one message: a third column has such batches, on longer paths. The simulator's
speed is measured without valgrind, in events for each second of processor time, the oracle's checks
included.

    python engine/tests/work.py    builds work.cc into build/work and runs it; minutes and 8 GB

Instructions are the same at each run of one binary. Events a second differ with the machine and its
load: compare two commits on the same machine, in turn.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "work"
RANKS = (4, 64)
BATCH = 20  # microseconds for which trains wait where they are taken in batches
COUNTED = 600_000  # elements of the all-reduce under valgrind
LONG = 8_000_000  # elements of the one in batches: more than 10,000 packets a path
TIMED = 6_500_000  # elements of the timed one, 26 MB
ENTRIES = ("receive", "flush", "transmit", "on_timer", "next_timer")


class Run(NamedTuple):
    """What the driver prints of an all-reduce."""

    events: int
    datagrams: int
    seconds: float
    compiler: str


def built(program: str = "gradwire_work") -> str:
    """Builds a driver and returns its path."""
    cmake = os.path.join(sysconfig.get_path("scripts"), "cmake")
    options = ["-DGRADWIRE_BINDING=OFF", "-DGRADWIRE_WORK=ON", "-DCMAKE_BUILD_TYPE=Release"]
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run([cmake, "-S", ROOT, "-B", BUILD, *options], **quiet)
    subprocess.run([cmake, "--build", BUILD, f"-j{os.cpu_count()}", "--target", program], **quiet)
    return str(BUILD / program)


def run(*command: str) -> Run:
    """Runs the driver, under another program or alone."""
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(
        None, 3
    )
    return Run(int(words[0]), int(words[1]), float(words[2]), words[3].strip())


def instructions(
    driver: str, ranks: int, elements: int = COUNTED, delay: int = 0
) -> dict[str, float]:
    """Instructions for each datagram, by entry point."""
    with tempfile.TemporaryDirectory() as folder:
        profile = os.path.join(folder, "profile")
        valgrind = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}")
        done = run(*valgrind, driver, str(ranks), str(elements), str(delay))
        annotate = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", profile]
        table = subprocess.run(annotate, check=True, capture_output=True, text=True).stdout
    found = dict.fromkeys(ENTRIES, 0.0)
    for count, name in re.findall(r"^ *([\d,]+) .*?gradwire::Endpoint::(\w+)\(", table, re.M):
        if name in found:
            found[name] += int(count.replace(",", "")) / done.datagrams
    return found


def machine() -> str:
    """The processor, the system and the commit."""
    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    name = processor[1] if processor else platform.machine()
    return f"{os.cpu_count()} cores ({name}), Linux {platform.release()}, commit {commit}"


def main() -> int:
    """Measures and prints; see the module's text."""
    missing = [name for name in ("valgrind", "callgrind_annotate") if not shutil.which(name)]
    if missing:
        print(f"work: {' and '.join(missing)} not found; apt-get install valgrind", file=sys.stderr)
        return 1
    driver = built()
    timed = run(driver, str(RANKS[-1]), str(TIMED), "0")
    counts = [
        *(instructions(driver, ranks) for ranks in RANKS),
        instructions(driver, 4, LONG, BATCH),
    ]
    version = subprocess.run(["valgrind", "--version"], capture_output=True, text=True).stdout
    print(f"{machine()}, compiler {timed.compiler}, {version.strip()}\n")
    heads = [f"{ranks} ranks" for ranks in RANKS] + ["4, batches"]
    print("instructions a datagram" + "".join(f"{head:>12}" for head in heads))
    for name in ENTRIES:
        print(f"  {name:21}" + "".join(f"{count[name]:12,.0f}" for count in counts))
    totals = [sum(count.values()) for count in counts]
    print(f"  {'all':21}" + "".join(f"{total:12,.0f}" for total in totals))
    print(f"{RANKS[-1]} ranks over {RANKS[0]}: {totals[1] / totals[0]:.3f}")
    print(
        f"{RANKS[-1]} ranks, {TIMED * 4 / 1e6:.0f} MB: {timed.events / timed.seconds:,.0f} events "
        f"a second of processor time ({timed.events:,} events)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
