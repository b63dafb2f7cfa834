"""Hostile datagrams on the wire of a job that trains change nothing that it learns, and altered
payloads only where nothing authenticates them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from host_ranks import HostRanks
from hostile_job import faults, hosts, hosts_apart, outcome, tampered

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("namespaces")]

SHORT = {"rate": 20_000, "blocks": 3, "steps": 40, "width": 700}


@pytest.fixture(scope="module")
def ranks() -> Iterator[HostRanks]:
    with hosts() as ranks:
        yield ranks


def test_a_job_under_attack_learns_what_one_left_alone_does(ranks: HostRanks) -> None:
    attacked = outcome(ranks, auth="session", policy="reliable", **SHORT)
    alone = outcome(ranks, auth="session", policy="reliable", **SHORT | {"rate": 0})
    assert attacked["sent"] > 500
    assert attacked["oversized"] > 0
    assert attacked["counters"]["strangers"] > 0
    assert attacked["steps"] == 130
    assert faults(attacked, alone, "reliable") == []


def test_a_job_goes_on_until_so_many_hostile_datagrams_are_sent(ranks: HostRanks) -> None:
    job = {"auth": "session", "policy": "reliable", **SHORT, "blocks": 0, "steps": 5}
    attacked = outcome(ranks, datagrams=5000, **job)
    assert attacked["sent"] >= 5000
    assert attacked["blocks"] >= 3
    assert attacked["steps"] == 10 + 5 * attacked["blocks"]


def test_faults_are_named() -> None:
    good = {"identical": True, "replica": b"1", "least": 1.0, "grown": 0}
    for wrong, policy in [
        ({"identical": False}, "dblp"),
        ({"replica": b"2"}, "reliable"),
        ({"least": 0.9}, "dblp"),
        ({"grown": 1 << 30}, "dblp"),
    ]:
        assert len(faults(good | wrong, good, policy)) == 1
    assert faults(good | {"replica": b"2", "least": 0.9}, good, "ltp") == []


@pytest.mark.parametrize("auth", ["session", "whole", "key"])
def test_altered_payloads_change_a_job_by_default_alone(auth: str) -> None:
    job = {"auth": auth, "policy": "reliable", "steps": 20, "width": 100, "how": "bit"}
    replicas = []
    for share in (0.02, 0.0):
        with hosts_apart() as ranks:
            altered = tampered(ranks, share=share, **job)
        assert altered["error"] == ""
        assert altered["counters"]["malformed"] == 0
        assert bool(altered["altered"]) == (share > 0)
        replicas.append(altered["replicas"])
        unharmed = share == 0 or auth != "session"
        assert altered["identical"] == unharmed
        assert (altered["counters"]["forged"] > 0) == (share > 0 and auth != "session")
    assert (replicas[0][0].equal(replicas[1][0])) == (auth != "session")


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["session", "whole", "key"])
@pytest.mark.parametrize("policy", ["dblp", "ltp", "mlt", "adaptive"])
def test_lossy_policies_keep_their_bounds_under_attack(
    ranks: HostRanks, policy: str, auth: str
) -> None:
    attacked = outcome(ranks, auth=auth, policy=policy, **SHORT)
    assert attacked["sent"] > 500
    assert attacked["steps"] == 130
    assert faults(attacked, attacked, policy) == []
