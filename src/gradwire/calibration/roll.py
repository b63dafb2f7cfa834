"""CalibrationRoll: who has called `attachment.calibrate` before a step, and who has forgotten to.

A round of the calibration ends with an exact sum over all workers. A rank that forgot a call never
starts it, and may then wait in a collective of the process group itself (DDP's own, in the forward
pass), where nothing of gradwire runs: the others would find out by their time-outs. So every rank
notes in the job's store that it waits at the end of a round, and, when the forward pass of a step
begins, how often it has called. Whoever began a step with fewer calls than another waits for in the
same step has forgotten one. And a call that fails says so: the others do not wait for it.

Ranks that wait look at a few keys that all share, however many ranks there are:

  arrived   how often a rank has come to the end of a round, of all ranks together
  waits     who waits at the end of a round: step, rank, calls. Any of those that wait will do
  began     who began a step last: step, rank, calls. While a rank waits in a step, nobody begins
            that step but who has forgotten a call, and nobody a later one, which needs all
  failed    whose call failed: step, rank, and why
  calls/r   how often rank r had called when it last came to the end of a round; read at a time-out
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from gradwire.core.errors import TransferError
from gradwire.transport.rendezvous import Names, Store, store_errors

__all__ = ["CalibrationRoll"]

POLL_S = 0.01


class CalibrationRoll:
    """One rank's part. store: of the job. prefix: of the keys; no other roll's, and the same on
    every rank. rank: among the workers, whom names names. timeout_s: of a wait. failure: why the
    engine has failed, "" while it has not: a rank that died says nothing."""

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
        self._rank = rank
        self._names = names
        self._workers = len(names.ranks)
        self._timeout_s = timeout_s
        self._failure = failure
        self._closed = False
        self._begun = -1  # the last step noted
        self._rounds = 0  # that this rank has come to the end of
        self._failed = False  # its last call, as it has noted

    def begin(self, step: int, calls: int) -> None:
        """Notes that this rank's step begins, after so many calls.

        Raises TransferError when another rank waits for a call that was forgotten here.
        """
        if step == self._begun:
            return
        self._begun = step
        self._recover()
        self._note("began", [step, self._rank, calls])
        at, rank, theirs = self._noted("waits") or (-1, 0, 0)
        if at == step and theirs > calls:
            raise self._forgotten(self._rank, step, calls, rank, theirs)

    def wait(self, step: int, calls: int) -> None:
        """Waits until all ranks have called so often before this step.

        Raises TransferError naming a rank that began the step with fewer calls, whose call failed,
        that died, or that has not come within the time-out.
        """
        self._rounds += 1
        self._recover()
        self._note(f"calls/{self._rank}", calls)
        self._note("waits", [step, self._rank, calls])
        everybody = self._rounds * self._workers
        arrived = self._arrived(1)
        deadline = time.monotonic() + self._timeout_s
        while arrived < everybody:
            self._check(step, calls)
            if why := self._failure():
                raise TransferError(
                    f"{self._names.describe([self._rank])}, step {step}: {why}", step=step
                )
            if time.monotonic() >= deadline:
                self._check_absent(step, calls)
            time.sleep(POLL_S)
            arrived = self._arrived(0)

    def fail(self, step: int, calls: int, why: str) -> None:
        """Notes that this rank's call failed, if the store can still be told."""
        with contextlib.suppress(Exception):  # the cause is the other error
            self._failed = True
            self._note("failed", [step, self._rank, why])

    def close(self) -> None:
        """Removes the keys once every rank has come here, which all do after the last round.

        Idempotent. A store that is gone is no error.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            self._store.delete_key(f"{self._prefix}/calls/{self._rank}")
            if self._store.add(f"{self._prefix}/closed", 1) == self._workers:
                for what in ("arrived", "waits", "began", "failed", "closed"):
                    self._store.delete_key(f"{self._prefix}/{what}")

    def _recover(self) -> None:
        """A call that failed was made again, or is not waited for any more."""
        if self._failed:
            self._failed = False
            self._note("failed", None)

    def _check(self, step: int, calls: int) -> None:
        """Raises TransferError for a rank whose call failed, or that forgot one."""
        if (failed := self._noted("failed")) is not None:
            at, rank, why = failed
            raise TransferError(
                f"{self._names.describe([rank])} failed in attachment.calibrate(...) before step "
                f"{at}: {why}",
                rank=self._names.rank_of(rank),
                step=step,
            )
        at, rank, theirs = self._noted("began") or (-1, 0, 0)
        if at == step and theirs < calls:
            raise self._forgotten(rank, step, theirs, self._rank, calls)

    def _check_absent(self, step: int, calls: int) -> None:
        """Raises TransferError naming the ranks that have not come, if there are any."""
        came = [self._noted(f"calls/{rank}") or 0 for rank in range(self._workers)]
        missing = [rank for rank, theirs in enumerate(came) if theirs < calls]
        if missing:
            raise TransferError(
                f"{self._names.describe([self._rank])}, step {step}: "
                f"{self._names.describe(missing)} has not called attachment.calibrate(...) within "
                f"{self._timeout_s:g} s: every rank has to call it before each step until it "
                "returns a calibration",
                rank=self._names.rank_of(missing[0]),
                step=step,
            )

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

    def _note(self, what: str, value: object) -> None:
        with store_errors():
            self._store.set(f"{self._prefix}/{what}", json.dumps(value))

    def _noted(self, what: str) -> Any:
        """What was last noted; None where nothing was."""
        key = f"{self._prefix}/{what}"
        with store_errors():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _arrived(self, more: int) -> int:
        """How often a rank has come to the end of a round, with so many more."""
        with store_errors():
            return self._store.add(f"{self._prefix}/arrived", more)
