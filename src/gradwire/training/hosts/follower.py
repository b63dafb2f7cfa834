"""Follower: a rank whose gradients go into the sum of its host, which the leader reduces.

It has no engine. Its policy reads the leader's reports, so that its phase is the leader's.
"""

from __future__ import annotations

import os
import queue
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gradwire.core.agreed import Ballot
from gradwire.core.errors import TransferError
from gradwire.training.hosts.messages import (
    End,
    Failed,
    Memory,
    MemoryRequest,
    Result,
    RowReady,
    Sum,
    Summed,
)
from gradwire.training.hosts.rows import Rows, has_shard
from gradwire.training.hosts.seat import Seat
from gradwire.training.hosts.sharing import Handed, SharingPipeline
from gradwire.transport.host_link import LOOK_S
from gradwire.transport.threads import CompletionPool

Work = Callable[[], None]

UNANSWERED = "no answer of {}, which leads this host, came"

GRACE_S = 1.0
"""Seconds beyond the time-out that a follower waits, so that the leader's own error comes first."""


class Follower(SharingPipeline):
    """The pipeline of a rank that follows the leader of its host."""

    def __init__(self, seat: Seat, *args: Any, **options: Any) -> None:
        self._results: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._heard = time.monotonic()  # when the last message of the leader came
        super().__init__(seat, *args, **options)
        # A callback of DDP's future may wait for another result, so each may need its own thread.
        self._pool = CompletionPool(
            _poll_of(self), _do, f"gradwire-down-{seat.rank}", _broken_of(self)
        )

    def close(self) -> None:
        super().close()
        self._pool.stop(0.0)

    # ------------------------------------------------------------------ a bucket's way

    def _own_ballot(self, joined: bool) -> Ballot:
        self._take_scale(joined=joined)
        return self._ballots.cast(self._step, None, 0.0, None if joined else self._grad_scale)

    def _raise_up(self, handed: Handed) -> None:
        self._let_optimizers_step(handed.bucket.parameters)
        if handed.elements:
            handed.rows = self._rows(handed)
            self._forget_rows(handed)
            np.copyto(handed.rows.of(self._seat.place), handed.stage.host())
        handed.since = time.monotonic()
        self._link.send(RowReady(handed.number, handed.elements, handed.ballot))

    def _rows(self, handed: Handed) -> Rows:
        key = handed.position, handed.elements
        with self._changed:
            known = self._memory.get(key)
        if known is None:
            self._link.send(MemoryRequest(*key))
        with self._changed:
            self._wait_for(handed, lambda: () if key in self._memory else (0,), UNANSWERED)
            return self._memory[key]

    def _handle(self, place: int, message: Any, memory: int | None) -> None:
        self._heard = time.monotonic()
        match message:
            case Memory(position, elements):
                if memory is None:  # the kernel drops a descriptor for which there is no room
                    raise TransferError(
                        f"rank {self._seat.rank}, step {self.step}: the memory of bucket "
                        f"{position} came without its file descriptor: this process has none left "
                        "(ulimit -n); raise the limit",
                        rank=self._seat.rank,
                        step=self.step,
                    )
                try:
                    rows = Rows(memory, len(self._seat.ranks), elements)
                finally:
                    os.close(memory)
                with self._changed:
                    self._memory[position, elements] = rows
                    self._changed.notify_all()
            case Sum(bucket):
                handed = self._open.get(bucket)
                if handed is None:
                    return
                shared = handed.rows  # none is left where this rank has failed meanwhile
                helps = has_shard(handed.elements, len(self._seat.ranks), self._seat.place)
                if helps and shared is not None:
                    shared.add(self._seat.place, self._seat.share)
                    self._link.send(Summed(bucket))
            case Result(bucket, end):
                handed = self._open.get(bucket)
                if handed is not None and self._completes(handed):  # no later failure concerns it
                    self._results.put(lambda: self._end_bucket(handed, end))
            case Failed():
                self._stop(message.error)

    def _end_bucket(self, handed: Handed, end: End | None) -> None:
        try:
            if end is not None:
                self._end_step(end)
        except Exception as error:
            handed.stage.error = error
            self._stop(error)
        self._hand_back(handed)

    def _end_step(self, end: End) -> None:
        report = replace(end.report, rank=self._seat.rank)
        self.policy.observe(report)
        if self._loss_watch is not None:
            self._loss_watch.observe(report.agreed)
        self._last, self._step = report, report.step + 1
        self._keep_decisive(end.kept)
        if end.skipped:
            for handed in self._step_buckets:
                self._keep_from_optimizers(handed.bucket.parameters)

        self._note_flush(report.agreed, None, flushed=end.flushes)
        for owner in end.owners:
            self._skips.wait(owner, (), self._grad_scale, flushes=end.flushes)
        for owner in end.overflowed:
            self._undo(self._skips.overflowed(owner))
        if self._writer is not None:
            self._writer.write(report)

    def watch(self) -> None:
        """Stops the host where a bucket waits, and the leader is stopped or late to answer."""
        with self._changed:
            waiting = list(self._open.values())
            try:
                if waiting:
                    self._check_stopped(waiting[0], (0,))
                since = time.monotonic() - self.communicator.timeout_s - GRACE_S
                late = [each for each in waiting if each.since < since]
                if late and self._heard < since:
                    raise self._late(late[0], (0,), UNANSWERED)
            except TransferError as found:
                error = found
            else:
                return
        self._stop(error)


def _do(work: Work) -> None:
    work()


def _broken_of(follower: Follower) -> Callable[[Exception], None]:
    """Returns what stops the follower where results cannot be handed back, if it still lives."""
    held = weakref.ref(follower)

    def broken(error: Exception) -> None:
        here = held()
        if here is not None:
            here._stop(error)

    return broken


def _poll_of(follower: Follower) -> Callable[[], Work | None]:
    """Returns what waits for the next result; it keeps no follower from being collected."""
    results, held = follower._results, weakref.ref(follower)

    def poll() -> Work | None:
        try:
            return results.get(timeout=LOOK_S)
        except queue.Empty:
            here = held()
            if here is None:
                raise ReferenceError("the attachment is garbage") from None
            here.watch()
            return None

    return poll
