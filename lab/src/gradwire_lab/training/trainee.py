"""One contestant in one rank: a model that learns over one kind of transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import gradwire
from gradwire_lab.contest.fingerprint import fingerprint
from gradwire_lab.network.clock import sleep_until
from gradwire_lab.training.model import CharacterModel, Shape
from gradwire_lab.training.scenario import Entry, Scenario
from gradwire_lab.training.startline import StartLine
from gradwire_lab.training.stopwatch import TimedDDP
from gradwire_lab.training.text import SYMBOLS, Text

LINE_SECONDS = 60.0


@dataclass(frozen=True)
class RankStep:
    """One step as one rank saw it; moments are seconds of ``time.monotonic()``.

    Attributes:
        step: its number, from 0.
        began: when the rank began to compute.
        ready: when its gradients were there.
        start: when all ranks had theirs.
        end: when the averaged gradients were there.
        ended: when the weights had moved.
        loss: of the rank's samples, in nats per character.
        delivered: the share of the rank's gradients that counted.
        critical: whether the step was in a critical phase; None where there are no phases.
        bytes: that the rank's engine sent; None for TCP.
        packets: likewise.
        retransmissions: packets that it sent again; None for TCP.
        push_s: seconds until its gradients were summed; None for TCP.
        passes: of a push with probes, 0 of others; None for TCP.
    """

    step: int
    began: float
    ready: float
    start: float
    end: float
    ended: float
    loss: float
    delivered: float
    critical: bool | None
    bytes: int | None
    packets: int | None
    retransmissions: int | None
    push_s: float | None
    passes: int | None


class Trainee:
    """A model, its optimizer and its transport. Making one is collective."""

    def __init__(
        self, entry: Entry, scenario: Scenario, text: Text, rank: int, line: StartLine, lossy: bool
    ) -> None:
        """Make the model and connect.

        Args:
            entry: which contestant.
            scenario: sizes and seeds.
            text: what is learnt.
            rank: of this process.
            line: where the ranks wait for each other.
            lossy: drop some of gradwire's packets on arrival.
        """
        self._scenario = scenario
        self._text = text
        self._rank = rank
        torch.manual_seed(scenario.seed)
        shape = Shape(SYMBOLS, scenario.context, scenario.width, scenario.layers, scenario.heads)
        self.model = CharacterModel(shape)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98))
        self._ddp = self._wrap(line)
        self._attachment = self._connect(entry, lossy)
        self._step = 0

    def _wrap(self, line: StartLine) -> TimedDDP:
        """The model as DDP sees it."""
        return TimedDDP(self.model, line, LINE_SECONDS)

    def _connect(self, entry: Entry, lossy: bool) -> gradwire.Attachment | None:
        """Give the gradients to what carries them; None for a process group."""
        if entry.policy is None:
            self._ddp.register_comm_hook(None, allreduce_hook)
            return None
        scenario = self._scenario
        drops: dict[str, Any] = (
            {"drop_rate": scenario.drop_rate, "drop_burst": scenario.drop_burst} if lossy else {}
        )
        return gradwire.attach(
            self._ddp, policy=entry.policy, optimizer=self._optimizer, **drops, **entry.options
        )

    def block(self, steps: int, start: float, progress: Callable[[RankStep], None]) -> list[Any]:
        """Train for some steps.

        Args:
            steps: how many.
            start: when to begin, in seconds of ``time.monotonic()``.
            progress: called after each step.

        Returns:
            The steps, as JSON.
        """
        sleep_until(start)
        done = []
        for _ in range(steps):
            step = self._train()
            progress(step)
            done.append(asdict(step))
        return done

    def _train(self) -> RankStep:
        scenario, step = self._scenario, self._step
        began = time.monotonic()
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        loss = self._ddp(
            *self._text.batch(
                step=step,
                rank=self._rank,
                seed=scenario.seed,
                size=scenario.batch,
                context=scenario.context,
            )
        )
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), scenario.clip)
        self._optimizer.step()
        value = float(loss.detach())
        ended = time.monotonic()
        self._step += 1
        return self._record(step, began, ended, value)

    def _learning_rate(self, step: int) -> float:
        return self._scenario.learning_rate * min(1.0, (step + 1) / self._scenario.rise)

    @property
    def verdict(self) -> str | None:
        """What the phase detector says of the run so far; None where there are no phases."""
        if self._attachment is None or self._attachment.policy.phases is None:
            return None
        return self._attachment.policy.phases.verdict

    def _record(self, step: int, began: float, ended: float, loss: float) -> RankStep:
        report = None
        if self._attachment is not None:
            self._attachment.loss(loss)
            report = self._attachment.report()
        return RankStep(
            step=step,
            began=began,
            ready=self._ddp.ready,
            start=self._ddp.start,
            end=self._ddp.end,
            ended=ended,
            loss=loss,
            delivered=report.delivered if report else 1.0,
            critical=report.phase == "critical" if report and self.verdict else None,
            bytes=report.bytes if report else None,
            packets=report.packets if report else None,
            retransmissions=report.retransmissions if report else None,
            push_s=report.push_s if report else None,
            passes=report.passes if report else None,
        )

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of this rank's share of the held-out text."""
        scenario = self._scenario
        samples = self._text.validation(
            rank=self._rank, seed=scenario.seed, size=scenario.validation, context=scenario.context
        )
        return float(self.model(*samples))

    def fingerprint(self) -> str:
        """A hash of all weights: equal on all ranks if the replicas are."""
        return fingerprint(self.model)

    def close(self) -> None:
        """Let go of the transport."""
        if self._attachment is not None:
            self._attachment.detach()
