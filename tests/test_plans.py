"""Plans that are written anew for each step, of regions that are not."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys

import pytest

from gradwire.core.errors import ConfigError
from gradwire.core.hashed import HashedTuple
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import Region, Regions, TensorSlot
from gradwire.policies.parts.regions import pool, regions_by_tensor

HALVES = (Region(0, 4, 0.5, "a"), Region(4, 6, 0.0, "b"))


def test_a_hashed_tuple_is_found_as_a_plain_one_is() -> None:
    plain = ("a", 1, (2, 3))
    hashed = HashedTuple(plain)
    assert hash(hashed) == hash(plain) == hash(hashed)
    assert {plain: 5}[hashed] == 5
    assert copy.deepcopy(hashed) == hashed
    assert type(pickle.loads(pickle.dumps(hashed))) is HashedTuple


def test_a_hash_does_not_travel_to_a_process_that_hashes_text_otherwise() -> None:
    slots = HashedTuple([TensorSlot("weight", 0, 4)])
    hash(slots)
    code = (
        "import pickle, sys; slots = pickle.load(sys.stdin.buffer); "
        "sys.exit({tuple(slots): 0}.get(slots, 1))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4242"}
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(slots), env=environment, check=False
    )
    assert found.returncode == 0


def test_plans_share_what_is_known_of_their_regions() -> None:
    first = TransferPlan(10, HALVES, spend="lost")
    assert isinstance(first.regions, Regions)
    second = TransferPlan(10, first.regions, seed=7)
    assert second.regions is first.regions
    assert first.exact().regions is second.exact().regions
    assert [region.bound for region in first.exact().regions] == [0.0, 0.0]
    assert first.regions.cuts == (0, 4)


def test_a_plan_can_be_copied_sent_and_written_down() -> None:
    plan = TransferPlan(10, HALVES, spend="lost", seed=3)
    hash(plan)
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert hash(other) == hash(plan)
        assert other.exact() == plan.exact()
    assert dataclasses.asdict(plan)["regions"][1]["length"] == 6
    slot = TensorSlot("a.weight", 0, 4)
    assert slot.layer == "a"
    assert pickle.loads(pickle.dumps(slot)) == slot


def test_regions_that_do_not_fit_are_refused_however_they_come() -> None:
    with pytest.raises(ConfigError, match="expected one that starts at 4"):
        TransferPlan(10, (HALVES[0], Region(5, 5, 0.0, "b")))
    with pytest.raises(ConfigError, match=r"bound of region 'a'=1\.0"):
        TransferPlan(4, Regions([Region(0, 4, 1.0, "a")]))
    with pytest.raises(ConfigError, match="cover 10 elements: must be all 11"):
        TransferPlan(11, Regions(HALVES))
    with pytest.raises(ConfigError, match="cover 0 elements: must be all 1"):
        TransferPlan(1, ())


def test_the_same_bounds_make_the_same_regions() -> None:
    slots = HashedTuple([TensorSlot("a.weight", 0, 400), TensorSlot("b.weight", 400, 400)])
    first = regions_by_tensor(slots, [0.1, 0.4], [0.1, 0.1], 10)
    assert regions_by_tensor(slots, (0.1, 0.4), (0.1, 0.1), 10) is first
    assert pool(slots, 0.4, 10) is pool(list(slots), 0.4, 10)
    other = regions_by_tensor(slots, [0.1, 0.1], [0.1, 0.1], 10)
    assert [region.bound for region in other] == [0.1, 0.1]
    assert other.cuts == first.cuts
