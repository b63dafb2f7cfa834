"""Makes tests/ranks.py importable, for the tests and for the processes they start; skips what this
machine cannot run."""

import sys
from pathlib import Path

import pytest

from gradwire.lab import LabUnavailable, Network, Wire, probe

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where no network of namespaces can be made."""
    reason = probe()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def wires(namespaces: None) -> None:
    """Skips where the lab's wires (TAP pairs) cannot be made."""
    try:
        Network(1, wires={0: Wire()}).close()
    except LabUnavailable as error:
        pytest.skip(str(error))
