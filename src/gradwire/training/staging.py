"""Staging: a bucket's gradients in host memory, flat, whatever their type and device.

float32 on the CPU is used in place, and so are float16 and bfloat16 where nothing but the engine
reads the values. Otherwise these pass through a float32 copy, without loss on the way in; the
average is rounded to their type once, on the way out. float64 is rounded to float32 on the way in
(relative error 6e-8; magnitudes beyond 3.4e38 become infinite), because the sums are float32.

A bucket on a CUDA device is copied through pinned memory on a stream of its own, in its own type
where that would be used in place on the CPU. The autograd thread only queues the copy, and the
engine's StartQueue (`gradwire.transport.threads`) waits for it.
"""

from __future__ import annotations

import copy
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core import callers
from gradwire.core.errors import ConfigError, GradwireError
from gradwire.core.leaving import inside
from gradwire.training.bucket import Scatter
from gradwire.transport.arrays import as_flat

DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def failed(buffer: torch.Tensor, error: BaseException) -> torch.futures.Future[torch.Tensor]:
    """Makes a future of a bucket that fails with an error, as that of a failed transfer does.

    A hook that raises instead leaves a DDP module in the middle of its step, where it cannot be
    used any more.
    """
    stage = Stage(buffer)
    stage.deliver(error)
    return stage.future()


def without_traceback(error: GradwireError) -> GradwireError:
    """Returns a copy of an error, whose traceback may hold the frames of the backward pass."""
    try:
        return copy.copy(error)
    except Exception:  # a class of a user's own whose arguments are not its text
        return GradwireError(str(error))


class Stage:
    """The way of one bucket to host memory and back, and the answer to whoever handed it over.

    Args:
        buffer: The bucket's buffer.
        copy: A copy of it that is sent; None where the buffer is on the CPU and used in place.

    Attributes:
        result: Where the result goes: the buffer, or memory for this worker's shard of it.
        part: The elements of the bucket that go there.
        error: Why the bucket failed.
        delivered: Set when the futures are complete.
    """

    waits = False
    """Whether `host` waits for a copy, so that another thread has to call it."""

    def __init__(self, buffer: torch.Tensor, copy: torch.Tensor | None = None) -> None:
        self.buffer = self.result = buffer
        self.part = slice(None)
        self.error: BaseException | None = None
        self.delivered = threading.Event()
        self._sent = buffer if copy is None else copy
        self._host: NDArray[Any] | None = None
        self._complete: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if buffer.device.type == "cpu" else [buffer.device]
        )

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Makes a future of where the result is, which `deliver` completes."""
        return self._complete.then(self._answer)

    def _answer(self, complete: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """Returns where the result is, or raises the bucket's error.

        Raising here is the one safe way to fail, because an exception that is set on the future
        itself crashes DDP's backward pass.
        """
        if isinstance(self.error, GradwireError):
            raise without_traceback(self.error)
        if self.error is not None:
            raise self.error
        return self.result

    def deliver(self, error: BaseException | None = None) -> None:
        """Copies the host values to where the result goes, and completes the futures."""
        self.error = self.error or error
        with inside():
            try:
                with self.behind():
                    self._hand_out()
                    self._complete.set_result(self.result)  # consumers wait for the stream's events
            except Exception as failure:
                self.error = self.error or failure
                if not self._complete.done():
                    self._complete.set_result(self.result)
            finally:
                self.delivered.set()

    def host(self) -> NDArray[Any]:
        """Returns the gradients in host memory, 1-D; waits until they are there.

        They are float32, or the bits of elements of two bytes that are used in place.
        """
        if self._host is None:
            self._host = as_flat(self.values)[0]
        return self._host

    @property
    def values(self) -> torch.Tensor:
        """The same as numbers."""
        return self._sent

    def behind(self) -> AbstractContextManager[Any]:
        """Returns a context whose work on the device follows what computed the gradients."""
        return nullcontext()

    def _hand_out(self) -> None:
        if self.result is not self._sent:
            self.result.copy_(self._sent[self.part], non_blocking=self.waits)

    def take(self, values: NDArray[np.float32]) -> None:
        """Replaces the host values by those of another array, which `deliver` may hand on.

        The array has to keep them until DDP has read them, which is before the next backward pass.
        """
        taken = torch.from_numpy(values)
        if self._sent is self.buffer:
            self.result = taken  # DDP copies it out of wherever it is
        self._sent, self._host = taken, values


class StagePool:
    """Makes stages, and keeps their host copies and streams for the next step."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._warned = False

    def stage(
        self,
        index: int,
        buffer: torch.Tensor,
        scatter: Scatter | None = None,
        *,
        in_place: bool = False,
    ) -> Stage:
        """Makes the stage of a bucket; queues the copy of a CUDA bucket at once.

        Args:
            in_place: Whether elements of two bytes on the CPU are used as they are.
        """
        stage = self._stage(index, buffer, in_place=in_place)
        if scatter is not None:
            stage.result, stage.part = scatter.output, scatter.own
        return stage

    def _stage(self, index: int, buffer: torch.Tensor, *, in_place: bool) -> Stage:
        if not buffer.numel():
            return Stage(buffer)
        if buffer.dtype not in DTYPES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ConfigError.about(
                f"bucket {index} has dtype {buffer.dtype}",
                f"allowed are {allowed}",
                setting="dtype",
                value=buffer.dtype,
            )
        if buffer.dtype == torch.float64 and not self._warned:
            self._warned = True
            callers.warn(
                "gradwire carries float64 gradients rounded to float32",
                UserWarning,
            )
        if buffer.device.type == "cpu":
            if in_place or buffer.dtype == torch.float32:
                return Stage(buffer)
            copy = self._copy(index, buffer)
            return Stage(buffer, copy.copy_(buffer.detach()))
        if buffer.device.type == "cuda":
            stream = self._streams.get(buffer.device)
            if stream is None:
                stream = self._streams[buffer.device] = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
            copy = self._copy(index, buffer)
            if in_place:
                copy = copy.view(buffer.dtype)[: buffer.numel()]
            return _CudaStage(buffer, copy, stream)
        raise ConfigError.about(
            f"bucket {index} lies on device {buffer.device}",
            f"allowed are {' and '.join(DEVICES)}",
            setting="device",
            value=str(buffer.device),
        )

    def _copy(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Returns memory for the host copy of a bucket, float32.

        Devices have separate copies, because only a device's own stream keeps the next copy into
        it behind the last copy out of it.
        """
        key = (index, buffer.device)
        copy = self._copies.get(key)
        if copy is None or copy.numel() < buffer.numel():
            pinned = buffer.device.type == "cuda"
            copy = torch.empty(buffer.numel(), dtype=torch.float32, pin_memory=pinned)
            self._copies[key] = copy
        return copy[: buffer.numel()]


class _CudaStage(Stage):
    """A bucket on a CUDA device, with a copy in pinned memory made on a side stream.

    The copy is float32, or of the bucket's own type.
    """

    waits = True

    def __init__(self, buffer: torch.Tensor, copy: torch.Tensor, stream: Any) -> None:
        super().__init__(buffer, copy)
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            copy.copy_(buffer.detach().to(copy.dtype), non_blocking=True)
            buffer.record_stream(stream)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(stream)

    def behind(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    @property
    def values(self) -> torch.Tensor:
        self._arrived.synchronize()
        return self._sent
