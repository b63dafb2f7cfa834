"""Ideals and percentiles."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from gradwire import _engine
from gradwire_lab.contest.measure import (
    CONVENTION,
    GRADWIRE_PAYLOAD,
    TCP_PAYLOAD,
    all_reduce_payload,
    environment,
    header_ideal,
    percentile,
    processor_time,
    push_payload,
    softnet_drops,
    summarize,
)
from gradwire_lab.network import NETWORK_A, NETWORK_B
from gradwire_lab.network.presets import MAX_FRAME


def test_the_header_ideal_is_that_of_the_busiest_port() -> None:
    assert all_reduce_payload(1000, 4) == 1500
    assert push_payload(1000, 8) == 8000
    assert header_ideal(1432, NETWORK_A.rate) == pytest.approx(1514 * 8e-9)
    assert header_ideal(all_reduce_payload(2_000_000, 4), NETWORK_B.rate) == pytest.approx(
        0.12687, rel=1e-4
    )


def test_the_least_ratios_are_those_of_real_frames() -> None:
    packet = MAX_FRAME - 14 - 20  # without the headers of Ethernet and IPv4
    assert packet - 8 - _engine.HEADER_BYTES == GRADWIRE_PAYLOAD
    assert packet - 20 - 12 == TCP_PAYLOAD
    frame = MAX_FRAME * 8 / NETWORK_A.rate
    for carried in (GRADWIRE_PAYLOAD, TCP_PAYLOAD):
        assert f"{frame / header_ideal(carried, NETWORK_A.rate):.3f}" in CONVENTION


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile(values, 100) == 100
    assert percentile(values, 0) == 1
    assert percentile([3.0], 99) == 3.0
    with pytest.raises(ValueError):
        percentile([], 50)
    with pytest.raises(ValueError):
        percentile(values, 101)


def test_a_tail_needs_enough_rounds() -> None:
    few = summarize([1.0, 2.0, 3.0], 0.5)
    assert (few.rounds, few.median, few.max, few.p99) == (3, 4.0, 6.0, None)
    assert summarize([1.0] * 999 + [2.0] * 1001, 1.0).p99 == 2.0
    assert summarize([1.0, 2.0], 1.0, tail_rounds=2).p99 == 2.0
    assert json.loads(json.dumps(asdict(few)))["p99"] is None
    with pytest.raises(ValueError):
        summarize([1.0], 0.0)


def test_the_environment_says_what_it_ran_on() -> None:
    found = environment()
    assert found["cores"] >= 1
    assert found["torch"]
    assert json.dumps(found)
    assert softnet_drops() >= 0


def test_processor_time_that_a_hypervisor_gave_to_others_is_told() -> None:
    before = processor_time("cpu  100 10 50 7000 30 0 40 20 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    after = processor_time("cpu  160 10 70 9000 90 0 40 40 0 0\n")  # idle and waiting: not wanted
    assert after.stolen_since(before) == 20 / 100
    assert before.stolen_since(before) is None
    assert processor_time().wanted > 0
