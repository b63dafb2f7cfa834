"""A lab trainee is one contestant in one rank of a training scenario."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradwire.training.bucket import GradBucket
from gradwire_lab.contest.congestion_control import choose_congestion_control, open_sockets
from gradwire_lab.network.clock import sleep_until
from gradwire_lab.run.hooks import hook_of
from gradwire_lab.scenario.contestant import Contestant
from gradwire_lab.scenario.work import THIRDS, Model
from gradwire_lab.training.recipe import Entry, Recipe
from gradwire_lab.training.startline import StartLine
from gradwire_lab.training.stopwatch import TimedDDP
from gradwire_lab.training.text import Text
from gradwire_lab.training.trainee import LINE_SECONDS, RankStep, Trainee

__all__ = ["LabTrainee"]

FORWARD_SHARE = 1 / 3
"""Share of a step's computation that is over before its first gradient is there."""


class Pace:
    """A pace stretches a step's computation to that of an accelerator of a given speed.

    Attributes:
        compute_s: seconds of a step's computation; 0 leaves it as it is.
        began: when the step began.
    """

    def __init__(self) -> None:
        self.compute_s = 0.0
        self.began = 0.0

    def wait(self, share: float) -> None:
        """Wait until this share of the computation is over."""
        if self.compute_s:
            sleep_until(self.began + self.compute_s * share)


class PacedDDP(TimedDDP):
    """This DDP has one bucket, which sets out when the stretched computation is over."""

    def __init__(
        self, module: torch.nn.Module, line: StartLine, pace: Pace, **options: Any
    ) -> None:
        """Wrap a module; see `TimedDDP`."""
        super().__init__(module, line, LINE_SECONDS, **options)
        self._pace = pace

    def _set_out(self, bucket: GradBucket) -> None:
        self._pace.wait(1.0)
        super()._set_out(bucket)


class OverlappingDDP(PacedDDP):
    """This DDP has several buckets, which set out while the backward pass goes on.

    The time runs from the first bucket's start to the last one's result; the ranks do not wait for
    each other before.
    """

    def __init__(
        self, module: torch.nn.Module, line: StartLine, pace: Pace, **options: Any
    ) -> None:
        """Wrap a module; see `TimedDDP`."""
        super().__init__(module, line, pace, **options)
        self._buckets = 1

    def _set_out(self, bucket: GradBucket) -> None:
        index = bucket.index()
        done = min(1.0, (index + 1) / self._buckets)
        self._pace.wait(FORWARD_SHARE + (1 - FORWARD_SHARE) * done)
        if index == 0:
            self.ready = self.start = time.monotonic()
        if bucket.is_last():
            self._buckets = index + 1


class LabTrainee(Trainee):
    """A trainee trains a model over one contestant.

    Attributes:
        pace: the pace of its computation.
    """

    def __init__(
        self,
        contestant: Contestant,
        model: Model,
        recipe: Recipe,
        text: Text,
        rank: int,
        line: StartLine,
        steps: int,
        trials: int = 0,
    ) -> None:
        """Make the model and connect; collective.

        Args:
            model: sizes, and how computation and communication meet.
            trials: steps before them, which find its pace and count as none of its thirds.
        """
        self._steps, self._trials = steps, trials
        self._contestant = contestant
        self._shape = model
        self.pace = Pace()
        policy = contestant.policy if contestant.transport == "gradwire" else None
        name, options = contestant.name, contestant.options
        super().__init__(
            Entry(name, name, policy, options, contestant.hook), recipe, text, rank, line
        )

    def _wrap(self, line: StartLine) -> TimedDDP:
        before = open_sockets()
        # A group of its own gives each contestant its own connections and congestion control.
        self._group = dist.new_group()
        dist.barrier(group=self._group)
        if self._contestant.transport == "gloo":
            wanted = self._contestant.congestion_control
            if not choose_congestion_control(open_sockets() - before, wanted):
                raise RuntimeError(f"congestion control {wanted!r}: Gloo has no connections yet")
        if self._shape.overlap:
            return OverlappingDDP(
                self.model,
                line,
                self.pace,
                process_group=self._group,
                bucket_cap_mb=self._shape.bucket_mb,
            )
        return PacedDDP(self.model, line, self.pace, process_group=self._group)

    def _hook(self) -> tuple[Any, Callable[..., Any]]:
        return hook_of(self._contestant.hook, self._group)

    def _train(self) -> RankStep:
        self.pace.began = time.monotonic()
        wanted = self._contestant.tolerant
        if wanted and self._attachment is not None:
            # A vote decides from the next step on.
            third = THIRDS[self._third(self._step + 1)]
            self._attachment.phase = "tolerant" if third in wanted else "critical"
        return super()._train()

    def _learning_rate(self, step: int) -> float:
        return super()._learning_rate(step) * self._shape.gamma ** self._third(step)

    def _third(self, step: int) -> int:
        """Return which third of the training a step is in: 0, 1 or 2."""
        return min(2, 3 * max(0, step - self._trials) // self._steps)
