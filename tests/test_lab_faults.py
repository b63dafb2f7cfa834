"""Faults strike each contestant in its first turn, and end with it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gradwire_lab.network.network import LabUnavailable
from gradwire_lab.run.faults import Event, Faults
from gradwire_lab.run.training import segments
from gradwire_lab.scenario.network import Fault


class Ground:
    """Hears what is to be done."""

    def __init__(self, *faults: Fault, trouble: LabUnavailable | None = None) -> None:
        self.events: list[Event] = []
        self.done: list[tuple[str, bool]] = []
        self._trouble = trouble
        self._struck = threading.Semaphore(0)
        self.faults = Faults(faults, self.apply, self.events)

    def apply(self, fault: Fault, on: bool) -> None:
        try:
            if self._trouble is not None:
                raise self._trouble
            self.done.append((fault.kind, on))
        finally:
            self._struck.release()

    def await_one(self) -> None:
        assert self._struck.acquire(timeout=30.0)

    def turn(self, contestant: str, strikes: int = 0, error: Exception | None = None) -> None:
        self._struck = threading.Semaphore(0)
        with self.faults.turn(contestant):
            self.faults.begin(contestant)
            for _ in range(strikes):
                self.await_one()
            if error is not None:
                raise error

    @property
    def said(self) -> list[str]:
        return [each.what for each in self.events]


def fault(**fields: Any) -> Fault:
    return Fault(**{"kind": "cut", "host": 1, "at_s": 0.0, "for_s": 20.0, **fields})


def test_what_outlasts_its_turn_ends_with_it_and_strikes_once() -> None:
    ground = Ground(fault())
    with ground.faults.turn("ours"):
        ground.faults.begin("ours")
        ground.await_one()
        assert ground.done == [("cut", True)]
    assert ground.done == [("cut", True), ("cut", False)]
    ground.turn("ours")
    assert ground.said == ["cut host 1", "heal host 1"]
    ground.turn("theirs", strikes=1)
    assert ground.said == 2 * ["cut host 1", "heal host 1"]


def test_a_fault_ends_by_itself_within_its_turn() -> None:
    ground = Ground(fault(kind="freeze", for_s=0.01))
    ground.turn("ours", strikes=2)
    assert ground.done == [("freeze", True), ("freeze", False)]
    assert ground.said == ["freeze host 1", "heal host 1"]


def test_nobody_else_is_struck_by_a_fault_that_comes_too_late() -> None:
    ground = Ground(fault(at_s=3600.0))
    with pytest.raises(LabUnavailable, match=r"at_s=3600: the first turn of 'ours' was over"):
        ground.turn("ours")
    assert ground.done == []
    ground.turn("ours")


def test_a_fault_that_cannot_be_brought_about_is_no_event() -> None:
    ground = Ground(fault(), trouble=LabUnavailable("no packet filter"))
    with pytest.raises(LabUnavailable, match="no packet filter"):
        ground.turn("ours", strikes=1)
    assert ground.said == []


def test_what_fails_in_a_turn_is_told_first() -> None:
    ground = Ground(fault(), fault(at_s=3600.0))
    with pytest.raises(RuntimeError, match="theirs"):
        ground.turn("ours", strikes=1, error=RuntimeError("theirs"))
    assert ground.said == ["cut host 1"]


def test_a_turn_of_training_is_cut_where_its_clock_starts() -> None:
    assert list(segments(0, 8, (4,))) == [(4, False), (1, True), (3, False)]
    assert list(segments(0, 8, (4,), 2)) == [(2, False), (2, False), (1, True), (3, False)]
    assert list(segments(8, 8, (), 2)) == [(2, False), (6, False)]
    assert list(segments(0, 8, (1,), 2)) == [(1, False), (1, True), (6, False)]
