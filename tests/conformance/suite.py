"""PyTorch's own DistributedTest suite, from the installed wheel, over gradwire.

    python tests/conformance/suite.py backend --world-size 2    backend "gradwire"
    python tests/conformance/suite.py hook --world-size 2       Gloo, and CPU modules attached

The run fails where a test fails, or is skipped for what skips.json does not list beside its name.
The list gives a reason for each skip. `-k PATTERN` chooses tests; `--write` writes the skips of
this run to the list, whose reasons have to be filled in by hand.

Some tests want 4 or 8 ranks, so all that can run have run after `--world-size` 2, 4 and 8.

The suite reads its environment when it is imported, so that is set up first. Where it names Gloo,
it names "gradwire" as well here, because that delegates to Gloo whatever it does not do itself. For
the same reason the group's own `monitored_barrier` stands in the place of torch's function, which
refuses every group that is not named gloo.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SKIPS = HERE / "skips.json"
FACES = {"backend": "gradwire", "hook": "gloo"}  # each with the backend of its groups
NOT_RUN = "not run"
"""In skips.json, what stands in place of torch's reason for tests that torch would run."""
ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    # The suite's tensors are small, and all of them are to take the engine's way.
    "GRADWIRE_MIN_BYTES": "1",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("face", choices=FACES)
    parser.add_argument("--world-size", type=int, choices=(2, 3, 4, 8), default=2)
    parser.add_argument("-k", default="", metavar="PATTERN", help="only tests whose name matches")
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
    TMPDIR=scratch.name,  # of the files that torch's tests leave
)
tempfile.tempdir = scratch.name

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

import gradwire  # noqa: E402
import gradwire.process_group.create  # noqa: E402, once for all tests


def suite() -> types.ModuleType:
    """The suite's module, in which "gradwire" may do what Gloo may."""
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add("gradwire")
    path = Path(common_distributed.__file__).parent / "distributed" / "distributed_test.py"
    source = path.read_text()
    for theirs, ours in (
        ('BACKEND != "gloo"', 'BACKEND not in ("gloo", "gradwire")'),
        ('BACKEND == "gloo"', 'BACKEND in ("gloo", "gradwire")'),
        ('{"gloo"}', '{"gloo", "gradwire"}'),
    ):
        source = source.replace(theirs, ours)
    module = types.ModuleType("distributed_test")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


theirs = suite()
torch.set_num_threads(1)


def monitored_barrier(
    group: Any = None,
    timeout: datetime.timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """As torch's function, for every group that has such a method."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    if isinstance(timeout, float):
        timeout = datetime.timedelta(seconds=timeout)
    if group is None:
        group = dist.group.WORLD
    group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def attach_every_module() -> None:
    """Makes the gradients of every DDP module on the CPU travel over the hook."""
    plain = DistributedDataParallel.__init__

    def attached(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if all(parameter.device.type == "cpu" for parameter in self.parameters()):
            gradwire.attach(self, "reliable")

    DistributedDataParallel.__init__ = attached  # type: ignore[method-assign]


if given.face == "hook":
    attach_every_module()
else:
    dist.monitored_barrier = monitored_barrier


def entries(face: str) -> list[Any]:
    """The skips that are listed for a face."""
    listed = json.loads(SKIPS.read_text()) if SKIPS.exists() else []
    return [entry for entry in listed if entry["face"] == face]


class Conformance(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore
    def setUp(self) -> None:
        super().setUp()
        for entry in entries(given.face):
            if entry["torch"] == NOT_RUN and self._testMethodName in entry["tests"]:
                self.skipTest(entry["reason"])
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
        name = test.id().rsplit(".", 1)[-1]
        # The number of devices is often that of the ranks.
        reason = re.sub(r"at least \d+ CUDA devices?", "at least N CUDA devices", reason)
        self.reasons[name] = re.sub(r"'(gradwire|gloo)'", "BACKEND", reason)


def tests(word: str) -> unittest.TestSuite:
    names = unittest.TestLoader().getTestCaseNames(Conformance)
    return unittest.TestSuite(Conformance(name) for name in names if re.search(word, name))


def write(face: str, reasons: dict[str, str]) -> None:
    """Adds skips to the list, each under what torch gives as its reason."""
    known = {(e["face"], e["torch"]): e for each in FACES for e in entries(each)}
    unrun = known.get((face, NOT_RUN), {"tests": []})["tests"]
    for test, reason in sorted(reasons.items()):
        if test in unrun:
            continue
        entry = known.setdefault(
            (face, reason), {"face": face, "torch": reason, "reason": "", "tests": []}
        )
        entry["tests"] = sorted({*entry["tests"], test})
    SKIPS.write_text(json.dumps([known[key] for key in sorted(known)], indent=1) + "\n")


def unlisted(face: str, reasons: dict[str, str]) -> list[str]:
    """The skips that stand, for what torch gives as the reason, in no entry with one of ours."""
    listed = {(test, e["torch"]) for e in entries(face) if e["reason"] for test in e["tests"]}
    # torch does not learn of those that are not run.
    listed |= {
        (test, e["reason"]) for e in entries(face) if e["torch"] == NOT_RUN for test in e["tests"]
    }
    return [f"{test}: {why}" for test, why in reasons.items() if (test, why) not in listed]


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
