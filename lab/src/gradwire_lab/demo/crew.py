"""The demo's ranks, one on each host."""

from __future__ import annotations

import os

from gradwire_lab.contest.ranks import Ranks
from gradwire_lab.demo.ground import Ground
from gradwire_lab.demo.scenario import Scenario
from gradwire_lab.training.startline import memory


def start(ground: Ground, scenario: Scenario) -> Ranks:
    """Start the ranks; their first answers are facts about model and text.

    Args:
        ground: where they run.
        scenario: of the demo.

    Raises:
        RankError: a rank ended at once.
    """
    line = memory(scenario.ranks)
    try:
        configs = [
            {
                "scenario": scenario.as_json(),
                "rank": rank,
                "store_host": ground.store[0],
                "store_port": ground.store[1],
                "lossy": ground.reason is not None,
                "line": line,
                "parent": ground.parent,
            }
            for rank in range(scenario.ranks)
        ]
        return Ranks(ground.spawn, "gradwire_lab.demo.worker", configs, pass_fds=[line])
    finally:
        os.close(line)
