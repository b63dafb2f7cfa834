"""Reads the state of a job's processes on this host, again and again, without torch."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.core.errors import GradwireError
from gradwire.live.address import FORMAT, Address, addresses, owner_of
from gradwire.watch.shape import whole

MOST_COST = 0.0009
"""The share of the job's processor time that keeping its steps and looks may take together; where
it is more, looks are rarer."""
LONGEST_S = 10.0
"""The longest time between two looks for that reason."""
IDLE = 0.02
"""The share of a processor up to which a process does nothing that a look could slow down."""
ANSWER_S = 1.0
"""How long a process may take to answer; one that takes longer is shown as it was."""
DIGITS = 8
"""So many digits of a job's number are shown."""


class Process:
    """One process of a job, as far as it has answered.

    Attributes:
        address: Where it offers its state.
        before: The answer before that, for rates; None until there are two.
        steps: The last steps of each of its attachments, by the attachment's id.
        heard: When it answered last, in seconds of the monotonic clock.
        unread: Whether nothing could be read of its last answer.
        gone: Whether it has closed its engine, or has ended.
    """

    def __init__(self, address: Address, kept: int) -> None:
        self.address = address
        self._kept = kept
        self.now: dict[str, Any] = {}
        self.before: dict[str, Any] | None = None
        self.steps: dict[str, deque[dict[str, Any]]] = {}
        self.heard = time.monotonic()
        self.unread = False
        self.gone = False

    @property
    def number(self) -> int:
        """Its process id; 0 where it offers none."""
        own = self.address.own.partition("-")[0] or "0"
        return int(self.now["pid"] if self.now else int(own, 16))

    @property
    def strange(self) -> bool:
        """Whether it answers and nothing of an engine can be read of that."""
        return self.unread or bool(self.now and not self.now["engines"])

    @property
    def since(self) -> dict[str, int]:
        """The number of steps that there were, by the attachment's id."""
        return {each["id"]: each["noted"] for each in self.now.get("attachments", ())}

    def take(self, answer: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        state = whole(answer)
        self.unread = state is None
        if state is None:
            return
        self.before, self.now = self.now or None, state
        for each in state["attachments"]:
            kept = self.steps.setdefault(each["id"], deque(maxlen=self._kept))
            kept.extend(each.pop("steps"))


class Watched:
    """The processes of one job on this host.

    Attributes:
        processes: Its processes, those that have ended included.
        others: Further jobs that ran here when this one was chosen.
    """

    def __init__(self, job: str, steps: int, others: Sequence[Job] = ()) -> None:
        self.job = job
        self.others = others
        self._steps = steps
        self.processes: dict[Address, Process] = {}

    def look(self) -> None:
        """Asks all processes once; takes `ANSWER_S` at most."""
        found = {each for each in addresses() if each.job == self.job and each.form == FORMAT}
        for address in found - self.processes.keys():
            self.processes[address] = Process(address, self._steps)
        asked = {
            address: process.since
            for address, process in self.processes.items()
            if address in found and not process.gone
        }
        answers = states(asked, self._steps)
        for address, process in self.processes.items():
            process.gone = process.gone or address not in found
            if address in answers and "error" not in answers[address]:
                process.take(answers[address])

    def pause(self, wanted: float) -> float:
        """Returns the seconds until the next look, so many that looking costs the job next to none.

        Args:
            wanted: The seconds that are wanted at least.
        """
        cost = kept = used = least = 0.0
        for process in self.processes.values():
            now, before = process.now, process.before
            if before is not None and not process.gone:
                seconds = max(1e-6, now["clock"] - before["clock"])
                cost += now["answering_s"] - before["answering_s"]
                kept += (now["keeping_s"] - before["keeping_s"]) / seconds
                used += (now["processor_s"] - before["processor_s"]) / seconds
                least += IDLE
        if used <= least:
            return wanted
        left = max(1e-9, MOST_COST * used - kept)
        return max(wanted, min(LONGEST_S, cost / left))

    @property
    def heard(self) -> list[Process]:
        known = [each for each in self.processes.values() if each.now]
        return sorted(known, key=lambda each: (_place(each), each.address.own))


def _place(process: Process) -> tuple[bool, int]:
    """Returns what sorts processes: workers by rank, then servers."""
    for engine in process.now["engines"]:
        word, _, number = engine["name"].partition(" ")
        if number.isdecimal():
            return word != "rank", int(number)
    return True, 0


def states(asked: dict[Address, dict[str, int]], steps: int) -> dict[Address, dict[str, Any]]:
    """Asks processes for their state, all at once.

    Args:
        asked: The processes, each with the number of steps that are known, by attachment.
        steps: How many steps of an attachment are wanted at most.

    Returns:
        The answers; nothing of a process that has ended, is stopped or is somebody else's.
    """
    answers: dict[Address, dict[str, Any]] = {}
    deadline = time.monotonic() + ANSWER_S
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waits:
        for address, since in asked.items():
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)
                connection.connect(address.name)
                if owner_of(connection).uid != address.uid:  # a name can be taken by anybody
                    continue
                connection.sendall(json.dumps({"since": since, "steps": steps}).encode() + b"\n")
                waits.register(connection, selectors.EVENT_READ, (address, bytearray()))
        while waits.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waits.select(left):
                address, held = key.data
                part = _receive(key.fileobj)
                held += part
                if part:
                    continue
                waits.unregister(key.fileobj)
                with contextlib.suppress(ValueError, RecursionError):
                    answer = json.loads(bytes(held))
                    if isinstance(answer, dict):
                        answers[address] = answer
    return answers


