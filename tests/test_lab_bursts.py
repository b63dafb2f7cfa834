"""The sender of cross traffic, on a clock of the test's."""

from __future__ import annotations

import socket
from typing import cast

import pytest

from gradwire_lab.network import burst_sender
from gradwire_lab.network.burst_sender import FRAME, PAYLOAD, send_burst
from gradwire_lab.network.bursts import phase_of
from gradwire_lab.network.presets import BURSTS_A

RATE = 4e9


class Machine:
    """A clock that wakes sleepers late, and a socket whose calls take time."""

    def __init__(self, wakes_late: float, send_takes: float) -> None:
        self.now = 0.0
        self._wakes_late, self._send_takes = wakes_late, send_takes

    def sleep_until(self, moment: float) -> None:
        if moment > self.now:
            self.now = moment + self._wakes_late

    def monotonic(self) -> float:
        return self.now

    def send(self, train: bytes) -> None:
        assert len(train) % PAYLOAD == 0
        self.now += self._send_takes


def sent_by(
    machine: Machine, start: float, length: float, monkeypatch: pytest.MonkeyPatch
) -> float:
    """The share of a burst that was sent."""
    monkeypatch.setattr(burst_sender, "time", machine)
    monkeypatch.setattr(burst_sender, "sleep_until", machine.sleep_until)
    sent = send_burst(cast(socket.socket, machine), RATE, start, start + length)
    assert sent % FRAME == 0
    return sent / (RATE * length / 8)


@pytest.mark.parametrize("length", [50e-6, 500e-6, 5e-3])
@pytest.mark.parametrize("wakes_late", [0.0, 200e-6, 2e-3])
@pytest.mark.parametrize("start", [0.001, -0.020])  # -: it is over when the process gets to run
def test_a_burst_is_sent_whole_by_a_sender_that_wakes_late(
    length: float, wakes_late: float, start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(wakes_late, 5e-6)
    assert sent_by(machine, start, length, monkeypatch) == pytest.approx(1.0, rel=0.04)


def test_a_machine_that_cannot_send_so_fast_ends_soon_after_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(0.0, 250e-6)  # half of the rate
    share = sent_by(machine, 0.0, 0.050, monkeypatch)
    assert share == pytest.approx((0.050 + burst_sender.GRACE_SECONDS) / 0.100, rel=0.05)
    assert machine.now == pytest.approx(0.050 + burst_sender.GRACE_SECONDS, abs=500e-6)


def test_turns_begin_all_over_the_period_of_the_bursts() -> None:
    period = BURSTS_A.period
    phases = sorted(phase_of(turn, BURSTS_A) for turn in range(10))
    gaps = [after - before for before, after in zip(phases, [*phases[1:], period], strict=True)]
    assert phases[0] == 0.0
    assert 0.03 * period < min(gaps)
    assert max(gaps) < 0.25 * period
