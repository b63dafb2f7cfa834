"""SharingPipeline: what the leader of a host and its followers have in common.

DDP hands buckets over on the autograd thread. A thread of the attachment then adds them to the sums
of the host, one after another, in DDP's order, which is the same on all ranks.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradwire.core.agreed import Ballot
from gradwire.core.errors import ConfigError, GradwireError, TransferError
from gradwire.core.names import ranks_as_text
from gradwire.training.bucket import Bucket
from gradwire.training.hosts.messages import Failed
from gradwire.training.hosts.rows import Rows
from gradwire.training.hosts.seat import Seat
from gradwire.training.pipeline import GradientPipeline
from gradwire.training.staging import Stage, StagePool
from gradwire.transport import engines
from gradwire.transport.host_link import LOOK_S
from gradwire.transport.threads import StartQueue

log = logging.getLogger("gradwire")


@dataclass(eq=False)
class Handed:
    """A bucket that DDP has handed over.

    Attributes:
        number: Its number, counted since the ranks met.
        position: How many buckets of the step came before it.
        joined: Whether this rank has joined (`DistributedDataParallel.join`).
        ballot: With a step's first bucket, a follower's ballot; else None.
        rows: Its shared memory; None while it has none.
        since: When this rank began to wait for others, in seconds of the monotonic clock.
    """

    number: int
    position: int
    bucket: Bucket
    stage: Stage
    joined: bool
    ballot: Ballot | None = None
    rows: Rows | None = None
    since: float = field(default_factory=time.monotonic)

    @property
    def elements(self) -> int:
        return self.bucket.values.numel()


class SharingPipeline(GradientPipeline):
    """Carries the buckets of one DDP module on a host whose ranks sum among themselves.

    Args:
        shares_memory: Whether DDP's futures may have the shared memory as their values, which is
            safe where nobody but DDP reads them.
    """

    def __init__(
        self, seat: Seat, *args: Any, shares_memory: bool, module: str, **options: Any
    ) -> None:
        super().__init__(*args, **{**options, "host": seat.host})
        self._seat = seat
        self._module = f"{module}, number {self.number}"
        self._link = seat.link
        self._shares_memory = shares_memory
        self._up = StartQueue(f"gradwire-up-{seat.rank}")
        self._own_stages = StagePool()
        self._changed = threading.Condition()
        self._stopped: Exception | None = None
        self._memory: dict[tuple[int, int], Rows] = {}  # by position and elements
        self._used: dict[int, Handed] = {}  # the last bucket at each position
        self._open: dict[int, Handed] = {}  # without a result, by number
        self._step_buckets: list[Handed] = []
        self._next_number = 0
        self._let_go = weakref.finalize(self, _let_go, self._link, self._up)
        self._let_go.atexit = False
        self._link.listen(self._take, self._gone)

    # ------------------------------------------------------------------ as DDP calls it

    def reduce(
        self,
        bucket: Bucket,
        *,
        joined: bool = False,
        others: Sequence[Ballot] = (),
        at_once: int | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        stopped = self.failures.stopped()
        if stopped is not None:
            return self._refuse(bucket, stopped)
        try:
            handed = self._hand(bucket, joined)
            self._up.submit(lambda: self._go_up(handed))
        except GradwireError as error:
            self._stop(error)
            return self._refuse(bucket, error)
        except BaseException as error:
            self._stop(error)
            self._tell_hosts(error)
            raise
        return handed.stage.future()

    def reduce_among_workers(
        self, bucket: Bucket, *, joined: bool, others: Sequence[Ballot]
    ) -> torch.futures.Future[torch.Tensor]:
        return super().reduce(bucket, joined=joined, others=others)

    def wait(self, *, but: int = 0) -> None:
        try:
            for handed in self._step_buckets[: max(0, len(self._step_buckets) - but)]:
                handed.stage.delivered.wait()
        except BaseException as error:
            self._stop(error)
            raise

    def close(self) -> None:
        if self._let_go.detach() is None:
            return
        detached = TransferError("the attachment is detached", cause="closed")
        self._stop(detached, notify=False)  # the connection's end shows it to the others
        super().close()
        _let_go(self._link, self._up)

    def _hand(self, bucket: Bucket, joined: bool) -> Handed:
        if bucket.index == 0:
            self._step_buckets = []
        position = len(self._step_buckets)
        stage = self._own_stages.stage(position, bucket.values)
        handed = Handed(self._next_number, position, bucket, stage, joined)
        if position == 0:
            handed.ballot = self._own_ballot(joined)
        self._next_number += 1
        with self._changed:
            if self._stopped is not None:
                raise self._stopped
            self._open[handed.number] = handed
        self._step_buckets.append(handed)
        return handed

    def _own_ballot(self, joined: bool) -> Ballot | None:
        """Returns this rank's ballot of the step that begins; None where it leads."""
        return None

    # ------------------------------------------------------------------ a bucket's way

    def _go_up(self, handed: Handed) -> None:
        try:
            previous = self._used.get(handed.position)
            if previous is not None:  # of a step that a failed backward pass gave up
                previous.stage.delivered.wait(self.communicator.timeout_s)
            self._used[handed.position] = handed
            self._raise_up(handed)
        except Exception as error:
            self._stop(error)

    @abstractmethod
    def _raise_up(self, handed: Handed) -> None:
        """Adds this rank's gradient to the host's sum."""

    def _completes(self, handed: Handed) -> bool:
        """Notes that a bucket has a result; returns False if it has failed meanwhile."""
        with self._changed:
            return self._open.pop(handed.number, None) is not None

    def _hand_back(self, handed: Handed) -> None:
        """Completes DDP's future with the result.

        The result stays in the shared memory until all ranks have a gradient of the next step
        there, so DDP can copy it from there. Whatever composes the hook with code of its own may
        write to the future's value or read the bucket, so its bucket gets the result.
        """
        try:
            if handed.rows is not None and self._shares_memory:
                handed.stage.take(handed.rows.total)
            elif handed.rows is not None:
                np.copyto(handed.stage.host(), handed.rows.total)
        except Exception as error:
            handed.stage.error = error
        handed.rows = None
        handed.stage.deliver()

    def _wait_for(self, handed: Handed, missing: Callable[[], Collection[int]], what: str) -> None:
        """Waits until no place of the host is missing; the caller holds `_changed`.

        Args:
            missing: Returns the places from which something is still to come.
            what: What is to come, as text with "{}" for the ranks from which it is.
        """
        begun = time.monotonic()
        deadline, warn_at = begun + self.communicator.timeout_s, begun + engines.FIRST_WARNING_S
        while not self._changed.wait_for(
            lambda: not missing() or self._stopped is not None,
            max(0.0, min(deadline - time.monotonic(), LOOK_S)),
        ):
            self._check_stopped(handed, missing())
            now = time.monotonic()
            if now >= deadline:
                raise self._late(handed, missing(), what)
            if now < warn_at:
                continue
            warn_at += engines.NEXT_WARNING_S
            log.warning(
                "rank %d, step %d: a bucket has waited for %.0f s (%s); %s",
                self._seat.rank,
                self.step,
                now - begun,
                self.communicator.timeout_text,
                self._absence(missing(), what),
            )
        if self._stopped is not None:
            raise self._stopped

    def _check_stopped(self, handed: Handed, places: Collection[int]) -> None:
        """Raises where one of these places has been stopped for `peer_timeout`.

        Engines tell that of other hosts' ranks; within a host nothing else does. The caller holds
        `_changed`.
        """
        limit_s = self.communicator.settings.peer_timeout
        for place, seconds in self._link.stopped(places).items():
            if seconds >= limit_s:
                raise TransferError(
                    f"rank {self._seat.rank}, step {self.step}, bucket {handed.bucket.index}: "
                    f"{self._at(place)} has been stopped for {seconds:.1f} s, by a signal or a "
                    f"debugger (peer_timeout={limit_s:g} s)",
                    rank=self._seat.ranks[place],
                    step=self.step,
                    cause="silence",
                )

    def _late(self, handed: Handed, places: Collection[int], what: str) -> TransferError:
        return TransferError(
            f"rank {self._seat.rank}, step {self.step}, bucket {handed.bucket.index}: "
            f"{self._absence(places, what)} ({self.communicator.timeout_text})",
            rank=self._seat.ranks[min(places)],
            step=self.step,
            cause="timeout",
        )

    def _absence(self, places: Collection[int], what: str) -> str:
        ranks = [self._seat.ranks[place] for place in sorted(places)]
        return what.format(ranks_as_text(ranks)) + self._disorder(ranks)

    def _disorder(self, ranks: Collection[int]) -> str:
        """Says which of these ranks wait in another module; "" for none, or where none is known."""
        return ""

    def _forget_rows(self, handed: Handed) -> None:
        with self._changed:
            for position, elements in list(self._memory):
                if position == handed.position and elements != handed.elements:
                    del self._memory[position, elements]

    # ------------------------------------------------------------------ failures

    def _take(self, place: int, message: Any, memory: int | None) -> None:
        try:
            self._handle(place, message, memory)
        except Exception as error:
            self._stop(error)

    @abstractmethod
    def _handle(self, place: int, message: Any, memory: int | None) -> None:
        """Does what a message asks for."""

    def _at(self, place: int) -> str:
        leads = ", which leads this host," if place == 0 else " of this host"
        return f"rank {self._seat.ranks[place]}{leads}"

    def _gone(self, place: int) -> None:
        self._stop(
            TransferError(
                f"rank {self._seat.rank}, step {self.step}: {self._at(place)} has ended or "
                "detached the module",
                rank=self._seat.ranks[place],
                step=self.step,
                cause="left",
            )
        )

    def fail(self, error: BaseException) -> None:
        self._stop(error, in_step=True)

    def _stop(self, error: BaseException, *, notify: bool = True, in_step: bool = False) -> None:
        """Stops this pipeline for good; all buckets without a result fail.

        Only the first call does anything.

        Args:
            notify: Whether the other ranks of the host are to stop for the same reason.
            in_step: Whether a step fails by it, also where no bucket is without a result.
        """
        cause = error if isinstance(error, (GradwireError, ConfigError)) else self._unknown(error)
        with self._changed:
            if self._stopped is not None:
                return
            self._stopped = cause
            lost, self._open = list(self._open.values()), {}
            self._changed.notify_all()
        if notify:
            self._send_failure(Failed.of(cause))
        with self._mutex:
            running = self._running
        in_step = in_step or bool(lost)
        self._fail(running, cause, in_step=in_step)
        if notify and in_step:
            self._tell_hosts(cause)
        for handed in lost:
            handed.rows = None
            handed.stage.deliver(error if isinstance(error, Exception) else cause)

    def _refuse(self, bucket: Bucket, stopped: GradwireError) -> torch.futures.Future[torch.Tensor]:
        """Answers a bucket that comes after a failure; the other hosts may wait for its sum."""
        self._tell_hosts(stopped)
        return super()._refuse(bucket, stopped)

    def _tell_hosts(self, cause: BaseException) -> None:
        """Tells the other hosts why this one carries no bucket any more.

        A failure between two steps is told with the next bucket only: ranks detach one after
        another, and other hosts may still take results of the last step.
        """

    def _send_failure(self, failure: Failed) -> None:
        self._link.send(failure)

    def _unknown(self, error: BaseException) -> GradwireError:
        rank = self._seat.rank
        return TransferError(
            f"rank {rank}, step {self.step}: {type(error).__name__}: {error}",
            rank=rank,
            step=self.step,
        )


def _let_go(link: Any, up: StartQueue) -> None:
    link.close()
    up.stop()
