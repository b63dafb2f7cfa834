"""Why a step was slow: what its record says, and what that probably means.

The rules stand in docs/guides/reading-a-report.md, "Why a step was slow".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradwire.core.words import count, seconds, share
from gradwire.reading.records import Record, Run, number

Cause = Literal[
    "usual",
    "computing",
    "resent",
    "more bytes",
    "late rank",
    "path in",
    "path out",
    "results",
    "unknown",
]
"""What held a step up: its own computation; the guard, which sent it again; more bytes than usual;
a rank that began late; the path of a contribution to this rank; this rank's path to the others;
results on their way here; or nothing that the records have."""

SLOW = 1.1
"""A step that took no more than so many times the usual is as usual."""
NEIGHBOURS = 200
"""How many steps around it are the usual ones."""
FEWEST = 3
"""Below so many other steps none is usual."""
BURST = 3
"""So many packets lost one after another are a burst."""
QUEUED = 3.0
"""A packet that queued so many times as long as usual has met a queue."""
UNTOLD = 1.25
"""A step that waited so many times as long as its last time says waited for something else, too."""
APART = 10.0
"""Bounds of one step that differ by so many times the smallest are of layers in both phases."""
MOST_SLOW = 10
"""So many of the slowest steps are explained."""

Value = Callable[[Record], float]


@dataclass(frozen=True)
class Why:
    """Why one step was slow.

    Attributes:
        took_s: Its duration in seconds; that of its communication where no more is recorded, as of
            the last step.
        usual_s: The same of the steps around it; NaN where there are too few.
        cause: What held it up.
        who: The rank or server that it names, as in "rank 3"; "" for none.
        short: What held it up, in a few words, with "probably" where that is a guess.
        lines: Five lines for people.
    """

    step: int
    took_s: float
    usual_s: float
    cause: Cause
    who: str
    short: str
    lines: tuple[str, ...]


def explain(run: Run, record: Record) -> Why:
    return _Reading(run, record).why()


def slowest(run: Run) -> Record:
    return max(_whole(run), key=_took)


def _whole(run: Run) -> list[Record]:
    """Returns the steps whose end is recorded; all of them where none is."""
    return [each for each in run.records if not math.isnan(each.took_s)] or run.records


def slowest_steps(run: Run) -> list[Why]:
    """Explains the slowest steps of a run, the slowest first, but for those that are as usual."""
    longest = sorted(_whole(run), key=_took, reverse=True)[:MOST_SLOW]
    return [why for each in longest if (why := explain(run, each)).cause != "usual"]


class _Reading:
    """One step beside the steps around it, whose medians are what is usual."""

    def __init__(self, run: Run, record: Record) -> None:
        self.run, self.record = run, record
        near = sorted(run.records, key=lambda each: abs(each.step - record.step))
        self.near = [each for each in near[: NEIGHBOURS + 1] if each is not record]
        # A step without an end is compared by its communication, and so are those around it.
        self.took = _communicated if math.isnan(record.took_s) else _took
        self.cause, self.who = self._cause()

    def usual(self, value: Value) -> float:
        """Returns the median of a value; NaN where too few steps have it."""
        known = [each for each in map(value, self.near) if not math.isnan(each)]
        return float(np.median(known)) if len(known) >= FEWEST else math.nan

    def excess(self, value: Value) -> float:
        """Returns by how much a value exceeds the usual one, or all of it where none is usual."""
        own, usual = value(self.record), self.usual(value)
        return 0.0 if math.isnan(own) else own if math.isnan(usual) else own - usual

    def times(self, value: Value) -> float:
        """Returns how many times the usual a value is; NaN where none is usual."""
        usual = self.usual(value)
        return value(self.record) / usual if usual > 0 else math.nan

    def beside(self, value: Value) -> str:
        usual = self.usual(value)
        known = "" if math.isnan(usual) else f" (usual {seconds(usual)})"
        return seconds(value(self.record)) + known

    def name(self, key: str) -> str:
        found = (self.record.slowest or {}).get(key)
        return found if isinstance(found, str) else ""

    def packets(self, kind: str, who: str) -> int:
        """Returns how many packets of a kind it was with a rank, if that had the most."""
        found = _slowest(f"{kind}_packets")(self.record)
        return int(found) if self.name(kind) == who and not math.isnan(found) else 0

    def why(self) -> Why:
        record, usual, took = self.record, self.usual(self.took), self.took(self.record)
        sure = self.cause in ("usual", "computing", "resent", "unknown")
        short = ("" if sure else "probably ") + self._short()
        known = (
            "" if not math.isnan(record.took_s) else " of communication (its end is not recorded)"
        )
        beside = (
            ", with too few steps beside it to say what is usual"
            if math.isnan(usual)
            else f", {took / usual:.2g} times the usual {seconds(usual)}"
        )
        lines = (
            f"step {record.step} took {seconds(took)}{known}{beside}: {short}",
            f"time: {self._time()}",
            f"rank: {self._ranks()}{self._witness()}",
            f"network: {self._network()}",
            f"policy: {self._decision()}",
        )
        return Why(record.step, took, usual, self.cause, self.who, short, lines)

    def _cause(self) -> tuple[Cause, str]:
        usual = self.usual(self.took)
        if not math.isnan(usual) and self.took(self.record) <= SLOW * usual:
            return "usual", ""
        waiting = self.excess(_waited)
        if self.excess(_computed) > waiting:
            return "computing", ""
        if self.record.text("guard") == "resent":
            return "resent", ""
        bytes_ = self.times(_bytes)
        if bytes_ > SLOW and self.times(_waited) <= SLOW * bytes_:
            return "more bytes", ""
        # What the transfer of the slowest bucket does not explain, nothing here does.
        if self.record.slowest is None or self.excess(_slowest("total_s")) < waiting / 2:
            return "unknown", ""
        parts: dict[Cause, tuple[str, Value]] = {
            "late rank": ("began", _slowest("began_s")),
            "path in": ("pushed", _between("began_s", "pushed_s")),
            "path out": ("resent", _between("pushed_s", "out_s")),
            "results": ("pulled", _between("out_s", "total_s")),
        }
        cause = max(parts, key=lambda each: self.excess(parts[each][1]))
        who = self.name(parts[cause][0])
        if cause == "late rank" and self.packets("missed", who):
            cause = "path in"  # its first packets were lost
        return cause, who

    def _short(self) -> str:
        here, who = f"rank {self.run.rank}", self.who
        if self.cause == "path in" and not who:
            late = self.name("missed")
            lost = self.packets("missed", late) if late else 0
            also = f"; {count(lost, 'packet')} of {late} were missing" if lost else ""
            return f"the deadline for late gradients passed before all had arrived{also}"
        lost = self.packets("resent" if self.cause == "path out" else "missed", who)
        how = f", which lost {count(lost, 'packet')}" if lost else ""
        if lost and self.packets("burst", who) >= BURST:
            how += f", {self.packets('burst', who)} in a row"
        queued = _slowest("queued_s")
        if self.name("queued") == who and queued(self.record) > QUEUED * self.usual(queued):
            how += f", where packets queued {seconds(queued(self.record))}"
        if self.cause in ("path in", "results") and self.name("missed") not in ("", who):
            missed = self.name("missed")
            also = f"; {count(self.packets('missed', missed), 'packet')} of {missed} were lost, too"
        else:
            also = ""
        return {
            "usual": "no slower than usual",
            "computing": f"computation on {here}, or what else its script did",
            "more bytes": f"{self.times(_bytes):.2g} times the usual bytes, as the policy chose",
            "late rank": f"{who} began late: what it did before took longer",
            "path in": f"the path from {who} to {here}{how}{also}",
            "path out": f"the path from {here}{f' to {who}' if who else ''}{how}",
            "results": f"the path from {who} to {here}{how}, or what {who} waited for itself{also}",
            "resent": "the guard sent the step again, because too little of it was delivered",
            "unknown": "no record explains it"
            + ("" if self.record.slowest else "; this version's do not say what a step waits for"),
        }[self.cause]

    def _witness(self) -> str:
        """Returns what the file of the rank that is named says of the same step."""
        rank = self.who.removeprefix("rank ")
        if self.cause not in ("late rank", "path in", "results") or not rank.isdecimal():
            return ""
        own = self.run.others.get(int(rank), {}).get(self.record.step)
        if own is None:
            return f"; no file of {self.who} is here to confirm it"
        pushed = (own.slowest or {}).get("pushed")
        return f"; its own file says that it waited {seconds(own.waited_s)}" + (
            f" and had its last part from {pushed}" if self.cause == "results" and pushed else ""
        )

    def _time(self) -> str:
        computing = (
            "" if math.isnan(_computed(self.record)) else f"computing {self.beside(_computed)}, "
        )
        return f"{computing}waiting {self.beside(_waited)}"

    def _ranks(self) -> str:
        said = [
            f"{words} {self.name(key)} after {self.beside(_slowest(f'{key}_s'))}"
            for key, words in (
                ("began", "the last to begin was"),
                ("pushed", "the last part came from"),
                ("pulled", "the last results from"),
            )
            if self.name(key)
        ]
        last = max(
            number((self.record.slowest or {}).get(f"{key}_s"), 0.0)
            for key in ("began", "pushed", "pulled")
        )
        if said and _waited(self.record) > UNTOLD * last:
            rest = seconds(_waited(self.record) - last)
            said.append(f"what the other {rest} of the waiting were for is not recorded")
        return "; ".join(said) or "not recorded"

    def _network(self) -> str:
        record = self.record
        said = ["packets not recorded"]
        if packets := int(record.number("packets", 0)):
            again = int(record.number("retransmissions", 0))
            said = [f"{count(again, 'packet')} sent again of {packets:,}"]
        if resent := self.name("resent"):
            said[0] += f", most to {resent} ({self.packets('resent', resent)})"
        if missed := self.name("missed"):
            said.append(f"{self.packets('missed', missed)} of {missed} missing")
        if self.packets("burst", burst := self.name("burst")) >= BURST:
            said.append(f"a burst of {self.packets('burst', burst)} with {burst}")
        if queued := self.name("queued"):
            said.append(f"one of {queued} queued {self.beside(_slowest('queued_s'))}")
        if rtprop := record.number("rtprop_s", 0.0):
            said.append(f"round trip {seconds(rtprop)}")
        return "; ".join(said)

    def _decision(self) -> str:
        record, slow = self.record, self.record.slowest or {}
        said = f"{record.text('policy')}, {record.text('phase')} phase"
        bounds = record.bounds[record.bounds > 0]
        if (
            record.text("phase") == "critical"
            and len(bounds)
            and np.ptp(bounds) > APART * bounds.min()
        ):
            said += " of some layers"  # the bound below is the largest of any
        if slow:
            layers = slow.get("layers")
            names = dict.fromkeys(map(str, layers if isinstance(layers, list) else ()))
            said += f": bucket {slow.get('bucket')} ({' to '.join(names)}) was slowest"
            said += f", in {slow.get('encoding')}"
        lost, bound = 1 - record.number("delivered", 1.0), record.number("bound", 0.0)
        free = bound > 0 and slow.get("spend") != "nothing"
        may = (
            f"{share(bound)}{' if lost' if slow.get('spend') == 'lost' else ''}"
            if free
            else "nothing"
        )
        said += f"; it might leave out {may}"
        if free or lost > 0:
            said += f" and left out {share(lost)}"
        if lost > 0 and len(record.delivered):
            worst = int(np.argmin(record.delivered))
            said += f", most of {record.names[worst]} ({share(1 - float(record.delivered[worst]))})"
        guard = record.text("guard")
        return f"{said}; guard: {guard}" if guard else said


def _took(record: Record) -> float:
    return _communicated(record) if math.isnan(record.took_s) else record.took_s


def _communicated(record: Record) -> float:
    return record.number("comm_s", 0.0)


def _waited(record: Record) -> float:
    return record.waited_s


def _bytes(record: Record) -> float:
    return record.number("bytes")


def _computed(record: Record) -> float:
    return record.took_s - record.waited_s


def _slowest(key: str) -> Value:
    """Returns a function for a number of the slowest bucket, NaN where it is not recorded."""
    return lambda record: number((record.slowest or {}).get(key))


def _between(start: str, end: str) -> Value:
    """Returns a function for the time between two moments of the slowest bucket, 0 at least."""
    return lambda record: max(0.0, _slowest(end)(record) - _slowest(start)(record))
