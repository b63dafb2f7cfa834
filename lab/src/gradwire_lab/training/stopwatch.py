"""The stopwatch times DDP's communication, in the same way for every communication hook."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by value.

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.training.bucket import GradBucket
from gradwire_lab.training.startline import StartLine

ONE_BUCKET_MB = 1 << 20
"""Capacity of a bucket that holds all gradients.

They are handed over together, when the last of them is ready, so that the time is that of
communication alone, without the computation of another rank on the same core.
"""

Future = torch.futures.Future


class TimedDDP(DistributedDataParallel):
    """This DDP notes when its bucket sets out and when the result is there.

    Whatever hook is registered, by hand or by `gradwire.attach`, starts when all ranks have
    their gradients.

    Attributes:
        ready: when this rank's gradients were there, in seconds of ``time.monotonic()``.
        start: when it left the start line.
        end: when the averaged gradients were there.
    """

    def __init__(
        self, module: torch.nn.Module, line: StartLine, timeout: float, **options: Any
    ) -> None:
        """Wrap a module.

        Args:
            timeout: seconds that they wait at most.
        """
        super().__init__(module, **{"bucket_cap_mb": ONE_BUCKET_MB, **options})
        self._line = line
        self._timeout = timeout
        self.ready = self.start = self.end = 0.0

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Register a hook with the stopwatch around it."""

        def timed(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
            self._set_out(bucket)
            future: Future[torch.Tensor] = hook(state, bucket)
            return future.then(self._stop)

        super().register_comm_hook(state, timed)

    def _set_out(self, bucket: GradBucket) -> None:
        """Note that a bucket is ready, and wait until those of the other ranks are."""
        if not bucket.is_last():
            raise RuntimeError("the stopwatch times one bucket a step")
        self.ready = time.monotonic()
        self.start = self._line.wait(self._timeout)

    def _stop(self, future: Future[torch.Tensor]) -> torch.Tensor:
        self.end = time.monotonic()
        return future.value()
