"""Builds the wheels and tests them with the oldest and the newest Python and torch.

    make matrix                               the ends of both ranges
    make matrix ARGS="3.12:2.9 3.13:2.13"     these pairs of Python and torch

The wheels are built from the source archive by Pythons that have no torch, and tested in fresh
virtual environments outside the checkout. A Python that is not installed is fetched by uv, where uv
can. What was tested and what could not be stands at the end. Only the folder .matrix remains, which
holds downloads and the logs of what failed; it may be removed at any time.

TORCH_INDEX=URL   a further package index to take torch from (a CPU build is much smaller)
JOBS=N            test processes at a time (default: 2)
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".matrix"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.7", "2.15")
OWN_WHEEL = ("3.10", "3.11")
"""The Pythons before the stable ABI, which begins with 3.12."""
TESTS = (
    "test_ddp*.py",
    "test_detach.py",
    "test_feedback.py",
    "test_guard.py",
    "test_process_group.py",
    "test_resume.py",
    "test_states.py",
    "test_versions.py",
)
"""What goes through torch, and what the wheel promises."""
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
PINNED = (*TOOLS, "nanobind", "scikit-build-core")


class Failure(Exception):
    """A step that failed, with the line of its output that says why."""


def key(version: str) -> tuple[int, ...]:
    """3.9 is before 3.10."""
    return tuple(int(part) for part in version.split("."))


def answer(python: Path, code: str) -> str:
    """The last line that some code prints; "" where it fails."""
    run = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return run.stdout.strip().split("\n")[-1] if run.returncode == 0 else ""


def serves(python: Path, version: str) -> bool:
    """Whether it is a Python of that version which makes virtual environments and has headers."""
    code = (
        "import ensurepip, os, sys, sysconfig, venv\n"
        "assert os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'))\n"
        "print('%d.%d' % sys.version_info[:2])"
    )
    return answer(python, code) == version


@dataclass
class Matrix:
    """One run, in a folder of its own; and what it found."""

    work: Path
    tested: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        pinned = [line for line in lines if line.split("==")[0] in PINNED]
        constraints = self.work / "constraints.txt"
        constraints.write_text("\n".join(pinned) + "\n")
        # Each environment has its own packages only, and all downloads are in one place.
        alien = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.environment = {name: v for name, v in os.environ.items() if name not in alien} | {
            "PIP_BUILD_CONSTRAINT": str(constraints),
            "PIP_CACHE_DIR": str(CACHE / "pip"),
            "PIP_CONSTRAINT": str(constraints),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PYTHONNOUSERSITE": "1",
            "TMPDIR": str(self.work),
            "UV_CACHE_DIR": str(CACHE / "uv"),
            "UV_PYTHON_INSTALL_DIR": str(CACHE / "pythons"),
        }

    def step(self, text: str, *command: str | Path, cwd: Path | None = None) -> str:
        """Runs a command behind one line of text; returns the last line of its output."""
        print(f"gradwire: {text} … ", end="", flush=True)
        log = self.work / (re.sub(r"[^\w.]+", "-", text) + ".log")
        begun = time.monotonic()
        with log.open("w") as output:
            code = subprocess.run(
                command,
                cwd=cwd or self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
        print(f"{'FAILED' if code else 'done'} ({time.monotonic() - begun:.0f} s)")
        lines = log.read_text(errors="replace").split("\n")
        lines = [line.strip("= ") for line in lines if line.strip()] or ["it printed nothing"]
        if code == 0:
            return lines[-1]
        (CACHE / "logs").mkdir(exist_ok=True)
        shutil.copy(log, CACHE / "logs")
        errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
        raise Failure(f"{(errors or lines)[-1]} (.matrix/logs/{log.name})")

    def venv(self, python: Path, name: str) -> Path:
        """Makes a virtual environment and returns its Python."""
        place = self.work / name
        subprocess.run([python, "-m", "venv", place], check=True, env=self.environment)
        return place / "bin" / "python"

    # ------------------------------------------------------------------ Pythons

    def find(self, version: str) -> Path | None:
        """A Python on the path, of pyenv, or else of uv."""
        on_path = shutil.which(f"python{version}")
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        there = [Path(on_path)] if on_path else []
        for python in there + sorted(pyenv.glob(f"{version}.*/bin/python")):
            if serves(python, version):
                return python
        try:
            uv = self.work / "uv" / "bin" / "uv"
            if not uv.exists():
                python = self.venv(Path(sys.executable), "uv")
                self.step("installing uv", python, "-m", "pip", "install", "uv")
            self.step(f"fetching Python {version} by uv", uv, "python", "install", version)
            found = self.step(f"finding Python {version}", uv, "python", "find", version)
            if serves(Path(found), version):
                return Path(found)
            self.untested.append(f"Python {version}: {found} has no headers or no venv")
        except Failure as failure:
            self.untested.append(f"Python {version}: not installed, and not from uv: {failure}")
        return None

    # ------------------------------------------------------------------ wheels

    def build(self, pythons: dict[str, Path]) -> dict[str, Path]:
        """Builds the source archive and from it the wheels; returns these by their first Python."""
        builder = self.venv(next(iter(pythons.values())), "builder")
        self.step("installing build", builder, "-m", "pip", "install", "build")
        sdist = self.work / "sdist"
        self.step("building the source archive", builder, "-m", "build", "-s", "-o", sdist, ROOT)
        (archive,) = sdist.glob("*.tar.gz")
        stable = [version for version in pythons if version not in OWN_WHEEL][:1]
        wheels = {}
        for version in [v for v in OWN_WHEEL if v in pythons] + stable:
            place = self.work / f"wheel-{version}"
            python = self.venv(pythons[version], f"builder-{version}")
            text = f"building the wheel of {'the stable ABI' if version in stable else version}"
            self.step(text, python, "-m", "pip", "wheel", "--no-deps", "-w", place, archive)
            (wheels[version],) = place.glob("*.whl")
        return wheels

    # ------------------------------------------------------------------ tests

    def test(self, wheel: Path, version: str, python: Path, torch: str) -> None:
        """Tests a wheel with one Python and one torch."""
        name = f"Python {version}, torch {torch}"
        place = self.work / f"{version}-{torch}"
        try:
            own = self.venv(python, f"{place.name}/venv")
            index = os.environ.get("TORCH_INDEX")
            wanted = [*(["--extra-index-url", index] if index else []), f"torch=={torch}.*"]
            install = [own, "-m", "pip", "install", *wanted, wheel, *TOOLS]
            self.step(f"installing for {name}", *install)
            for copied in ("conftest.py", "pyproject.toml"):
                shutil.copy(ROOT / copied, place)
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "tests", place / "tests", ignore=unwanted)
            files = sorted(f for pattern in TESTS for f in (place / "tests").glob(pattern))
            count = os.environ.get("JOBS", "2")
            pytest = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings"]
            choice = ["-n", count, "--dist", "loadfile", "-m", "not slow and not netns"]
            outcome = self.step(f"testing {name}", *pytest, *choice, *files, cwd=place)
            code = "import platform, torch; print(platform.python_version(), torch.__version__)"
            exact = "Python {}, torch {}".format(*answer(own, code).split())
            self.tested.append(f"{exact}, {'-'.join(wheel.stem.split('-')[2:4])}: {outcome}")
        except Failure as failure:
            missing = f"No matching distribution found for torch=={torch}" in str(failure)
            (self.untested if missing else self.failed).append(f"{name}: {failure}")
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def run(self, asked: list[list[str]]) -> None:
        """Builds and tests what was asked for, with the Pythons that there are."""
        wanted = sorted({python for python, _ in asked}, key=key) or PYTHONS
        pythons = {version: found for version in wanted if (found := self.find(version))}
        if not pythons:
            return
        wheels = self.build(pythons)
        ends = dict.fromkeys((min(pythons, key=key), max(pythons, key=key)))
        for version, torch in asked or [[end, torch] for torch in TORCHES for end in ends]:
            if version in pythons:
                first = version if version in OWN_WHEEL else max(wheels, key=key)
                self.test(wheels[first], version, pythons[version], torch)


def main() -> int:
    """Runs the matrix and prints what it found."""
    if any(not re.fullmatch(r"3\.\d+:2\.\d+", pair) for pair in sys.argv[1:]):
        print(__doc__.strip())
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has made goes with it
    CACHE.mkdir(exist_ok=True)
    shutil.rmtree(CACHE / "logs", ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gradwire-matrix-") as work:
        matrix = Matrix(Path(work))
        try:
            matrix.run([pair.split(":") for pair in sys.argv[1:]])
        except Failure as failure:
            matrix.failed.append(str(failure))
        except KeyboardInterrupt:
            matrix.failed.append("interrupted")
    for title in ("tested", "untested", "failed"):
        if lines := getattr(matrix, title):
            print(f"\n{title}:", *lines, sep="\n  ")
    return 1 if matrix.failed or not matrix.tested else 0


if __name__ == "__main__":
    sys.exit(main())
