"""CalibrationRoll: who has called `attachment.calibrate` before a step, and who has forgotten to.

A round of the calibration ends with an exact sum over all workers. A rank that forgot a call never
starts it, and may then wait in a collective of the process group itself (DDP's own, in the forward
pass), where nothing of gradwire runs: the others would find out by their time-outs. So every rank
notes in the job's store that it waits at the end of a round, and, when the forward pass of a step
begins, how often it has called. Whoever began a step with fewer calls than another waits for in the
same step has forgotten one. And a call that fails says so: the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from gradwire.errors import TransferError
from gradwire.rendezvous import Meeting

__all__ = ["CalibrationRoll"]

TOPIC = "calibration"
POLL_S = 0.01


class CalibrationRoll:
    """One rank's part. meeting: of all workers, made on every rank alike. timeout_s: of a wait.
    failure: why the engine has failed, "" while it has not: a rank that died says nothing."""

    def __init__(
        self, meeting: Meeting, timeout_s: float, failure: Callable[[], str] = lambda: ""
    ) -> None:
        self._meeting = meeting
        self._failure = failure
        self._timeout_s = timeout_s
        self._rank = meeting.endpoint
        self._name = meeting.describe([self._rank])
        self._begun = -1  # the last step noted

    def begin(self, step: int, calls: int) -> None:
        """Notes that this rank's step begins, after so many calls.

        Raises TransferError when another rank waits for a call that was forgotten here.
        """
        if step == self._begun:
            return
        self._begun = step
        self._meeting.post(TOPIC, f"began {step} {calls}")
        for rank, (what, at, theirs, _) in self._others().items():
            if what == "waits" and at == step and theirs > calls:
                raise self._forgotten(self._rank, step, calls, rank, theirs)

    def wait(self, step: int, calls: int) -> None:
        """Waits until all ranks have called so often before this step.

        Raises TransferError naming a rank that began the step with fewer calls, whose call failed,
        that died, or that has not come within the time-out.
        """
        self._meeting.post(TOPIC, f"waits {step} {calls}")
        deadline = time.monotonic() + self._timeout_s
        while True:
            missing = []
            others = self._others()
            for rank in range(self._meeting.workers):
                what, at, theirs, why = others.get(rank, ("", -1, 0, ""))
                if what == "failed":
                    raise TransferError(
                        f"{self._meeting.describe([rank])} failed in attachment.calibrate(...) "
                        f"before step {at}: {why}",
                        rank=self._meeting.names.rank_of(rank),
                        step=step,
                    )
                if rank == self._rank or theirs >= calls:
                    continue
                if what == "began" and at == step:
                    raise self._forgotten(rank, step, theirs, self._rank, calls)
                missing.append(rank)
            if not missing:
                return
            if why := self._failure():
                raise TransferError(f"{self._name}, step {step}: {why}", step=step)
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"{self._name}, step {step}: {self._meeting.describe(missing)} has not "
                    f"called attachment.calibrate(...) within {self._timeout_s:g} s: every rank "
                    "has to call it before each step until it returns a calibration",
                    rank=self._meeting.names.rank_of(missing[0]),
                    step=step,
                )
            time.sleep(POLL_S)

    def fail(self, step: int, calls: int, why: str) -> None:
        """Notes that this rank's call failed, if the store can still be told."""
        with contextlib.suppress(Exception):  # the cause is the other error
            self._meeting.post(TOPIC, f"failed {step} {calls} {why}")

    def _others(self) -> dict[int, tuple[str, int, int, str]]:
        """What each rank has noted last: what it does, the step, its calls, and why it failed."""
        noted: dict[int, tuple[str, int, int, str]] = {}
        for rank, text in enumerate(self._meeting.posted(TOPIC)):
            if text is not None and rank != self._rank:
                what, step, calls, *why = text.split(maxsplit=3)
                noted[rank] = what, int(step), int(calls), " ".join(why)
        return noted

    def _forgotten(
        self, rank: int, step: int, calls: int, other: int, theirs: int
    ) -> TransferError:
        return TransferError(
            f"{self._meeting.describe([rank])} began step {step} after {calls} calls of "
            f"attachment.calibrate(...), {self._meeting.describe([other])} has made {theirs}: "
            "every rank has to call it before each step until it returns a calibration",
            rank=self._meeting.names.rank_of(rank),
            step=step,
        )
