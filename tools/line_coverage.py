"""Counts which lines of the engine its tests reach.

    python tools/line_coverage.py [PYTEST ARGUMENT …]

A build in build/coverage counts lines as GCC does (gcov). It runs the quick tests of the engine
and those of OptiReduce; arguments replace these. Then the share of lines that ran is printed for
each folder of the engine, and out/coverage/index.html names the lines that did not. The exit status
is 1 if a test failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from sanitize import IO_APART, ROOT, build

TESTS = [
    "engine/tests",
    "tests/test_policy_optireduce.py",  # the Hadamard transform is reached from there alone
    *IO_APART,
    *("-m", "not slow and not netns", "-n", "2"),
]
SETTINGS = [
    "-DCMAKE_BUILD_TYPE=Debug",
    "-DCMAKE_CXX_FLAGS=--coverage -O1 -fprofile-update=prefer-atomic -DGRADWIRE_ONE_VERSION",
    "-DGRADWIRE_TESTS=ON",
]
# The tests' own folder, which stands first in the path, has a build that does not count.
PARTS_FIRST = """
import importlib.util
import pathlib
class Parts:
    def find_spec(name, path=None, target=None):
        if name == "_parts":
            here = next(pathlib.Path(__file__).parent.glob("_parts*.so"))
            return importlib.util.spec_from_file_location(name, here)
sys.meta_path.insert(0, Parts)
"""


def counting_build() -> Path:
    """A folder with the package gradwire and the parts, which count lines."""
    out = ROOT / "build" / "coverage"
    site = build("coverage", SETTINGS, ["_engine", "_parts"])
    for counts in out.rglob("*.gcda"):
        counts.unlink()
    for module in out.glob("_parts*.so"):
        (site / module.name).write_bytes(module.read_bytes())
    with (site / "sitecustomize.py").open("a") as file:
        file.write(PARTS_FIRST)
    return site


def report() -> None:
    pages = ROOT / "out" / "coverage"
    pages.mkdir(parents=True, exist_ok=True)
    summary = pages / "summary.json"
    subprocess.run(
        [sys.executable, "-m", "gcovr", "-r", ROOT, "-f", "engine/", "-e", "engine/tests/",
         "--gcov-ignore-parse-errors=all", "--html-details", pages / "index.html",
         "--json-summary", summary, ROOT / "build" / "coverage"],
        check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    lines: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for file in json.loads(summary.read_text())["files"]:
        folder = Path(file["filename"]).parts[1]
        lines[folder] += file["line_total"]
        ran[folder] += file["line_covered"]
    for folder in sorted(lines):
        share = ran[folder] / lines[folder]
        print(f"engine/{folder}: {share:.1%} of {lines[folder]:,} lines")
    print(f"gradwire: the lines that did not run are in {pages / 'index.html'}")


def main() -> int:
    environment = os.environ | {"PYTHONPATH": str(counting_build())}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = sys.argv[1:] or TESTS
    status = subprocess.run([*command, *tests], cwd=ROOT, env=environment).returncode
    report()
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
