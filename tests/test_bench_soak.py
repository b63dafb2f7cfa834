"""`gradwire bench soak`: what it says of replicas and of what processes hold, and a short one."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire_lab.faults.soak import HELD, Soak, run_soak


def replica(step: int, fingerprint: str, **held: int) -> dict[str, Any]:
    return {"life": 0, "step": step, "fingerprint": fingerprint, **held}


def soaked(held: list[tuple[int, int, int]], other: str = "a") -> Soak:
    soak = Soak()
    for step, figures in enumerate(held):
        at = float(step)
        soak.note("rank 0", replica(step, "a", **dict(zip(HELD, figures, strict=True))), at)
        soak.note("rank 1", replica(step, other if step else "a"), at)
    return soak


@pytest.mark.parametrize(
    ("held", "other", "wrong"),
    [
        ([(1000, 20, 10)] * 8, "a", 0),
        ([(500, 20, 10)] * 2 + [(1000, 20, 10)] * 6, "a", 0),  # what a start brings is no growth
        ([(1000 + 20 * at, 20, 10) for at in range(8)], "a", 1),
        ([(1000, 20 + at, 10) for at in range(8)], "a", 1),
        ([(1000, 20, 10 + at) for at in range(8)], "a", 1),
        ([(1000, 20, 10)] * 8, "b", 7),
    ],
)
def test_what_grows_and_replicas_that_differ_are_told(
    held: list[tuple[int, int, int]], other: str, wrong: int
) -> None:
    assert len(soaked(held, other).judged()) == wrong


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("namespaces")
def test_a_job_outlives_a_rank_under_loss() -> None:
    found = run_soak(60.0, 25.0, 0.02, 5.0)
    assert found.faults == []
    assert {0, 1} <= {life for life, _ in found.replicas}
    assert all(len(set(prints.values())) == 1 for prints in found.replicas.values())
