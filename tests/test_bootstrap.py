"""tools/bootstrap --check: what is missing on the system is named in one line to type."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
TOOLS = ["bash", "cat", "cut", "dirname", "env", "head", "id", "nproc", "uname", "sh"]

# What a Debian without the venv and dev packages looks like to the check.
BARE_DEBIAN = """
import importlib.util, os, sys, sysconfig
sysconfig.get_path("include")  # from here on it knows where the headers really are
sys.base_prefix = "/usr"
_find, _exists = importlib.util.find_spec, os.path.exists
importlib.util.find_spec = lambda name: None if name in {hidden!r} else _find(name)
os.path.exists = lambda path: not str(path).endswith({hidden!r}) and _exists(path)
"""


def check(
    tmp_path: Path,
    *,
    have: tuple[str, ...] = ("g++", "make"),
    hidden: tuple[str, ...] = ("-",),
    python: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the check with a PATH of only what is in `have` and a Python without `hidden`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name} here"))
    for name in have:  # g++ says yes to everything, the others are not run
        (tools / name).write_text("#!/bin/sh\ncat >/dev/null\n")
        (tools / name).chmod(0o755)
    base = getattr(sys, "_base_executable", sys.executable)
    (tools / f"python{MINOR}").write_text(f'#!/bin/sh\nexec "{base}" "$@"\n')
    (tools / f"python{MINOR}").chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(BARE_DEBIAN.format(hidden=hidden))
    return subprocess.run(
        ["bash", str(ROOT / "tools" / "bootstrap"), "--check"],
        env={
            "PATH": str(tools),
            "PYTHON": python or f"python{MINOR}",
            "PYTHONPATH": str(tmp_path),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def apt_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result
    lines = [line for line in result.stderr.splitlines() if "apt-get" in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].strip().startswith("sudo ") == (os.geteuid() != 0)
    return lines[0].split("install -y ")[1]


def test_a_complete_system_passes(tmp_path: Path) -> None:
    result = check(tmp_path)
    assert result.returncode == 0, result.stderr


def test_one_line_names_all_that_is_missing(tmp_path: Path) -> None:
    result = check(tmp_path, have=(), hidden=("ensurepip", "Python.h"))
    assert apt_line(result) == f"python{MINOR}-venv python{MINOR}-dev g++ make"


@pytest.mark.parametrize(
    ("have", "hidden", "package"),
    [
        (("make",), "-", "g++"),
        (("g++",), "-", "make"),
        (("g++", "make"), "Python.h", f"python{MINOR}-dev"),
        (("g++", "make"), "ensurepip", f"python{MINOR}-venv"),
    ],
)
def test_each_missing_thing_is_named(
    tmp_path: Path, have: tuple[str, ...], hidden: str, package: str
) -> None:
    assert apt_line(check(tmp_path, have=have, hidden=(hidden,))) == package


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    other = "python3.10" if MINOR != "3.10" else "python3.13"
    result = check(tmp_path, python=other)
    assert apt_line(result) == f"{other} {other}-venv {other}-dev"
    (tmp_path / "second").mkdir()
    result = check(tmp_path / "second", python="/nowhere/python3")
    assert result.returncode == 1
    assert "PYTHON=/nowhere/python3 does not run" in result.stderr


def test_an_old_python_is_named(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    base = getattr(sys, "_base_executable", sys.executable)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sitecustomize.py").write_text(
        "import sys\nsys.version_info = (3, 9, 2, 'final', 0)\n"
    )
    old.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/old" exec "{base}" "$@"\n')
    old.chmod(0o755)
    result = check(tmp_path, python=str(old))
    assert result.returncode == 1
    assert "Python 3.9, gradwire needs 3.10 or later" in result.stderr
