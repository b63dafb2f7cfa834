"""Plans and chunk grids as Python sees them."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import _engine
from scenarios import plan


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"elements": 0, "regions": []}, "elements"),
        ({"regions": []}, "regions"),
        ({"regions": [(0, 50, 0.0)]}, "regions"),
        ({"regions": [(0, 50, 0.0), (60, 40, 0.0)]}, "regions"),
        ({"regions": [(0, 100, 1.0)]}, "bound"),
        ({"regions": [(0, 100, -0.1)]}, "bound"),
        ({"regions": [(0, 100, float("nan"))]}, "bound"),
        ({"spend": "some"}, 'spend is "some"; allowed are "nothing", "late", "lost", "anything"'),
        ({"fill": "one"}, 'fill is "one"; allowed are "zero", "mean"'),
        (
            {"order": "random"},
            'order is "random"; allowed are "sequential", "shuffled", "priority"',
        ),
        ({"class_dscp": [8]}, 'class_dscp is given without order "priority"'),
        ({"order": "priority", "class_dscp": [64]}, "class_dscp: 64; a DSCP is from 0 to 63"),
        ({"order": "priority", "class_dscp": [0] * 9}, "class_dscp has 9 values; at most 8"),
        ({"pull": "maybe"}, "pull is"),
        ({"pull_bound": 0.1}, "pull_bound"),
        ({"pull": "committed", "pull_bound": 1.0}, "pull_bound"),
        ({"pull": "lossy", "pull_bound": -0.1}, "pull_bound"),
        ({"control": "ask"}, 'control is "ask"; allowed are "stream", "probe"'),
        ({"control": "probe", "spend": "lost"}, 'spend is "lost" with control "probe"'),
        ({"scale": float("inf")}, "scale"),
        (
            {"encoding": "f8"},
            'encoding is "f8"; allowed are "f32", "f16", "bf16", "int8", "topk", "half"',
        ),
        ({"encoding": "topk", "kept": 0.0}, "kept"),
        ({"encoding": "topk", "kept": 1.1}, "kept"),
        ({"encoding": "topk", "kept": float("nan")}, "kept"),
        ({"kept": 0.5}, 'without encoding "topk"'),
        ({"schedule": []}, "schedule"),
        ({"schedule": [("noon", "all", 0, 1.0)]}, 'clock is "noon"'),
        ({"schedule": [("open", "some", 0, 1.0)]}, 'scope is "some"'),
        ({"schedule": [("open", "all", -1, 1.0)]}, "delay"),
        ({"schedule": [("open", "all", 0, 1.5)]}, "fraction"),
    ],
)
def test_what_is_wrong_with_a_plan_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _engine.Plan(**{"elements": 100, "regions": [(0, 100, 0.0)], **options})


def test_plans_have_a_hash_that_tells_everything_apart() -> None:
    base: dict[str, Any] = {"elements": 100, "regions": [(0, 60, 0.1), (60, 40, 0.0)]}
    changes: list[dict[str, Any]] = [
        {},
        {"regions": [(0, 50, 0.1), (50, 50, 0.0)]},
        {"regions": [(0, 60, 0.2), (60, 40, 0.0)]},
        {"spend": "lost"},
        {"fill": "mean"},
        {"order": "shuffled"},
        {"order": "priority"},
        {"order": "priority", "class_dscp": [0]},
        {"order": "priority", "class_dscp": [0, 46]},
        {"pull": "committed"},
        {"pull": "committed", "pull_bound": 0.1},
        {"pull": "none"},
        {"pull": "lossy"},
        {"pull": "lossy", "pull_bound": 0.1},
        {"control": "probe"},
        {"scale": 0.5},
        {"seed": 1},
        {"encoding": "f16"},
        {"encoding": "bf16"},
        {"encoding": "int8"},
        {"encoding": "topk"},
        {"encoding": "topk", "kept": 0.5},
        {"schedule": [("open", "all", 1, 1.0)]},
        {"schedule": [("tail", "all", 0, 1.0)]},
        {"schedule": [("open", "worker", 0, 1.0)]},
        {"schedule": [("open", "all", 0, -1.0)]},
    ]
    hashes = [_engine.Plan(**{**base, **change}).hash for change in changes]
    assert len(set(hashes)) == len(changes)
    assert hashes[0] == _engine.Plan(**base).hash


@given(data=st.data())
def test_the_grid_covers_every_element_once(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
    datagram = data.draw(st.integers(256, 8972))
    aggregators = data.draw(st.integers(1, 9))
    edges = np.concatenate([[0], np.cumsum(lengths)])
    regions = [(int(a), int(b - a), 0.25) for a, b in pairwise(edges)]
    made = _engine.Plan(elements=int(edges[-1]), regions=regions, spend="lost")
    offset, length, region, aggregator = _engine.chunk_grid(made, datagram, aggregators)
    assert offset[0] == 0
    assert (offset[:-1] + length[:-1] == offset[1:]).all()
    assert offset[-1] + length[-1] == edges[-1]
    # No chunk straddles two regions, or is longer than a datagram.
    assert (region == np.searchsorted(edges, offset, "right") - 1).all()
    assert (region == np.searchsorted(edges, offset + length - 1, "right") - 1).all()
    assert length.max() <= (datagram - _engine.HEADER_BYTES) // 4
    assert (np.diff(aggregator.astype(int)) >= 0).all()
    # The effective bound is what whole chunks of each shard can use of the bound.
    bounds = made.effective_bounds(datagram, aggregators)
    for index, bound in enumerate(bounds):
        best = 0
        for shard in range(aggregators):
            mine = length[(region == index) & (aggregator == shard)].astype(int)
            sums = {0}
            full = int(mine.max()) if len(mine) else 0
            tail = [int(x) for x in mine if x != full]
            for count in range(len(mine) - len(tail) + 1):
                sums.add(count * full)
                sums.update(count * full + x for x in tail)
            best += max(x for x in sums if x <= 0.25 * mine.sum() + 1e-9)
        assert bound == pytest.approx(best / lengths[index])
        assert bound <= 0.25


def test_aggregators_get_even_shares() -> None:
    _, length, _, aggregator = _engine.chunk_grid(plan(1_000_000), 1472, 7)
    shares = np.bincount(aggregator, weights=length, minlength=7)
    assert shares.max() - shares.min() <= 2 * 361


def test_bad_grids_are_errors() -> None:
    with pytest.raises(ValueError, match="256 to 8972"):
        _engine.chunk_grid(plan(10), 100, 1)
    with pytest.raises(ValueError, match="aggregators"):
        _engine.chunk_grid(plan(10), 1472, 0)
