"""A trainee is one contestant in one rank: a model that learns over one transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)

import gradwire
from gradwire_lab.contest.fingerprint import fingerprint
from gradwire_lab.network.clock import sleep_until
from gradwire_lab.training.model import CharacterModel, Shape
from gradwire_lab.training.recipe import Entry, Recipe
from gradwire_lab.training.startline import StartLine
from gradwire_lab.training.stopwatch import TimedDDP
from gradwire_lab.training.text import SYMBOLS, Text

LINE_SECONDS = 60.0

TORCH_HOOKS: dict[str, Callable[..., Any]] = {"none": allreduce_hook, "fp16": fp16_compress_hook}
"""The hooks of torch's that need nothing but a process group, by their names in scenarios."""

_HOOK_SHARES = {"none": 1.0, "fp16": 0.5}
"""Share of float32's bytes that these hooks send."""


@dataclass(frozen=True)
class RankStep:
    """A rank step is one step as one rank saw it; moments are of ``time.monotonic()``.

    Attributes:
        step: its number, from 0.
        began: when the rank began to compute.
        ready: when its gradients were there.
        start: when all ranks had theirs.
        end: when the averaged gradients were there.
        ended: when the weights had moved.
        loss: the loss of the rank's samples, in nats per character.
        delivered: the share of the rank's gradients that counted.
        critical: whether the step was in a critical phase; None where there are no phases.
        bytes: the bytes that the rank's engine sent; None for TCP.
        packets: likewise.
        retransmissions: packets that it sent again; None for TCP.
        push_s: seconds until its gradients were summed; None for TCP.
        passes: the passes of a push with probes, 0 of others; None for TCP.
        layers: the delivered shares by region.
        encoded: bytes of the encoded gradients over those of float32; None if it is not known.
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
    layers: dict[str, float]
    encoded: float | None = None


class Trainee:
    """A trainee has a model, its optimizer and its transport; making one is collective.

    Attributes:
        model: the model.
        optimizer: its optimizer.
    """

    def __init__(
        self, entry: Entry, recipe: Recipe, text: Text, rank: int, line: StartLine
    ) -> None:
        """Make the model and connect."""
        self._entry = entry
        self._recipe = recipe
        self._text = text
        self._rank = rank
        torch.manual_seed(recipe.seed)
        shape = Shape(SYMBOLS, recipe.context, recipe.width, recipe.layers, recipe.heads)
        self.model = CharacterModel(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98))
        self._ddp = self._wrap(line)
        self._attachment = self._connect()
        self._step = 0

    def _wrap(self, line: StartLine) -> TimedDDP:
        """Return the model as DDP sees it."""
        return TimedDDP(self.model, line, LINE_SECONDS)

    def _connect(self) -> gradwire.Attachment | None:
        """Give the gradients to what carries them; None for a process group."""
        entry = self._entry
        if entry.policy is None:
            self._ddp.register_comm_hook(*self._hook())
            return None
        return gradwire.attach(
            self._ddp, policy=entry.policy, optimizer=self.optimizer, **entry.options
        )

    def lose(self, rate: float, run: float) -> None:
        """Drop a share of what arrives, in runs of a mean length; a process group loses nothing."""
        if self._attachment is not None:
            self._attachment.communicator.set_drop(rate, run)

    def _hook(self) -> tuple[Any, Callable[..., Any]]:
        """Return the state and the communication hook of a contestant on a process group."""
        return None, TORCH_HOOKS[self._entry.hook]

    def block(self, steps: int, start: float, progress: Callable[[RankStep], None]) -> list[Any]:
        """Train for some steps.

        Args:
            start: when to begin, in seconds of ``time.monotonic()``.

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
        recipe, step = self._recipe, self._step
        began = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        loss = self._ddp(
            *self._text.batch(
                step=step,
                rank=self._rank,
                seed=recipe.seed,
                size=recipe.batch,
                context=recipe.context,
            )
        )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        value = float(loss.detach())
        ended = time.monotonic()
        self._step += 1
        return self._record(step, began, ended, value)

    def _learning_rate(self, step: int) -> float:
        return self._recipe.learning_rate * min(1.0, (step + 1) / self._recipe.rise)

    @property
    def verdict(self) -> str | None:
        """Return the phase detector's verdict on the run so far; None without phases."""
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
            layers={each.name: each.delivered for each in report.regions} if report else {},
            encoded=report.encoded_share if report else _HOOK_SHARES.get(self._entry.hook),
        )

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss of this rank's share of the held-out text."""
        recipe = self._recipe
        samples = self._text.validation(
            rank=self._rank, seed=recipe.seed, size=recipe.validation, context=recipe.context
        )
        return float(self.model(*samples))

    def fingerprint(self) -> str:
        """Return a hash of all weights, which is equal for equal replicas."""
        return fingerprint(self.model)

    def close(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()
