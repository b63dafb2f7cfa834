"""Makes the helpers of this folder importable, for tests and the processes they start; skips what
this machine cannot run."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where no network of namespaces can be made."""
    network = pytest.importorskip("gradwire_lab.network")  # the lab is another distribution
    reason = network.probe()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def wires(namespaces: None) -> None:
    """Skips where the lab's wires (TAP pairs) cannot be made."""
    from gradwire_lab.network import LabUnavailable, Network, Wire

    try:
        Network(1, wires={0: Wire()}).close()
    except LabUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks in processes of their own, for all tests of a file."""
    with Ranks(2, GRADWIRE_PEER_TIMEOUT="60", GRADWIRE_RENDEZVOUS_TIMEOUT="60") as ranks:
        yield ranks
