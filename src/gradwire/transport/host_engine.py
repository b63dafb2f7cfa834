"""HostEngine: carries transfers over the host's network stack, by Gloo, where an engine has failed.

It sums exactly, in the order of ranks, and multiplies the sum as the engine does, so that an exact
transfer has the same bits over either. Statistics are folded in the order of ranks, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.errors import Cause, GradwireError, TransferError
from gradwire.core.plan import TransferPlan
from gradwire.core.transfer_report import TransferReport
from gradwire.transport.native import load_engine, native_plan, trivial_report
from gradwire.transport.threads import StartQueue, apart
from gradwire.transport.transfer import Engine, Handle, TransferRequest

STATS = 8
"""How many statistics a transfer has; the first half is summed, the others are maximised."""

Flat = NDArray[np.float32]


class Mail(Protocol):
    """How the ranks of a group give each other what they sum; each call is collective."""

    def tell(self, own: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Returns the numbers of all ranks, of which each gives as many."""

    def deal(self, values: Flat, shares: Sequence[int], rank: int) -> Flat:
        """Returns all ranks' values of this rank's share, of shape [ranks, share]."""

    def gather(self, own: Flat, shares: Sequence[int], into: Flat) -> None:
        """Writes the shares of all ranks, one behind the other."""

    def close(self) -> None:
        """Ends the connections."""


