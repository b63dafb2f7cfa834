"""CalibrationRoll: who has called `attachment.calibrate` before a step, and who has forgotten to.

A round of the calibration ends with an exact sum over all workers. A rank that forgot a call never
starts it, and may then wait in a collective of the process group itself (DDP's own, in the forward
pass), where nothing of gradwire runs: the others would find out by their time-outs. So every rank
notes in the job's store that it waits at the end of a round, and, when the forward pass of a step
begins, how often it has called. Whoever began a step with fewer calls than another waits for in the
same step has forgotten one.
"""

from __future__ import annotations

import time

from gradwire.errors import TransferError
from gradwire.rendezvous import Meeting

__all__ = ["CalibrationRoll"]

TOPIC = "calibration"
POLL_S = 0.01


class CalibrationRoll:
    """One rank's part. meeting: of all workers, made on every rank alike. timeout_s: of a wait."""

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._rank = meeting.endpoint
        self._begun = -1  # the last step noted

    def begin(self, step: int, calls: int) -> None:
        """Notes that this rank's step begins, after so many calls.

        Raises TransferError when another rank waits for a call that was forgotten here.
        """
        if step == self._begun:
            return
        self._begun = step
        self._meeting.post(TOPIC, f"began {step} {calls}")
        for rank, (what, at, theirs) in self._others().items():
            if what == "waits" and at == step and theirs > calls:
                raise self._forgotten(self._rank, step, calls, rank, theirs)

    def wait(self, step: int, calls: int) -> None:
        """Waits until all ranks have called so often before this step.

        Raises TransferError naming a rank that began the step with fewer calls, or that has not
        come within the time-out.
        """
        self._meeting.post(TOPIC, f"waits {step} {calls}")
        deadline = time.monotonic() + self._timeout_s
        while True:
            missing = []
            others = self._others()
            for rank in range(self._meeting.workers):
                what, at, theirs = others.get(rank, ("", -1, 0))
                if rank == self._rank or theirs >= calls:
                    continue
                if what == "began" and at == step:
                    raise self._forgotten(rank, step, theirs, self._rank, calls)
                missing.append(rank)
            if not missing:
                return
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"rank {self._rank}, step {step}: {self._meeting.describe(missing)} has not "
                    f"called attachment.calibrate(...) within {self._timeout_s:g} s: every rank "
                    "has to call it before each step until it returns a calibration",
                    rank=missing[0],
                    step=step,
                )
            time.sleep(POLL_S)

    def _others(self) -> dict[int, tuple[str, int, int]]:
        """What each rank has noted last: what it does, the step, its calls."""
        noted: dict[int, tuple[str, int, int]] = {}
        for rank, text in enumerate(self._meeting.posted(TOPIC)):
            if text is not None and rank != self._rank:
                what, step, calls = text.split()
                noted[rank] = what, int(step), int(calls)
        return noted

    @staticmethod
    def _forgotten(rank: int, step: int, calls: int, other: int, theirs: int) -> TransferError:
        return TransferError(
            f"rank {rank} began step {step} after {calls} calls of attachment.calibrate(...), rank "
            f"{other} has made {theirs}: every rank has to call it before each step until it "
            "returns a calibration",
            rank=rank,
            step=step,
        )
