"""Leader: the lowest rank of a host sums the gradients of its ranks, and sends the sum."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradwire.core.agreed import Ballot, Summary
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
    Working,
)
from gradwire.training.hosts.rows import Rows, has_shard
from gradwire.training.hosts.seat import Seat
from gradwire.training.hosts.sharing import Handed, SharingPipeline
from gradwire.training.step import Step
from gradwire.transport import engines


class Leader(SharingPipeline):
    """The pipeline of a rank that leads its host."""

    def __init__(self, seat: Seat, *args: Any, **options: Any) -> None:
        self._ready_rows: dict[int, dict[int, RowReady]] = {}  # by bucket and place
        self._summed: dict[int, set[int]] = {}  # by bucket: places
        self._theirs: list[Ballot] = []  # of the followers, in this step
        self._end: End | None = None
        # Whoever has a result may leave, so a failure is sent after the results that are there.
        self._answering = threading.Lock()
        super().__init__(seat, *args, **options)
        _leaders.add(self)

    @property
    def _followers(self) -> list[int]:
        return list(range(1, len(self._seat.ranks)))

    # ------------------------------------------------------------------ a bucket's way

    def _raise_up(self, handed: Handed) -> None:
        rows = handed.rows = self._rows(handed.position, handed.elements)
        total = np.zeros(0, np.float32)
        if rows is not None:
            self._forget_rows(handed)
            np.copyto(rows.of(0), handed.stage.host())
            total = rows.total
        self._gather(handed)
        self._link.send(Sum(handed.number))
        if rows is not None:
            rows.add(0, self._seat.share)
        self._gather_shards(handed)
        done = self.reduce_among_workers(
            replace(handed.bucket, values=torch.from_numpy(total)),
            joined=handed.joined,
            others=self._theirs,
        )
        done.add_done_callback(lambda result: self._answer(handed, result))

    def _gather(self, handed: Handed) -> None:
        def missing() -> set[int]:
            return set(self._followers) - set(self._ready_rows.get(handed.number, {}))

        with self._changed:
            self._wait_for(handed, missing, "no gradient of {} came")
            there = self._ready_rows.pop(handed.number, {})
        where, own = f"step {self.step}, bucket {handed.bucket.index}", self._seat.rank
        for place, message in sorted(there.items()):
            other = self._seat.ranks[place]
            if (message.ballot is None) == (handed.position == 0):
                raise TransferError(
                    f"{where}: rank {other} hands over another bucket than rank {own}, which leads "
                    "its host: all ranks must run the same backward passes",
                    rank=other,
                    step=self.step,
                    cause="plan",
                )
            if message.elements != handed.elements:
                raise TransferError(
                    f"{where}: rank {other} has {message.elements} elements in it, and rank {own} "
                    f"{handed.elements}: the models of all ranks must be the same",
                    rank=other,
                    step=self.step,
                    cause="plan",
                )
        if handed.position == 0:
            given = [there[place].ballot for place in sorted(there)]
            self._theirs = [each for each in given if each is not None]

    def _disorder(self, ranks: Collection[int]) -> str:
        found = [text for other in list(_leaders) for text in other.handed_elsewhere(ranks)]
        return engines.disorder(self._module, found)

    def handed_elsewhere(self, ranks: Collection[int]) -> list[str]:
        """Returns which of some ranks have handed over a bucket that this one has not begun."""
        there = list(self._ready_rows.items()) if self._stopped is None else []
        places = {place for number, rows in there if number >= self._next_number for place in rows}
        known = sorted(self._seat.ranks[place] for place in places)
        return [f"rank {rank} in {self._module}" for rank in known if rank in ranks]

    def _gather_shards(self, handed: Handed) -> None:
        ranks = len(self._seat.ranks)
        helpers = {p for p in self._followers if has_shard(handed.elements, ranks, p)}

        def missing() -> set[int]:
            return helpers - self._summed.get(handed.number, set())

        with self._changed:
            self._wait_for(handed, missing, "{} summed no shard")
            self._summed.pop(handed.number, None)

    def _answer(self, handed: Handed, result: torch.futures.Future[torch.Tensor]) -> None:
        """Hands the result to all ranks of the host; on a thread of the engine's."""
        try:
            result.value()
        except Exception as error:
            self._stop(self.failures.first or error)
            return
        with self._answering:
            if not self._completes(handed):
                return
            end, self._end = self._end, None  # of the bucket that was held back until the end
            self._link.send(Result(handed.number, end))
        self._hand_back(handed)

    def _prolong(self) -> None:
        self._link.send(Working())

    def _conclude(self, step: Step, agreed: Summary) -> None:
        super()._conclude(step, agreed)
        assert self._last is not None
        self._end = End(
            self._last,
            skipped=step.action == "skipped",
            owners=step.owners,
            overflowed=step.overflowed,
            flushes=step.flushes,
            kept=self._decisive_state(),
        )

    # ------------------------------------------------------------------ memory and messages

    def _rows(self, position: int, elements: int) -> Rows | None:
        """Returns the memory of a bucket; makes it, and hands it to all followers, if need be."""
        if not elements:
            return None
        with self._changed:
            known = self._memory.get((position, elements))
            if known is None:
                memory = Rows.make(len(self._seat.ranks), elements)
                try:
                    known = Rows(memory, len(self._seat.ranks), elements)
                    self._link.send(Memory(position, elements), memory=memory)
                finally:
                    os.close(memory)
                self._memory[position, elements] = known
            return known

    def _handle(self, place: int, message: Any, memory: int | None) -> None:
        match message:
            case MemoryRequest(position, elements):
                self._rows(position, elements)
            case RowReady(bucket):
                with self._changed:
                    self._ready_rows.setdefault(bucket, {})[place] = message
                    self._changed.notify_all()
            case Summed(bucket):
                with self._changed:
                    self._summed.setdefault(bucket, set()).add(place)
                    self._changed.notify_all()
            case Failed():
                self._stop(message.error)

    def _tell_hosts(self, cause: BaseException) -> None:
        self.communicator.fail(str(cause) or type(cause).__name__)

    def _send_failure(self, failure: Failed) -> None:
        with self._answering:
            super()._send_failure(failure)


_leaders: weakref.WeakSet[Leader] = weakref.WeakSet()
"""All of this process, which wait for each other where ranks step modules in another order."""