class GlooMail(Mail):
    """Mail over a group of Gloo.

    Args:
        group: A ProcessGroupGloo of torch, for this alone.
    """

    def __init__(self, group: Any, ranks: int) -> None:
        self._group = group
        self._ranks = ranks

    def tell(self, own: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        told = [torch.empty(own.size, dtype=torch.int64) for _ in range(self._ranks)]
        self._group.allgather([told], [torch.from_numpy(own)]).wait()
        return [each.numpy() for each in told]

    def deal(self, values: Flat, shares: Sequence[int], rank: int) -> Flat:
        came = torch.empty(self._ranks * shares[rank])
        self._exchange(came, torch.from_numpy(values), [shares[rank]] * self._ranks, shares)
        dealt: Flat = came.view(self._ranks, shares[rank]).numpy()
        return dealt

    def gather(self, own: Flat, shares: Sequence[int], into: Flat) -> None:
        sent = torch.from_numpy(own).repeat(self._ranks)
        self._exchange(torch.from_numpy(into), sent, shares, [own.size] * self._ranks)

    def _exchange(
        self, to: torch.Tensor, sent: torch.Tensor, came: Sequence[int], goes: Sequence[int]
    ) -> None:
        self._group.alltoall_base(to, sent, list(came), list(goes)).wait()

    def close(self) -> None:
        self._group = None  # which ends its threads and connections


class HostEngine(Engine):
    """Carries out the transfers of one communicator over the mail of its ranks.

    They are carried out in the order in which they start, which is the same on all ranks.

    Args:
        ranks: The ranks in the job, for errors.
        datagram: The size of datagrams for which plans cut their chunks.
        aggregators: The number of aggregators for which plans do so.
    """

    def __init__(
        self, mail: Mail, rank: int, ranks: Sequence[int], datagram: int, aggregators: int
    ) -> None:
        self.session = 0
        self.datagram = datagram
        self.start_queue = StartQueue(f"gradwire-stage-host-{rank}")
        self.numbers: dict[int, str] = {}
        self._mail = mail
        self._rank = rank
        self._ranks = ranks
        self._aggregators = aggregators
        self._work = StartQueue(f"gradwire-host-{rank}")
        self._failure: TransferError | None = None

    def start(self, request: TransferRequest) -> Handle:
        handle = Handle(request.plan, request.data)
        try:
            self._work.submit(lambda: self._carry_out(request, handle))
        except RuntimeError as error:
            raise self._error(str(error), request.step, "engine") from error
        return handle

    def _carry_out(self, request: TransferRequest, handle: Handle) -> None:
        outcome: TransferReport | TransferError
        try:
            if self._failure is not None:
                raise self._error(str(self._failure), request.step, self._failure.cause)
            outcome = self.carried(request)
        except TransferError as error:
            self._failure = outcome = error
        except Exception as error:
            self._failure = outcome = self._error(f"{error}", request.step, "engine")
        apart(lambda: handle.finish(outcome))  # a callback may wait for a later transfer

    def carried(self, request: TransferRequest) -> TransferReport:
        """Carries out a transfer, which waits for all ranks.

        Raises:
            TransferError: The ranks have different plans.
            Exception: The mail failed.
        """
        plan = request.plan
        if request.data.dtype != np.float32:
            raise GradwireError("over the host's network gradients travel as float32")
        stats = np.zeros(STATS)
        stats[: len(request.stats)] = request.stats
        own = np.concatenate([np.array([_digest(plan)]), stats.view(np.int64)])
        told = self._mail.tell(own)
        self._compare([int(each[0]) for each in told], request.step)
        shares = plan.shards or _even(plan.elements, len(self._ranks))
        dealt = self._mail.deal(request.data, shares, self._rank)
        total = dealt[0].copy()
        for other in dealt[1:]:
            total += other
        if plan.scale != 1.0:
            total *= np.float32(plan.scale)
        if plan.pull == "none":
            start = sum(shares[: self._rank])
            request.data[start : start + total.size] = total
        else:
            self._mail.gather(total, shares, request.data)
        folded = np.stack([each[1:].view(np.float64) for each in told])
        half = STATS // 2
        sums = [sum(column) for column in folded[:, :half].T.tolist()]
        whole = np.ones(self._chunks(plan), np.uint8)
        report = trivial_report(
            plan, plan.elements, request.step, (*sums, *folded[:, half:].max(axis=0).tolist())
        )
        return replace(
            report, counted=whole, applied=whole, effective_bounds=request.effective_bounds
        )

    def _chunks(self, plan: TransferPlan) -> int:
        grid = load_engine().chunk_grid(native_plan(plan), self.datagram, self._aggregators)
        return len(grid[0])

    def _compare(self, digests: Sequence[int], step: int) -> None:
        odd = [r for r, each in zip(self._ranks, digests, strict=True) if each != digests[0]]
        if odd:
            raise TransferError(
                f"step {step}: rank {odd[0]} has another plan than rank {self._ranks[0]}: all ranks"
                " must run the same backward passes",
                rank=odd[0],
                step=step,
                cause="plan",
            )

    def _error(self, text: str, step: int, cause: Cause) -> TransferError:
        return TransferError(
            f"rank {self._ranks[self._rank]}, step {step}: over the host's network, after the "
            f"engine had failed: {text}",
            step=step,
            cause=cause,
        )

    def counters(self) -> dict[str, float]:
        """Returns nothing: no engine counts what Gloo sends."""
        return {}

    def record(self, entries: int) -> list[list[tuple[int, str, int | None, int]]]:
        """Returns nothing: no engine has a timeline."""
        return []

    def set_drop(self, rate: float, burst: float, seed: int) -> None:
        """Does nothing: the kernel repeats what is lost."""

    def fail(self, why: str) -> None:
        """Ends the connections, which fails what the others wait for; what runs is not ended."""
        self._failure = self._failure or self._error(why, -1, "engine")
        self._work.submit(self._mail.close)

    def forget(self) -> None:
        """Ends the connections once what has begun is over."""
        self.leave()

    def leave(self) -> None:
        """Ends the connections once what has begun is over."""
        self._work.submit(self._mail.close)
        self._work.stop()
        self.start_queue.stop()


def _digest(plan: TransferPlan) -> int:
    """Returns a number that stands for what ranks have to agree on; the seed names the bucket."""
    text = f"{plan.elements} {plan.scale} {plan.seed} {plan.shards} {plan.pull == 'none'}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _even(elements: int, ranks: int) -> list[int]:
    each, more = divmod(elements, ranks)
    return [each + (rank < more) for rank in range(ranks)]