def _receive(connection: Any) -> bytes:
    try:
        part: bytes = connection.recv(1 << 18)
    except OSError:
        return b""
    return part


@dataclass(frozen=True)
class Job:
    """A job with processes on this host.

    Attributes:
        number: Its number, in hexadecimal digits.
        script: The script that it runs; "" where nothing says so.
        started: When it began, in seconds since 1970.
    """

    number: str
    script: str
    started: float


def find_job(asked: str | None) -> tuple[str, list[Job]]:
    """Returns the number of the job that is meant, and what else a name may have meant.

    The others are those of this user, the newest first; a number means none of them.

    Args:
        asked: The first digits of a job's number, or the script that it runs; None for the newest.

    Raises:
        GradwireError: There is none, or it is another user's or another version's; the error says
            which there are.
    """
    own, found = os.geteuid(), addresses()
    mine = [each for each in found if each.uid == own or (own == 0 and asked is not None)]
    readable = [each for each in mine if each.form == FORMAT]
    jobs = _jobs(readable)
    begin_so = [each for each in jobs if each.number.startswith(asked or "")]
    if asked is not None and len(begin_so) > 1:
        numbers = ", ".join(each.number for each in begin_so)
        raise GradwireError(f"several jobs begin with {asked!r}: {numbers}")
    named = begin_so or [each for each in jobs if each.script == os.path.basename(asked or "")]
    if not named:
        meant = [each for each in found if each.job.startswith(asked or "")]
        raise GradwireError(_none(asked, own, meant, found))
    others = [] if asked and begin_so else [each for each in jobs if each != named[0]]
    return named[0].number, others


def _jobs(readable: Sequence[Address]) -> list[Job]:
    """Returns the jobs of these processes, the newest first."""
    jobs: dict[str, Job] = {}
    for address, state in states({each: {} for each in readable}, 0).items():
        script, started = state.get("script"), state.get("started")
        jobs[address.job] = Job(
            address.job,
            script if isinstance(script, str) else "",
            float(started) if isinstance(started, (int, float)) else 0.0,
        )
    for address in readable:  # such as those that are stopped
        jobs.setdefault(address.job, Job(address.job, "", 0.0))
    return sorted(jobs.values(), key=lambda each: (-each.started, each.number))


def _none(asked: str | None, own: int, meant: Sequence[Address], found: Sequence[Address]) -> str:
    others = [each for each in meant if each.uid != own]
    forms = sorted({each.form for each in meant if each.uid == own})
    what = f"no job of {_user(own)} runs here" if asked is None else f"no job {asked!r} runs here"
    if forms:
        return (
            f"the job's gradwire offers its state in form {forms[0]}, and this one reads form "
            f"{FORMAT}: use the gradwire of the job"
        )
    if others and own != 0:
        name = _user(others[0].uid)
        return (
            f"{what}; job {others[0].job} is {name}'s, and only {name} and root may look at it: "
            f"sudo -u {name} gradwire top"
        )
    if others:
        listed = ", ".join(sorted({f"{each.job} of {_user(each.uid)}" for each in others}))
        return f"{what}; name one of the others': {listed}"
    jobs = ", ".join(sorted({each.job for each in found if each.uid == own}))
    more = f"; there are {jobs}" if jobs else ""
    return (
        f"{what}{more}: run it on a host of the job, and inside its container, as the job's user, "
        "once it has called attach. A job of one worker has no network to show"
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
