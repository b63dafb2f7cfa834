"""EngineWork: what torch waits on while the engine carries out a collective."""

from __future__ import annotations

import copy
import datetime
import threading

import torch
import torch.distributed as dist

from gradwire.core.errors import TransferError
from gradwire.core.leaving import inside


class EngineWork(dist.Work):
    """One collective of the engine.

    torch waits on the work, or on its future. C++ callers take the future only, so an error has to
    be in both. `Future.set_exception` would end a process in DDP's reducer, hence the future fails
    by a callback that raises.

    Args:
        name: What the collective is, for errors.
    """

    def __init__(self, outputs: list[torch.Tensor], name: str) -> None:
        super().__init__()
        self._name = name
        self._ended = threading.Event()
        self._finished = False
        self._error: Exception | None = None
        self._source: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future = self._source.then(lambda done: self._result(done.value()))
        # Whoever waited for the work may take the value of its future at once. This callback is the
        # first, so nobody waits for those of others.
        self._future.add_done_callback(lambda _: self._ended.set())
        self._outputs = outputs

    def finish(self, error: Exception | None = None) -> None:
        """Ends the work, well or with an error, and runs what waits for it on this thread."""
        if not self._finished:
            self._finished = True
            self._error = error
            with inside():
                self._source.set_result(self._outputs)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits for the result, which is then in the tensors.

        Args:
            timeout: How long to wait; None or zero for as long as the collective may take.
        """
        seconds = None if timeout is None else timeout.total_seconds()
        if not self._ended.wait(seconds if seconds and seconds > 0 else None):
            raise TransferError(f"{self._name} is not done after {seconds:g} s", cause="timeout")
        self._result(self._outputs)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Returns why the collective failed; None while it runs and when it went well."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        """Waits as `wait` does: the results are in host memory."""
        self.wait()

    def _result(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._error is not None:
            raise copy.copy(self._error).with_traceback(None)
        return outputs
