"""PyTorch's own DistributedTest suite, from the installed wheel, over gradwire.

    python tests/conformance/suite.py backend --world-size 2    backend "gradwire"
    python tests/conformance/suite.py hook --world-size 2       Gloo, with every CPU DDP module attached

The run fails where a test fails, or is skipped without standing in skips.json, which gives a reason
for each skip. `-k WORD` chooses tests; `--write` writes the skips of this run to the list, whose
reasons have to be filled in by hand.

The suite reads its environment when it is imported, so that is set up first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SKIPS = HERE / "skips.json"
FACES = {"backend": "gradwire", "hook": "gloo"}
ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    # The suite's tensors are small, and all of them are to take the engine's way.
    "GRADWIRE_MIN_BYTES": "1",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("face", choices=FACES)
    parser.add_argument("--world-size", type=int, choices=(2, 3, 4), default=2)
    parser.add_argument("-k", default="", metavar="WORD", help="only tests whose name holds WORD")
    parser.add_argument("--write", action="store_true", help="write this run's skips to skips.json")
    return parser.parse_args()


given = arguments()
scratch = tempfile.TemporaryDirectory(prefix="gradwire-conformance-")
for name in ("barrier", "test_dir", "init_dir"):
    (Path(scratch.name) / name).mkdir()
os.environ.update(
    ENVIRONMENT,
    BACKEND=FACES[given.face],
    WORLD_SIZE=str(given.world_size),
    TEMP_DIR=scratch.name,
)

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed

import gradwire
import gradwire.process_group

for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
    common_distributed.DistTestCases.backend_feature[feature].add(gradwire.process_group.BACKEND)

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

torch.set_num_threads(1)


class AttachedDDP(DistributedDataParallel):
    """DDP whose gradients travel over the hook where the module is on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if all(parameter.device.type == "cpu" for parameter in self.parameters()):
            gradwire.attach(self, "reliable")


if given.face == "hook":
    torch.nn.parallel.DistributedDataParallel = AttachedDDP  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = AttachedDDP  # type: ignore[misc]


class Conformance(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Result(unittest.TextTestResult):
    """Counts, and the reason of each skip by test."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passed = 0
        self.reasons: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.passed += 1

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.reasons[test.id().rsplit(".", 1)[-1]] = re.sub(r"'(gradwire|gloo)'", "BACKEND", reason)


def tests(word: str) -> unittest.TestSuite:
    names = unittest.TestLoader().getTestCaseNames(Conformance)
    return unittest.TestSuite(Conformance(name) for name in names if word in name)


def write(face: str, reasons: dict[str, str]) -> None:
    """Adds skips to the list, each under what torch gives as its reason."""
    known = json.loads(SKIPS.read_text()) if SKIPS.exists() else []
    entries = {(entry["face"], entry["torch"]): entry for entry in known}
    for test, reason in sorted(reasons.items()):
        entry = entries.setdefault(
            (face, reason), {"face": face, "torch": reason, "reason": "", "tests": []}
        )
        entry["tests"] = sorted({*entry["tests"], test})
    SKIPS.write_text(json.dumps([entries[key] for key in sorted(entries)], indent=1) + "\n")


def unlisted(face: str, reasons: dict[str, str]) -> list[str]:
    """The skips that stand in no entry with a reason."""
    listed = {
        test
        for entry in json.loads(SKIPS.read_text())
        if entry["face"] == face and entry["reason"]
        for test in entry["tests"]
    }
    return [f"{test}: {reason}" for test, reason in reasons.items() if test not in listed]


def main() -> int:
    begun = time.monotonic()
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)
    result: Any = runner.run(tests(given.k))
    if given.write:
        write(given.face, result.reasons)
    new = unlisted(given.face, result.reasons)
    for line in new:
        print(f"skipped, but not in {SKIPS.name}: {line}")
    print(
        f"{given.face}, world size {given.world_size}, torch {torch.__version__}: "
        f"{result.passed} passed, {len(result.failures) + len(result.errors)} failed, "
        f"{len(result.reasons)} skipped, {time.monotonic() - begun:.0f} s"
    )
    return 0 if result.wasSuccessful() and not new else 1


if __name__ == "__main__":
    sys.exit(main())
