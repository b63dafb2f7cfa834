"""What became of a cell's job, and whether that was to be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradwire_lab.faults.cells import Cell

Message = dict[str, object]


@dataclass
class Told:
    """What one process told, as far as it is judged.

    Attributes:
        name: "rank 2", "server 0".
        struck: whether the fault befell it.
        replica: the fingerprint of its parameters at the end; "" where it did not come that far.
        errors: its errors, in order: texts with what torch or gradwire made of them.
        after_s: seconds from the fault to its first error.
        status: its exit status; None where it lives on.
    """

    name: str
    struck: bool = False
    replica: str = ""
    errors: list[str] = field(default_factory=list)
    after_s: float = 0.0
    status: int | None = None


@dataclass
class Verdict:
    """A verdict on one repetition of a cell.

    Attributes:
        fate: what became of the job: "on", "stop" or "neither".
        faults: what was wrong; none where all was as it had to be.
        after_s: seconds from the fault until the last rank had stopped.
        text: the error of one rank, where there is one.
    """

    fate: str
    faults: list[str]
    after_s: float = 0.0
    text: str = ""


def judge(cell: Cell, told: Sequence[Told], expected: str, bound_s: float) -> Verdict:
    """Judge what the processes of a job told.

    Args:
        expected: the fingerprint of a job without a fault.
        bound_s: the longest time until all have stopped.
    """
    # What dies has nothing to tell, and what a freeze ends is told by those who live.
    dead = cell.what in ("kill", "leave") or (cell.what == "stop" and cell.ground != "thaw")
    alive = [each for each in told if not (dead and each.struck)]
    ranks = [each for each in alive if each.name.startswith("rank")]
    done = [each for each in ranks if each.replica]
    stopped = [each for each in ranks if each.errors and not each.replica]
    faults: list[str] = []
    for each in done:
        if each.replica != expected:
            faults.append(f"{each.name} has another replica than without the fault")
    if len(done) == len(ranks):
        fate = "on"
    elif len(stopped) == len(ranks) or (
        # Who has done its last step cannot know that others lack results of it.
        cell.phase == "detach" and len(done) + len(stopped) == len(ranks)
    ):
        fate = "stop"
        faults += _stopped(cell, stopped, bound_s)
    else:
        fate = "neither"
        faults += [f"{each.name} has said nothing" for each in ranks if not _ended(each)]
        faults += [f"{each.name} went on" for each in ranks if each.replica]
        faults += [f"{each.name} stopped: {each.errors[0]}" for each in ranks if each.errors]
    if fate != "neither" and cell.fate not in ("either", fate):
        faults.append(f"the job was to {'go on' if cell.fate == 'on' else 'stop'}")
        faults += [f"{each.name}: {each.errors[0]}" for each in ranks if each.errors][:1]
    for each in told:
        if cell.status is not None and each.struck and each.status != cell.status:
            faults.append(f"{each.name} ended with status {each.status}, not {cell.status}")
        if not (dead and each.struck) and each.status is not None and each.status < 0:
            faults.append(f"{each.name} was ended by signal {-each.status}")
    texts = [text for each in ranks for text in each.errors]
    after = max((each.after_s for each in ranks), default=0.0)
    return Verdict(fate, faults, after, texts[0] if texts else "")


def _ended(told: Told) -> bool:
    return bool(told.replica or told.errors)


def _stopped(cell: Cell, ranks: Sequence[Told], bound_s: float) -> list[str]:
    """Return what the errors of ranks lack."""
    culprit = cell.whom if cell.culprit is None else cell.culprit
    faults = []
    for each in ranks:
        text = "\n".join(each.errors)
        own = cell.what.startswith("use_up") and each.struck  # its own errors are of the system
        if culprit and not re.search(rf"\b{culprit}\b", text) and not own:
            faults.append(f"{each.name} does not name {culprit}: {each.errors[0]}")
        if not cell.meets and not re.search(r"\bstep \d+", text) and not own:
            faults.append(f"{each.name} names no step: {each.errors[0]}")
        for word in cell.says:
            if word not in text:
                faults.append(f"{each.name} does not say {word!r}: {each.errors[0]}")
        if each.after_s > bound_s and not (each.struck and cell.what == "sleep"):
            faults.append(f"{each.name} stopped after {each.after_s:.1f} s, not {bound_s:.1f} s")
    return faults
