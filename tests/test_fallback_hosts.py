"""on_failure="host" where ranks share hosts: a leader's engine ends, and then a follower dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import Gone
from test_fallback_ranks import fails, trains_on
from test_hosts import PAIRS, hosts, join_group, ports

pytestmark = pytest.mark.usefixtures("namespaces")


def test_a_leader_goes_over_with_its_followers_but_not_without_them(tmp_path: Path) -> None:
    """Followers have no engine, and get what the leaders sum over the host's network."""
    with hosts(PAIRS) as ranks:
        ranks.run(join_group, port=next(ports))
        outcomes = ranks.run(trains_on, report=str(tmp_path / "steps.jsonl"), victim=2)
        assert len({each for outcome in outcomes for each in outcome}) == 1
        *others, last = ranks.outcomes(fails, kind="dies", victim=3)
    assert isinstance(last, Gone)
    for told, seconds in others:
        assert "rank 3" in told
        assert seconds < 60.0
