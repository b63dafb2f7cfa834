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
from gradwire.rendezvous import Names, Store, store_errors

__all__ = ["CalibrationRoll"]

POLL_S = 0.01


class CalibrationRoll:
    """One rank's part.

    prefix: of its keys in the store, alike on all ranks and never used before. rank: among the
    workers. names: of the workers. timeout_s: of a wait. failure: why the engine has failed, ""
    while it has not; a rank that died publishes nothing.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        names: Names,
        timeout_s: float,
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._names = names
        self._failure = failure
        self._timeout_s = timeout_s
        self._rank = rank
        self._name = names.describe([rank])
        self._begun = -1  # the last step noted

    def begin(self, step: int, calls: int) -> None:
        """Notes that this rank's step begins, after so many calls.

        Raises TransferError when another rank waits for a call that was forgotten here.
        """
        if step == self._begun:
            return
        self._begun = step
        self._post(f"began {step} {calls}")
        for rank, (what, at, theirs, _) in self._others().items():
            if what == "waits" and at == step and theirs > calls:
                raise self._forgotten(self._rank, step, calls, rank, theirs)

    def wait(self, step: int, calls: int) -> None:
        """Waits until all ranks have called so often before this step.

        Raises TransferError naming a rank that began the step with fewer calls, whose call failed,
        that died, or that has not come within the time-out.
        """
        self._post(f"waits {step} {calls}")
        deadline = time.monotonic() + self._timeout_s
        while True:
            missing = []
            others = self._others()
            for rank in range(len(self._names.ranks)):
                what, at, theirs, why = others.get(rank, ("", -1, 0, ""))
                if what == "failed":
                    raise TransferError(
                        f"{self._names.describe([rank])} failed in attachment.calibrate(...) "
                        f"before step {at}: {why}",
                        rank=self._names.rank_of(rank),
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
                    f"{self._name}, step {step}: {self._names.describe(missing)} has not "
                    f"called attachment.calibrate(...) within {self._timeout_s:g} s: every rank "
                    "has to call it before each step until it returns a calibration",
                    rank=self._names.rank_of(missing[0]),
                    step=step,
                )
            time.sleep(POLL_S)

    def fail(self, step: int, calls: int, why: str) -> None:
        """Notes that this rank's call failed, if the store can still be told."""
        with contextlib.suppress(Exception):  # the cause is the other error
            self._post(f"failed {step} {calls} {why}")

    def _post(self, text: str) -> None:
        with store_errors():
            self._store.set(f"{self._prefix}/{self._rank}", text)

    def _posted(self) -> list[str | None]:
        keys = [f"{self._prefix}/{rank}" for rank in range(len(self._names.ranks))]
        with store_errors():
            return [
                self._store.get(key).decode() if self._store.check([key]) else None for key in keys
            ]

    def _others(self) -> dict[int, tuple[str, int, int, str]]:
        """What each rank has noted last: what it does, the step, its calls, and why it failed."""
        noted: dict[int, tuple[str, int, int, str]] = {}
        for rank, text in enumerate(self._posted()):
            if text is not None and rank != self._rank:
                what, step, calls, *why = text.split(maxsplit=3)
                noted[rank] = what, int(step), int(calls), " ".join(why)
        return noted

    def _forgotten(
        self, rank: int, step: int, calls: int, other: int, theirs: int
    ) -> TransferError:
        return TransferError(
            f"{self._names.describe([rank])} began step {step} after {calls} calls of "
            f"attachment.calibrate(...), {self._names.describe([other])} has made {theirs}: "
            "every rank has to call it before each step until it returns a calibration",
            rank=self._names.rank_of(rank),
            step=step,
        )
