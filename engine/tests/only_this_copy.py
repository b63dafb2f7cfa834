"""Holds a Python process to one copy of gradwire, and shows which engine it loaded.

broken_on_purpose.py puts this on PYTHONPATH under the name sitecustomize, so that it runs in each
process of a test run before anything else, and gives it to pytest as a plugin. An editable
install's finder stands before PYTHONPATH and would quietly bring the intact engine: it is dropped.

BROKEN_COPY: the package's folder. BROKEN_COPY_ENGINE: SHA-256 of its engine.
BROKEN_COPY_PROOF: a file to write once the tests' own process is known to have loaded these.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

COPY = Path(os.environ.get("BROKEN_COPY", "/nowhere")).resolve()
WRONG = 97  # the exit status of a process that got another gradwire


def refuse(what: str) -> None:
    os.write(2, f"not the copy in {COPY}: {what}\n".encode())
    os._exit(WRONG)


def drop_other_finders() -> None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is not PathFinder and find is not None and find("gradwire", None) is not None:
            sys.meta_path.remove(finder)
    found = importlib.util.find_spec("gradwire")
    if found is None or found.origin is None or Path(found.origin).resolve().parent != COPY:
        refuse(f"gradwire is found at {found and found.origin}")


def check_what_is_loaded() -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] != "gradwire" or file is None:
            continue
        if not Path(file).absolute().is_relative_to(COPY):
            refuse(f"{name} was loaded from {file}")


def pytest_configure() -> None:
    from gradwire import _engine

    check_what_is_loaded()
    digest = hashlib.sha256(Path(_engine.__file__).read_bytes()).hexdigest()
    if digest != os.environ["BROKEN_COPY_ENGINE"]:
        refuse(f"{_engine.__file__} is another engine ({digest})")
    Path(os.environ["BROKEN_COPY_PROOF"]).write_text(_engine.__file__, encoding="utf-8")


def pytest_sessionfinish() -> None:
    check_what_is_loaded()


if __name__ == "sitecustomize":
    drop_other_finders()
