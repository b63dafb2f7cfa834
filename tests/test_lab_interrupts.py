"""Ctrl-C in the middle of a cell ends the run, whatever else goes wrong on the way out."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire_lab.contest.interrupts import end_as_ctrl_c_does
from gradwire_lab.contest.ranks import RankError
from gradwire_lab.network import channel as channel_module
from gradwire_lab.network.channel import Channel, LabUnavailable
from gradwire_lab.run import course
from gradwire_lab.run.course import Audience
from gradwire_lab.run.ground import Ground
from test_lab_journal import small

KEEPER = """
import json, os, signal, socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as channel:
    while message := channel.recv(1 << 16):
        question = json.loads(message)["ask"]
        if question == "slow":
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(0.3)
        channel.send(json.dumps({"to": question}).encode())
"""


@contextlib.contextmanager
def interrupted_by(number: int) -> Iterator[None]:
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_an_answer_that_comes_after_an_interrupt_is_given_to_no_other_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def helper(_: str, descriptor: int, *__: object) -> list[str]:
        return [sys.executable, "-c", KEEPER, str(descriptor)]

    monkeypatch.setattr(channel_module, "helper_command", helper)
    with (
        contextlib.closing(Channel("network.keeper", "it is closed")) as keeper,
        interrupted_by(signal.SIGUSR1),
    ):
        assert keeper.ask({"ask": "first"}) == ({"to": "first"}, [])
        with pytest.raises(KeyboardInterrupt):
            keeper.ask({"ask": "slow"})
        assert select.select([keeper._channel], [], [], 30.0)[0]  # the answer is there now
        for _ in range(2):
            with pytest.raises(LabUnavailable, match="is closed: an earlier question has had no"):
                keeper.ask({"ask": "second"})


class Network:
    """Answers nothing any more."""

    wires_by = None
    wires: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*_: object) -> None:
            self.asked.append(name)
            if len(self.asked) > 1 or name != "set_loss":
                raise LabUnavailable("the network is closed")

        return ask


LOSS = ("[grid]", '[loss]\nrate = 0.1\nwhen = "rounds"\n[grid]')


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankError("rank 1 died")])
def test_an_error_within_a_round_is_not_replaced(error: BaseException, tmp_path: Path) -> None:
    ground = Ground(Network(), small(tmp_path, LOSS).first)  # type: ignore[arg-type]
    with pytest.raises(type(error)) as raised, ground.losing(True):
        raise error
    assert raised.value is error
    assert len(ground.lossy) == 1
    ground.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankError("rank 1 died")])
def test_a_cell_says_what_ended_it_first(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = small(tmp_path).cells[0]
    ground = Ground(Network(), cell.scenario)  # type: ignore[arg-type]

    def work(*_: object) -> None:
        raise error

    monkeypatch.setattr(course, "open_ground", lambda *_: contextlib.nullcontext(ground))
    monkeypatch.setattr(course, "run_transfers", work)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            course.measure(cell, 0, Audience())
    else:
        assert course.measure(cell, 0, Audience()).error == "rank 1 died"
    ground.close()


def test_a_signal_that_was_to_be_ignored_still_is() -> None:
    """nohup has SIGHUP ignored: a terminal that closes does not end what it started."""
    numbers = (signal.SIGHUP, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_as_ctrl_c_does()
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
