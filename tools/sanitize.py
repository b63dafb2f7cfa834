"""Runs tests of the engine with a sanitized build of it.

    python tools/sanitize.py [--only address|thread] [PYTEST ARGUMENT …]

Two builds stand in build/asan (AddressSanitizer and UBSan) and build/tsan (ThreadSanitizer). The
first runs what drives io and binding from Python, and jobs in virtual time; the second the tests
of io, where threads meet. Arguments replace these tests. The exit status is 1 if one of them
failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
IO = ["engine/tests/test_io_engine.py", "engine/tests/test_io_cores.py"]
# An address space with a limit has no room for a sanitizer, and a library that a test preloads
# takes its place.
APART = (
    "test_an_engine_that_runs_out_of_memory_tells_its_peers",
    "test_a_wall_clock_that_is_stepped_back_makes_no_queue",
    "test_an_engine_starts_although_its_socket_never_is_empty",
    "test_acks_do_not_wait_for_a_train_that_waits_for_the_socket",
)
IO_APART = [f"--deselect={IO[0]}::{name}" for name in APART]
TESTS = {
    "address": [
        *IO,
        *IO_APART,
        "engine/tests/test_sim_faults.py",
        "engine/tests/test_sim_property.py",
    ],
    "thread": [*IO, *IO_APART],
}
BUILDS = {
    "address": ("asan", "address,undefined", ["libasan.so", "libubsan.so"]),
    "thread": ("tsan", "thread", ["libtsan.so"]),
}
# Python and its libraries are not instrumented, and never free what lasts as long as they.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:alloc_dealloc_mismatch=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:ignore_noninstrumented_modules=1",
}


def build(folder: str, settings: list[str], targets: list[str]) -> Path:
    """A folder with the package gradwire, whose engine is built by these settings of CMake."""
    out = ROOT / "build" / folder
    ninja = shutil.which("ninja", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    if (out / "CMakeCache.txt").exists():
        generator = []
    cmake = str(BIN / "cmake")
    # What GCC adds for a sanitizer makes it warn of headers that are not ours.
    subprocess.run(
        [cmake, "-S", ROOT, "-B", out, *generator, f"-DPython_EXECUTABLE={sys.executable}",
         "-DCMAKE_CXX_COMPILER=g++", "-DGRADWIRE_WERROR=OFF", *settings],
        check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    jobs = os.environ.get("JOBS", str(os.cpu_count() or 2))
    subprocess.run([cmake, "--build", out, "-j", jobs, "--target", *targets], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    site = out / "site"
    shutil.rmtree(site, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "src" / "gradwire", site / "gradwire", ignore=ignored)
    for module in out.glob("_engine*.so"):
        shutil.copy(module, site / "gradwire")
    # An editable install's finder would bring the plain engine; it stands aside in each process.
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__\n"
        "                    and 'ScikitBuild' not in type(f).__name__]\n"
    )
    return site


def library(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
    return str(Path(found.stdout.strip()).resolve())


def run(kind: str, tests: list[str]) -> bool:
    """True if nothing failed."""
    folder, flags, libraries = BUILDS[kind]
    site = build(folder, [f"-DGRADWIRE_SANITIZE={flags}"], ["_engine"])
    preload = " ".join(library(name) for name in libraries)
    # The C++ library belongs before the sanitizer's hooks for exceptions.
    environment = os.environ | OPTIONS | {
        "LD_PRELOAD": f"{preload} {library('libstdc++.so.6')}",
        "PYTHONPATH": str(site),
        "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    print(f"gradwire: {kind} sanitizer", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", choices=list(BUILDS), help="one of the two")
    options, tests = parser.parse_known_args()
    kinds = [options.only] if options.only else list(BUILDS)
    passed = [run(kind, tests or TESTS[kind]) for kind in kinds]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
