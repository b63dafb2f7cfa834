"""A cell of the study says what is trained, over what, and from which seed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cell", "Outcome"]


@dataclass(frozen=True)
class Cell:
    """A cell holds all that determines a result.

    Attributes:
        parts: how many of the task's trainings are made.
        where: "virtual" (time, and a simulated network) or "kernel" (four processes on a network
            of namespaces).
    """

    task: str
    optimizer: str
    data: str
    arm: str
    scenario: str
    seed: int
    rounds: int
    parts: int
    where: str = "virtual"


@dataclass(frozen=True)
class Outcome:
    """An outcome is the result of one cell.

    Attributes:
        score: mean of the parts' scores; None where a training failed.
        scores: the score of each part.
        delivered: share of the gradients that counted, mean over rounds and workers.
        critical_share: the share of critical rounds, as the arm's policy saw them.
        lossy_rounds: rounds in which some worker's gradient did not count whole.
        guarded: rounds that the guard sent again.
        comm_s: seconds of communication, mean of the rounds; virtual ones but for real processes.
        error: why a training ended early; "" if none did.
        seconds: the time that the cell took to compute.
        commit: the commit of the source checkout that computed it.
    """

    score: float | None
    scores: tuple[float, ...]
    delivered: float
    critical_share: float
    lossy_rounds: int
    guarded: int
    comm_s: float
    error: str
    seconds: float
    commit: str | None = None
