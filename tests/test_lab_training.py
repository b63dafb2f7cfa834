"""Turns of training: what goes by the clock begins with the steps, not while they wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gradwire_lab.network.presets import Burst
from gradwire_lab.run import training
from gradwire_lab.run.faults import Faults
from gradwire_lab.run.model import CellRun
from gradwire_lab.scenario import load
from gradwire_lab.training.trainee import RankStep

TRAINING = """
name = "small"
title = "a small one"
[topology]
workers = 2
[work]
kind = "training"
rounds = 4
block = 4
warm_up = 0
[model]
width = 16
[loss]
rate = 0.9
when = "steps"
steps = [0]
[[bursts]]
rate = 1e9
on_s = 0.1
period_s = 6.0
[[contestants]]
name = "ours"
transport = "gradwire"
[[contestants]]
name = "tcp"
transport = "gloo"
"""


class Recorder:
    """Stands for the ground, its cross traffic and the ranks, and notes what is done in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.steps = 0  # asked for
        self.faults = Faults((), lambda fault, on: None, [])
        self.traffic = [self]
        self.burst = Burst(rate=1e9, on=0.1, period=6.0)
        self.wire = {"ours": (0, 0), "tcp": (0, 0)}

    def next_phase(self, offset: float, *, after: float) -> float:
        assert 0.0 <= offset < self.burst.period
        return after + 3.0

    def next_turns(self) -> None:
        self.done.append("rates go on")

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        self.done.append("rates change")
        yield

    @contextlib.contextmanager
    def losing(self, on: bool) -> Iterator[None]:
        self.done.append("links lose" if on else "links are whole")
        yield

    @contextlib.contextmanager
    def counting(self, contestant: str, rounds: int) -> Iterator[None]:
        yield

    def ask(self, question: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
        self.done.append(f"{question['contestant']}: {question['steps']}")
        self.steps += question["steps"]
        step = RankStep(0, 0, 0, 0, 1, 1, 2.0, 1.0, None, 1, 1, 0, 0.1, 0, {})
        numbers = range(self.steps - question["steps"], self.steps)
        steps = [{**asdict(step), "layers": {"front": float(number)}} for number in numbers]
        return [{"steps": steps, "validation": 2.0}] * 2


def test_a_turn_waits_for_its_phase_before_loss_and_rates_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(TRAINING)
    scenario = load(path).first
    recorder: Any = Recorder()
    monkeypatch.setattr(training, "sleep_until", lambda moment: recorder.done.append("phase"))
    run = CellRun(0.0)
    course = training._Course(scenario, recorder, recorder, run, lambda name, done: None)
    course.all_turns(0, 4)
    turns = [
        ["phase", "rates change", "links lose", f"{name}: 1", "links are whole", f"{name}: 3"]
        for name in ("ours", "tcp")
    ]
    assert recorder.done == ["rates go on", *turns[0], *turns[1]]
    assert [len(track.seconds) for track in run.tracks.values()] == [4, 4]


def test_shares_by_layer_are_of_timed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of those that find the pace nor of those that warm up."""
    alone, _, _ = TRAINING.rpartition("[[contestants]]")
    for old, new in (
        ("width = 16", "width = 16\ncommunication_share = 0.5"),
        ("warm_up = 0", "warm_up = 1"),
        ("steps = [0]", "steps = [3]"),
    ):
        alone = alone.replace(old, new)
    path = tmp_path / "small.toml"
    path.write_text(alone)
    scenario = load(path).first
    recorder: Any = Recorder()
    monkeypatch.setattr(training, "sleep_until", lambda moment: None)
    course = training._Course(scenario, recorder, recorder, CellRun(0.0), lambda name, done: None)
    course.set_pace()
    before = recorder.steps
    assert before > 0
    course.all_turns(0, 4)
    timed = [float(before + step) for step in (1, 2, 3)]
    assert sorted(course._shares["ours"]["front"]) == sorted(2 * timed)  # of two workers
