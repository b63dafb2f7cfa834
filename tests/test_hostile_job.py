"""Hostile datagrams on the wire of a job that trains change nothing that it learns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from host_ranks import HostRanks
from hostile_job import hosts, outcome

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("namespaces")]

MOST_GROWTH = 32 << 20
SHORT = {"rate": 20_000, "blocks": 3, "steps": 40, "width": 700}


@pytest.fixture(scope="module")
def ranks() -> Iterator[HostRanks]:
    with hosts() as ranks:
        yield ranks


def test_a_job_under_attack_learns_what_one_left_alone_does(ranks: HostRanks) -> None:
    attacked = outcome(ranks, auth="session", policy="reliable", **SHORT)
    alone = outcome(ranks, auth="session", policy="reliable", **SHORT | {"rate": 0})
    assert attacked["sent"] > 500
    assert attacked["steps"] == 130
    assert attacked["identical"]
    assert attacked["replica"] == alone["replica"]


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["whole", "key"])
@pytest.mark.parametrize("policy", ["dblp", "ltp", "mlt", "adaptive"])
def test_lossy_policies_keep_their_bounds_under_attack(
    ranks: HostRanks, policy: str, auth: str
) -> None:
    attacked = outcome(ranks, auth=auth, policy=policy, **SHORT)
    assert attacked["sent"] > 500
    assert attacked["steps"] == 130
    assert attacked["identical"]
    assert attacked["least"] >= 1 - 1e-9 or policy == "ltp"  # whose deadline may exceed its bound
    assert attacked["grown"] < MOST_GROWTH
