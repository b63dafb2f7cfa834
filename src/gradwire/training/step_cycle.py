"""StepCycle: how a training step begins and ends, the same on all ranks.

When the last bucket of a step is done, the ballots are folded, and the policy reads the report and
decides the next step's phase. All of this comes before DDP sees the last result, so every rank
enters the next step with the same decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.agreed import Ballot, Summary, nonfinite, scales_differ
from gradwire.core.errors import TransferError
from gradwire.core.hashed import HashedTuple
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import TensorSlot
from gradwire.core.report import StepReport, build_report
from gradwire.core.transfer_report import TransferReport
from gradwire.training.guard import nothing_applied, sent_twice
from gradwire.training.optimizers import held_by
from gradwire.training.step import (
    Ending,
    Step,
    Transfer,
    square_norm,
)
from gradwire.training.training_state import TrainingState
from gradwire.transport import transforms
from gradwire.transport.transfer import Handle

UNCHANGED = ("f32", "half", "bf16")
"""Encodings that carry a gradient unchanged; those of two bytes where it is of that type."""


class StepCycle(TrainingState):
    """Begins and ends the steps of one attachment; for the arguments see `TrainingState`."""

    @property
    def holds_back(self) -> bool:
        """Whether results of a step wait for its end, because it may be sent again."""
        return self._guard.floor > 0.0 or self._fallback is not None

    def _begin_step(
        self, slots: HashedTuple[TensorSlot], others: Sequence[Ballot], *, joined: bool
    ) -> Step:
        self._take_scale(others, joined=joined)
        after_rise = self._loss_watch is not None and self._loss_watch.exact
        flushes = self._flush.begin(slots)
        started = self._clock()
        elapsed = 0.0 if self._started is None else started - self._started
        ballot = self._ballots.cast(
            self._step, self._last, elapsed, None if joined else self._grad_scale
        )
        over = self._fallback is not None and self._fallback.over
        return Step(
            self._step,
            self.policy.phase,
            ballot.with_others(others),
            started,
            self.communicator if self._fallback is None else self._fallback.way,
            exact=flushes or after_rise or over,
            returns=self._fallback is not None and not over,
            after_rise=after_rise,
            flushes=flushes,
            floor=0.0 if flushes or after_rise else self._guard.floor,
            scaled=self._scaled,
            compared=self.compared(),
        )

    def _take_scale(self, others: Sequence[Ballot] = (), *, joined: bool) -> None:
        """Takes over the scale of a step that begins, and what optimizers have made of others."""
        self._check_skips()
        theirs = [each.scale for each in others if each.scale is not None]
        if joined and theirs:  # this rank's own scaler takes no steps any more
            self.set_grad_scale(theirs[0])
        elif self._scaler is not None and not joined:
            self.set_grad_scale(self._scaler.get_scale())
        for each in self._skips.settled(self._grad_scale, joined=joined):
            self._books.forget(each.keys)

    def _keep_from_optimizers(self, parameters: Sequence[torch.Tensor]) -> None:
        """Has optimizers skip these parameters until they have another gradient."""
        self._skipped.update((id(each), each) for each in parameters)

    def _let_optimizers_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Notes that parameters get another gradient; a scaler may have kept an optimizer off."""
        for each in parameters if self._skipped else ():
            self._skipped.pop(id(each), None)

    def take_skipped(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Returns, once, an optimizer's parameters whose step, just reduced, it must skip."""
        held = map(id, held_by(optimizer)) if self._skipped else ()
        taken = (self._skipped.pop(each, None) for each in held)
        return [each for each in taken if each is not None]

    def _send(
        self,
        step: Step,
        values: NDArray[np.float32] | torch.Tensor,
        plan: TransferPlan,
        **more: Any,
    ) -> Handle:
        start = step.way.reduce_scatter if plan.shards else step.way.all_reduce
        return start(values, plan, step=step.number, **more)

    def _settle(self, transfer: Transfer) -> None:
        report, plan = transfer.report, transfer.applied_plan
        assert report is not None
        host = transfer.stage.host()
        result = host[transfer.own]
        self._books.settle(transfer, report)
        if plan.transform != "none":
            transforms.inverse(result, plan.seed)
        self._books.note_result(transfer, report, host, self._grad_scale)
        if plan.fill == "momentum":
            self._fill(transfer, plan, report)
        whole = transfer.bucket.scatter is None
        if transfer.step.scaled and whole:
            transfer.step.overflowed |= transfer.overflowed
        phases = self.policy.phases
        if phases is not None and phases.source == "paper":
            transfer.applied_square = square_norm(result) / self._grad_scale**2

    def _fill(self, transfer: Transfer, plan: TransferPlan, report: TransferReport) -> None:
        missing = report.applied == 0
        assert transfer.bucket.scatter is None
        if not missing.any():
            return
        with transfer.stage.behind():  # the optimizer's step came before the gradients
            self._moments.fill(
                transfer.slots,
                transfer.bucket.parameters,
                transfer.stage.host(),
                self.communicator.chunk_grid(plan),
                missing,
                self._grad_scale,
            )

    # ------------------------------------------------------------------ a step's end

    def _step_end(self, step: Step) -> Ending[None]:
        """Ends a step whose buckets are all done; it is resumed with each transfer that it yields.

        Whatever it raises fails the results that the step holds.
        """
        before, agreed = self._consultation.kept, None
        try:
            for transfer in step.transfers:
                if transfer.lost is not None:
                    raise transfer.lost
            agreed = yield from self._decide(step)
            yield from self._commit(step)
        except TransferError as error:
            if not step.returns:
                raise
            agreed = yield from self._fall_back(step, error, before, agreed)
        if step.decision is not None and step.decision.choice == "skip":
            self._skip(step)
        elif step.held_back:
            for transfer in step.transfers:
                self._settle(transfer)
        self._planner.follow_paths(step.transfers)
        self._conclude(step, agreed)

    def _decide(self, step: Step) -> Ending[Summary]:
        """Agrees on what the ballots say and on what becomes of a step, and sends it again so.

        It changes nothing that a step which is sent over the host's network would not change again.
        """
        agreement = self._consultation
        firsts = [transfer.first for transfer in step.transfers if transfer.first is not None]
        if scales_differ(first.stats_max for first in firsts):
            own = (step.ballot.scale, *step.ballot.other_scales)
            scales = dict(zip(self._host.ranks, own, strict=True))
            yield from agreement.refuse_scales(step, scales)
        stats = [(first.stats_sum, first.stats_max) for first in firsts]
        agreed = Summary.fold(step.number, self.communicator.world_size, stats)
        agreement.note(step, self._grad_scale)
        for transfer in step.transfers:
            step.overflowed |= self._scattered_overflow(transfer)
        if step.guarded or agreement.layers_due(agreed):
            agreed, lost = yield from agreement.agree(step, agreed)
        if step.guarded:
            decision = step.decision = self._guard.decide(step, agreed, lost)
            if decision.error is not None:
                raise decision.error
            if decision.choice == "resend":
                yield from self._resend(step)
        return agreed

    def _commit(self, step: Step) -> Ending[None]:
        """Waits until all ranks have all results of a step that may be sent again."""
        if self._fallback is None:
            return
        if not step.returns:
            yield from self._ask_back(step)
            return
        (yield self._consultation.commit(step)).report  # noqa: B018  # raises what failed
        if not self._fallback.commits():
            raise TransferError(
                f"step {step.number}: another rank's engine failed", step=step.number
            )

    def _fall_back(
        self,
        step: Step,
        error: TransferError,
        before: tuple[Mapping[str, float], int],
        agreed: Summary | None,
    ) -> Ending[Summary]:
        """Ends a step whose engine failed: as it stands where another rank has, or sent again.

        Args:
            before: What the consultation had kept before this step.
            agreed: What the ranks agreed on; None where they had not.
        """
        fallback = self._fallback
        assert fallback is not None
        if not fallback.takes(error):
            raise error
        (yield fallback.verdict(error)).report  # noqa: B018  # raises what all ranks fail by
        if fallback.adopts:
            if agreed is None:  # no rank can have committed it
                raise TransferError(f"step {step.number}: it is not whole here", cause="plan")
            return agreed
        self._consultation.undo(before)
        step.way, step.decision = fallback.way, None
        step.overflowed.clear()
        started = []
        for transfer in step.transfers:
            transfer.lost = transfer.resent = None
            started.append((transfer, self._send_kept(transfer, stats=transfer.stats)))
            transfer.plan, transfer.resent = transfer.applied_plan, None
        if step.confirmed:
            (yield self._consultation.confirm_end(step)).report  # noqa: B018
        for transfer, handle in started:
            transfer.first = transfer.report = (yield handle).report
        agreed = yield from self._decide(step)
        yield from self._ask_back(step)
        return agreed

    def _ask_back(self, step: Step) -> Ending[None]:
        """Goes back to an engine once all ranks have a new one, before the next step."""
        assert self._fallback is not None
        ready = self._fallback.fresh is not None
        done = yield self._consultation.ask(step, ready=ready)
        if done.report.stats_max[0] == 0.0:
            self._fallback.go_back(step.number + 1)
            self._planner.follow_agreed()

    def _send_kept(self, transfer: Transfer, **more: Any) -> Handle:
        """Sends again, exactly, what was sent of a bucket."""
        plan = transfer.resent = transfer.plan.exact()
        self._books.restore_pruned(transfer)
        host = transfer.stage.host()
        np.copyto(host, self._books.sent(transfer))
        return self._send(transfer.step, host, plan, **more)

    def _scattered_overflow(self, transfer: Transfer) -> set[int]:
        """Returns the optimizer of a scattered bucket whose result is not finite, as ballots say.

        Where several share the bucket, nobody knows whose gradients are meant, and the scale of the
        next step shows who was kept from a step.
        """
        first, owners = transfer.first, set(transfer.owners)
        if transfer.bucket.scatter is None or first is None or len(owners) != 1:
            return set()
        return owners if nonfinite(first.stats_sum) else set()

    def _resend(self, step: Step) -> Ending[None]:
        started = []
        for transfer in step.transfers:
            started.append((transfer, self._send_kept(transfer)))
        for transfer, handle in started:
            done = yield handle
            assert transfer.first is not None
            transfer.report = sent_twice(transfer.first, done.report)

    def _skip(self, step: Step) -> None:
        """Applies nothing: all that was sent returns to the residuals, and the optimizer skips."""
        for transfer in step.transfers:
            assert transfer.report is not None
            self._keep_from_optimizers(transfer.bucket.parameters)
            transfer.report = nothing_applied(transfer.report)
            transfer.stage.host().fill(0.0)
            self._books.settle(transfer, transfer.report)

    def _conclude(self, step: Step, agreed: Summary) -> None:
        self._note_owing(step)
        self._note_flush(agreed, step.transfers[0].slots, flushed=step.flushes)
        for owner in step.overflowed:
            self._undo(self._skips.overflowed(owner))
        came = [(t.plan, t.report) for t in step.transfers]
        transfers = [(plan, report) for plan, report in came if report is not None]
        self._ballots.applied_square = sum(t.applied_square for t in step.transfers)
        period_s = 0.0 if self._started is None else step.started - self._started
        self._started = step.started
        report = self._report(step, transfers, agreed, period_s)
        self.policy.observe(report)
        if self._loss_watch is not None:
            self._loss_watch.observe(agreed)
        phases = self.policy.phases
        if phases is not None:
            report = report.with_phases(phases.critical_share, phases.verdict)
        self._last = report
        self._ballots.lost(step.lost)
        self._step = step.number + 1
        self._shown.note(report)
        if self._writer is not None:
            self._writer.write(report)
        step.transfers.clear()  # breaks the reference cycle with the step

    def _note_owing(self, step: Step) -> None:
        """Notes of what any rank may owe something after a step, which its plans tell all ranks."""
        skipped = step.action == "skipped"
        for transfer in step.transfers if self.settings.feedback else ():
            plan = transfer.applied_plan
            self._flush.owing.note(
                step.number,
                transfer.slots,
                loses=plan.lossy or plan.encoding not in UNCHANGED or skipped,
                exact=plan.encoding == "f32",
            )

    def _note_flush(
        self, agreed: Summary, first: tuple[TensorSlot, ...] | None, *, flushed: bool
    ) -> None:
        """Takes over whether the next steps are exact because some rank's user asked for it.

        Args:
            first: Its first bucket, where it is known.
            flushed: Whether it was exact itself, because of an earlier call.
        """
        if flushed:
            self._flush.end(agreed.step)
        if agreed.flush:
            self._flush.ask(first)
            self._ballots.flush = False

    def _report(
        self,
        step: Step,
        transfers: list[tuple[TransferPlan, TransferReport]],
        agreed: Summary,
        period_s: float,
    ) -> StepReport:
        now = self._clock()
        return build_report(
            step=step.number,
            rank=self.communicator.job_rank,
            policy=self.policy.name,
            phase=step.phase,
            transfers=transfers,
            comm_s=now - step.started,
            exposed_s=now - step.exposed,
            agreed=agreed,
            critical_share=1.0 if step.phase == "critical" else 0.0,
            verdict="fixed bound",
            guard=step.action,
            period_s=period_s,
            resent=[plan for t in step.transfers if (plan := t.resent) is not None],
            attachment=self.number,
            ranks=self.communicator.ranks,
            slots=[t.slots for t in step.transfers] if self.communicator.engine else (),
        )
