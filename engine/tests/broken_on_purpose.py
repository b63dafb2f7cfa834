"""Breaks each invariant of docs/design.md on purpose and shows which tests notice.

    .venv/bin/python engine/tests/broken_on_purpose.py [invariant …]

For each: a copy of the engine with one change, built, and the tests of engine/tests run on it. They
must fail. Takes about half a minute each; not part of `make test`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = "engine/proto/"


@dataclass(frozen=True)
class Break:
    invariant: str
    what: str
    path: str
    before: str
    after: str
    tests: str


BREAKS = (
    Break(
        "1 the bound holds",
        "regions close with twice the loss that is allowed",
        PROTO + "aggregator.cc",
        "return part.elements - part.losable;",
        "return part.elements - std::min(part.elements, 2 * part.losable);",
        "test_sim_bounded.py test_sim_property.py",
    ),
    Break(
        "1 the bound holds",
        "critical chunks may be missing at a close",
        PROTO + "aggregator.cc",
        "if (ledger.closed || !w.opened || ledger.critical_left) return;",
        "if (ledger.closed || !w.opened) return;",
        "test_sim_bounded.py test_sim_property.py",
    ),
    Break(
        "2 replicas stay bit-identical",
        "a worker keeps what a committed pull withheld from others",
        PROTO + "endpoint_ops.cc",
        "if (here && !r.applied[c])",
        "if (here && !r.applied[c] && config.endpoint != 1)",
        "test_sim_bounded.py test_sim_property.py",
    ),
    Break(
        "4 a chunk stands alone",
        "chunks are longer than what a datagram carries",
        PROTO + "grid.cc",
        "codec::kF32Bytes);",
        "codec::kF32Bytes) + 1;",
        "test_plan.py test_sim_exact.py",
    ),
    Break(
        "5 counted once, and final",
        "duplicates and late chunks are added again",
        PROTO + "aggregator.cc",
        "if (w.decided.test(local)) return Added::ignored;",
        "",
        "test_sim_property.py",
    ),
    Break(
        "6 every wait is bounded",
        "a silent engine is waited for",
        PROTO + "endpoint.cc",
        "now - p->last_heard > config.peer_timeout",
        "now - p->last_heard > 1000 * config.peer_timeout",
        "test_sim_faults.py",
    ),
    Break(
        "6 every wait is bounded",
        "a goodbye in mid-step is taken for one at the end",
        PROTO + "endpoint_transmit.cc",
        "std::min(next_op, abandoned)",
        "next_op",
        "test_sim_faults.py",
    ),
    Break(
        "7 the core is a pure function of its input",
        "the delay of acknowledgements depends on the processor's clock",
        PROTO + "endpoint_receive.cc",
        "path.ack_due = now + kAckDelay;",
        "path.ack_due = now + kAckDelay + static_cast<Nanos>(__builtin_ia32_rdtsc() & 0xffff);",
        "test_sim_property.py",
    ),
    Break(
        "8 the books balance",
        "withheld results are thrown away",
        PROTO + "endpoint_ops.cc",
        "r.withheld_chunks.push_back(c);",
        "continue;",
        "test_sim_bounded.py test_sim_property.py",
    ),
    Break(
        "9 nothing from the wire is trusted",
        "a result may be shorter than its chunk",
        PROTO + "endpoint_receive.cc",
        "payload.size() != codec::f32_bytes(op.grid.length(header.chunk)))",
        "false)",
        "test_sim_faults.py",
    ),
    Break(
        "9 nothing from the wire is trusted",
        "a datagram may come in any endpoint's name",
        PROTO + "endpoint_receive.cc",
        "head->session != config.session || head->source != source ||",
        "",
        "test_sim_faults.py",
    ),
    Break(
        "10 one plan",
        "the plan's hash is not compared",
        PROTO + "endpoint_ops.cc",
        "if (fixed.hash != here || fixed.step != op.spec.step) {",
        "if (fixed.step != op.spec.step) {",
        "test_sim_faults.py",
    ),
    Break(
        "10 one plan",
        "each worker shuffles in an order of its own",
        PROTO + "push_sender.cc",
        "std::vector<uint32_t> order = send_order(plan, shard);",
        "Plan own = plan; own.seed ^= reinterpret_cast<uintptr_t>(&plan);"
        " std::vector<uint32_t> order = send_order(own, shard);",
        "test_sim_bounded.py",
    ),
    Break(
        "11 self-inflicted loss is a bug",
        "everybody gets all the credit that is asked for",
        PROTO + "credit.cc",
        "p->granted = std::max(p->granted, p->received.largest() + p->share);",
        "p->granted = std::max<uint64_t>(p->granted, p->received.largest() + 4000);",
        "test_sim_network.py",
    ),
)


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def build(tree: Path, out: Path) -> str:
    """ "" or the compiler's complaint."""
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if not (out / "build.ninja").exists():
        out.mkdir()
        made = run(
            ["cmake", "-G", "Ninja", "-S", str(tree), "-B", str(out), "-DGRADWIRE_WERROR=OFF",
             f"-DPython_EXECUTABLE={sys.executable}"],
            env=tools,
        )  # fmt: skip
        if made.returncode:
            return made.stderr
    made = run(["ninja", "-C", str(out)], env=tools)
    return made.stdout if made.returncode else ""


def failed_tests(package: Path, tests: str) -> tuple[int, str]:
    """How many failed, and the first."""
    files = [str(ROOT / "engine" / "tests" / name) for name in tests.split()]
    done = run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider",
         "-o", "addopts=", "-o", "timeout=120", *files],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(package)},
    )  # fmt: skip
    failures = re.findall(r"^FAILED \S*::(\S+)", done.stdout, re.MULTILINE)
    if not failures and done.returncode < 0:
        return 1, f"(the process died of signal {-done.returncode})"
    return len(failures), failures[0] if failures else ""


def main(wanted: list[str]) -> int:
    survived = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree, out, package = (Path(scratch) / name for name in ("tree", "build", "package"))
        shutil.copytree(ROOT / "engine", tree / "engine")
        (tree / "src").mkdir()
        shutil.copytree(ROOT / "src" / "gradwire", tree / "src" / "gradwire")
        for name in ("CMakeLists.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, tree)
        complaint = build(tree, out)
        if complaint:
            sys.exit(complaint)
        shutil.copytree(ROOT / "src" / "gradwire", package / "gradwire")
        library = next(out.glob("_engine*.so"))
        (package / "gradwire" / library.name).symlink_to(library)
        for case in BREAKS:
            if wanted and case.invariant.split()[0] not in wanted:
                continue
            target = tree / case.path
            intact = target.read_text(encoding="utf-8")
            print(f"{case.invariant}: {case.what} …", flush=True)
            if intact.count(case.before) != 1:
                print(f"    {case.path} no longer has this place exactly once: {case.before}")
                survived += 1
                continue
            target.write_text(intact.replace(case.before, case.after), encoding="utf-8")
            complaint = build(tree, out)
            target.write_text(intact, encoding="utf-8")
            if complaint:
                print("    does not compile:\n" + complaint[-2000:])
                survived += 1
                continue
            count, first = failed_tests(package, case.tests)
            print(f"    {count} tests fail, {first} first" if count else "    NOBODY NOTICES")
            survived += count == 0
    return survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
