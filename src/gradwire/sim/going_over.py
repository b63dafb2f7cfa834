"""Table: how the ranks of a virtual job agree to go over to their hosts' network, and its mail.

The votes are closed in virtual time, by the fallbacks of the product. The mail is memory that
threads of one process share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.training.fallback import Agreement, Fallback, over_host
from gradwire.transport.communicator import Communicator
from gradwire.transport.host_engine import Flat, Mail

PATIENCE_S = 60.0
"""Seconds that a rank waits for the mail of the others."""


class Table:
    """The votes of all ranks of one job."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._seats: list[tuple[Fallback, Communicator, Callable[[], None]]] = []
        self._votes: dict[int, int] = {}
        self._board = _Board(ranks)

    def seat(self, communicator: Communicator, end: Callable[[], None]) -> Fallback:
        """Makes the fallback of the next rank.

        Args:
            communicator: The rank's communicator.
            end: Ends the rank's engine, as a rank that goes over does.
        """
        fallback = Fallback(communicator)
        fallback.agreement = _Seat(self, len(self._seats))
        self._seats.append((fallback, communicator, end))
        return fallback

    @property
    def votes(self) -> list[int]:
        """How many steps the ranks had committed that have closed their votes."""
        return list(self._votes.values())

    def close(self, rank: int) -> None:
        """Closes a rank's vote; the last one takes all ranks over."""
        if rank in self._votes:
            return
        self._votes[rank] = self._seats[rank][0].close_vote()
        self._seats[rank][2]()
        if len(self._votes) == self._ranks:
            votes = [self._votes[each] for each in range(self._ranks)]
            for each, (fallback, communicator, _) in enumerate(self._seats):
                mail = _Mail(self._board, each)
                fallback.go_over(votes, over_host(communicator, mail))

    def refuse(self, error: BaseException) -> None:
        """Has all ranks fail by an error that one of them met."""
        for fallback, *_ in self._seats:
            fallback.refuse(RuntimeError(str(error)))


class _Seat(Agreement):
    def __init__(self, table: Table, rank: int) -> None:
        self._table = table
        self._rank = rank

    def notice(self) -> None:
        self._table.close(self._rank)

    def give_up(self, error: BaseException) -> None:
        self._table.refuse(error)

    def anew(self) -> Agreement:
        """Returns itself: a virtual engine that has ended stays so."""
        return self

    def close(self) -> None:
        """Does nothing: nobody watches."""


class _Board:
    """What the ranks give each other at one moment."""

    def __init__(self, ranks: int) -> None:
        self._given: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def share(self, rank: int, given: Any, read: Callable[[list[Any]], Any]) -> Any:
        self._given[rank] = given
        self._barrier.wait(PATIENCE_S)
        taken = read(list(self._given))
        self._barrier.wait(PATIENCE_S)
        return taken


class _Mail(Mail):
    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
        self._rank = rank

    def tell(self, own: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        told: list[NDArray[np.int64]] = self._board.share(
            self._rank, own, lambda given: [each.copy() for each in given]
        )
        return told

    def deal(self, values: Flat, shares: Sequence[int], rank: int) -> Flat:
        start = sum(shares[:rank])
        part = slice(start, start + shares[rank])
        dealt: Flat = self._board.share(
            rank, values, lambda given: np.stack([each[part] for each in given])
        )
        return dealt

    def gather(self, own: Flat, shares: Sequence[int], into: Flat) -> None:
        into[:] = self._board.share(self._rank, own, np.concatenate)

    def close(self) -> None:
        """Does nothing: memory needs no connection."""
