"""Builds the fuzz targets of engine/fuzz and runs each for a while, then those in Python.

    python tools/fuzz.py [--seconds N] [--seed N] [TARGET …]

With clang (CXX, or a clang++ on the path) the targets run under libFuzzer. Without, a driver runs
the corpora and seeded mutations of these. Either way AddressSanitizer and UBSan watch. The exit
status is 1 if a target failed, and the input that it failed on is named. A target in Python is
tests that make inputs by a seed; each round of them has the next one, and nobody sees what they
reach.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "engine" / "fuzz"
TARGETS = sorted(path.stem for path in SOURCES.glob("*.cc") if path.stem != "driver")
BIN = Path(sys.executable).parent
PYTHON = {
    "texts": ["test_store_texts.py", "test_introduction_texts.py", "-k", "any"],
    "states": ["test_states.py", "-k", "however_a_state_was_changed"],
    "scenarios": ["test_lab_scenario.py", "-k", "whatever_a_file_says"],
}
"""The tests that are each target in Python."""


def clang() -> str | None:
    """A clang++ that has libFuzzer and knows the ranges of libstdc++, if there is one."""
    candidates = [
        os.environ.get("CXX", ""),
        "clang++",
        *(f"clang++-{n}" for n in range(25, 13, -1)),
    ]
    for name in filter(shutil.which, filter(None, candidates)):
        flags = ["-std=c++20", "-fsanitize=fuzzer,address,undefined", "-x", "c++", "-", "-o"]
        source = (
            "#include <ranges>\n#include <vector>\n"
            "auto part(std::vector<int>& all) { return std::ranges::subrange(all); }\n"
            'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }'
        )
        command = [name, *flags, os.devnull]
        if not subprocess.run(command, input=source.encode(), capture_output=True).returncode:
            return name
    return None


def build(compiler: str | None, targets: list[str]) -> Path:
    out = ROOT / "build" / ("fuzz" if compiler else "fuzz-driver")
    options = ["-DGRADWIRE_BINDING=OFF", "-DGRADWIRE_FUZZ=ON", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
               "-DGRADWIRE_SANITIZE=address,undefined"]  # fmt: skip
    if compiler:
        options.append(f"-DCMAKE_CXX_COMPILER={compiler}")
    if not (out / "CMakeCache.txt").exists():
        ninja = shutil.which("ninja", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
        options += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    cmake = str(BIN / "cmake")
    quietly([cmake, "-S", ROOT, "-B", out, *options])
    names = [f"fuzz_{target}" for target in targets]
    jobs = os.environ.get("JOBS", str(os.cpu_count() or 2))
    quietly([cmake, "--build", out, "-j", jobs, "--target", *names])
    return out


def quietly(command: list[str | Path]) -> None:
    """Runs a command; what it says is shown where it fails, which ends this program."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{' '.join(map(str, command))} failed ({done.returncode})")


def run(out: Path, target: str, seconds: int, seed: int) -> bool:
    """True if nothing failed."""
    found = out / "corpus" / target
    found.mkdir(parents=True, exist_ok=True)
    corpora = [str(found), str(SOURCES / "corpus" / target)]
    command = [out / f"fuzz_{target}", f"-max_total_time={seconds}", f"-seed={seed}",
               "-max_len=1024", "-timeout=60", f"-artifact_prefix={out}/{target}-"]  # fmt: skip
    corpora = [corpus for corpus in corpora if Path(corpus).is_dir()]
    done = subprocess.run([*map(str, command), *corpora], capture_output=True, text=True, cwd=out)
    lines = (done.stdout + done.stderr).strip().splitlines()
    print(f"{target}: {lines[-1] if lines else ''}", flush=True)
    if done.returncode:
        print("\n".join(lines[-40:]))
        print(f"{target} failed; run it again with {out}/fuzz_{target} and the input named above"
              if (out / "CMakeCache.txt").exists() else "")  # fmt: skip
    return done.returncode == 0


def run_python(target: str, seconds: int, seed: int) -> bool:
    """True if nothing failed."""
    end, rounds = time.monotonic() + seconds, 0
    while rounds == 0 or time.monotonic() < end:
        now = str(seed + rounds)
        command = [sys.executable, "-m", "pytest", "-q", "-x", f"--hypothesis-seed={now}"]
        done = subprocess.run(
            [*command, *PYTHON[target]],
            capture_output=True,
            text=True,
            cwd=ROOT / "tests",
            env={**os.environ, "GRADWIRE_TEST_SEED": now},
        )
        if done.returncode:
            print("\n".join((done.stdout + done.stderr).strip().splitlines()[-60:]))
            print(f"{target} failed; run it again with --seed {now} {target}")
            return False
        rounds += 1
    print(f"{target}: {rounds} rounds, seeds {seed} to {seed + rounds - 1}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    every = [*TARGETS, *PYTHON]
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(every))
    parser.add_argument("--seconds", type=int, default=30, help="of each target (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: 1)")
    options = parser.parse_args()
    chosen = options.targets or every
    if unknown := sorted(set(chosen) - set(every)):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(every)}")
    passed = []
    if targets := [target for target in chosen if target in TARGETS]:
        compiler = clang()
        print(f"with {compiler} under libFuzzer" if compiler else
              "no clang++ with libFuzzer: corpora and seeded mutations, without coverage feedback",
              flush=True)  # fmt: skip
        out = build(compiler, targets)
        passed += [run(out, target, options.seconds, options.seed) for target in targets]
    rest = [target for target in chosen if target in PYTHON]
    passed += [run_python(target, options.seconds, options.seed) for target in rest]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
