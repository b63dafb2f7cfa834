"""The lab starts small helper processes of its own."""

from __future__ import annotations

import sys
from pathlib import Path

_BOOT = """
import runpy, sys, types
for name, folder in {packages!r}:
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package
sys.argv[0] = {module!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=False)
"""


def helper_command(module: str, *arguments: object, bare: bool = False) -> list[str]:
    """Return the command line that runs a module of the lab without importing gradwire as a whole.

    A helper must start fast, stay small and have one thread: torch and numpy, which the package
    may import, take a second, 200 MB, and start threads, with which a process may not enter a
    user namespace.

    Args:
        module: name of the module inside ``gradwire_lab``, with its room: ``network.keeper``.
    """
    lab = Path(__file__).resolve().parents[1]
    room = module.split(".")[0]
    packages = [("gradwire_lab", str(lab)), (f"gradwire_lab.{room}", str(lab / room))]
    boot = _BOOT.format(packages=packages, module=f"gradwire_lab.{module}")
    flags = ["-I", "-S"] if bare else []
    return [sys.executable, *flags, "-c", boot, *map(str, arguments)]
