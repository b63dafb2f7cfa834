"""Ranges of buckets and waits in the traces of torch.profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function


def bucket_range(
    index: int, start: Callable[[], torch.futures.Future[torch.Tensor]]
) -> torch.futures.Future[torch.Tensor]:
    """Starts a bucket's transfer, which a profiler shows from here to its result."""
    if not _profiler_enabled():
        return start()
    with record_function(f"gradwire: bucket {index}") as shown:
        result: torch.futures.Future[torch.Tensor] = shown._call_end_callbacks_on_future(start())
        return result


def wait_in_range(wait: Callable[[], None]) -> None:
    """Calls `wait`, which a profiler shows as the wait for a step's results."""
    if not _profiler_enabled():
        wait()
        return
    with record_function("gradwire: wait for results"):
        wait()
