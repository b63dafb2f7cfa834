"""DeviceBook: the errors of encodings that buckets had on their device, kept there.

With error feedback the error of an encoding is added to a later gradient. On the device this is
values = gradient + owed, and then owed = values - decoded(values). The host gets the decoded
values, and its residuals hold the rest of what is owed: chunks that did not count, and errors of
results. So each error is kept once, in one of two places. Whatever leaves the encodings (an exact
step, a checkpoint, a rebuilt bucket) first moves the device's part to the host's residuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.plan import TensorSlot
from gradwire.training.cuda_codec import Payload, decode, decode_on_host, encode, finite_chunks
from gradwire.transport.communicator import ChunkGrid

__all__ = ["DeviceBook", "Encoded"]

Slots = tuple[TensorSlot, ...]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Encoded:
    """An encoded bucket, on the device or in host memory.

    Attributes:
        payload: The encoded values.
        norms: float64, the norm of each tensor's fresh gradient, beside the payload.
        lengths: int64, the chunks' lengths, in host memory.
        encoding: The encoding.
    """

    payload: Payload
    norms: torch.Tensor
    lengths: torch.Tensor
    encoding: str

    def to_host(self, *, pinned: bool) -> Encoded:
        """Returns a copy in host memory; a copy to pinned memory is queued on the stream."""
        norms = torch.empty(self.norms.shape, dtype=torch.float64, pin_memory=pinned)
        norms.copy_(self.norms, non_blocking=pinned)
        payload = self.payload.to_host(pinned=pinned)
        return Encoded(payload, norms, self.lengths, self.encoding)

    def decode_into(self, host: torch.Tensor) -> None:
        """Decodes a copy in host memory into float32 values."""
        decode_on_host(self.payload, self.lengths, self.encoding, host)

    def squares(self) -> NDArray[np.float64]:
        """Returns the squared norms of the tensors' fresh gradients, of a copy in host memory."""
        norms: NDArray[np.float64] = self.norms.numpy()
        return norms**2


class DeviceBook:
    """What one attachment's buckets owe on their devices, by bucket layout.

    Args:
        feedback: Whether the errors of encodings are kept.
    """

    def __init__(self, *, feedback: bool) -> None:
        self._feedback = feedback
        self._owed: dict[Slots, torch.Tensor] = {}
        self._factors: dict[Slots, float] = {}  # changes of scale since it was kept
        self._streams: dict[Slots, Any] = {}  # the streams that compute it; None on the CPU
        self._lengths: dict[tuple[int, torch.device], tuple[ChunkGrid, torch.Tensor]] = {}

    def encode(
        self, slots: Slots, gradient: torch.Tensor, grid: ChunkGrid, encoding: str
    ) -> Encoded:
        """Encodes a bucket on the current stream, and keeps the error.

        Args:
            slots: The bucket's tensors.
            gradient: float32, 1-D.
            grid: The chunk grid.
            encoding: One of `gradwire.training.cuda_codec.ENCODABLE`.

        Returns:
            The encoded bucket, on the device.
        """
        lengths = self._chunk_lengths(grid, gradient.device)
        norms = torch.stack(
            [
                torch.linalg.vector_norm(
                    gradient[s.offset : s.offset + s.length], dtype=torch.double
                )
                for s in slots
            ]
        )
        values = gradient
        owed = self._owed.pop(slots, None)
        if owed is not None:
            values = gradient + owed * self._factors.pop(slots)
        payload = encode(values, lengths, encoding)
        if self._feedback:
            left = values - decode(payload, lengths, encoding)
            self._owed[slots] = torch.where(finite_chunks(left, lengths), left, 0.0)
            self._factors[slots] = 1.0
            on_device = gradient.device.type == "cuda"
            self._streams[slots] = torch.cuda.current_stream() if on_device else None
        return Encoded(payload, norms, self._chunk_lengths(grid, CPU), encoding)

    def recall(self, slots: Slots, *, but: bool) -> Iterator[tuple[Slots, NDArray[np.float32]]]:
        """Removes and yields what is owed for any of these tensors, by the layout it is kept for.

        Args:
            slots: The tensors.
            but: Whether what is owed for exactly this layout stays.

        Yields:
            The layout and its values, float32.
        """
        names = {slot.name for slot in slots}
        for key in list(self._owed):
            if (but and key == slots) or not any(slot.name in names for slot in key):
                continue
            yield key, self._take(key)

    def recall_all(self) -> Iterator[tuple[Slots, NDArray[np.float32]]]:
        """Removes and yields all that is owed, by layout."""
        for key in list(self._owed):
            yield key, self._take(key)

    def rescale(self, factor: float) -> None:
        """Multiplies all that is owed, after a loss scaler has changed its scale."""
        for key in self._factors:
            self._factors[key] *= factor

    def clear(self) -> None:
        """Drops all that is owed."""
        self._owed.clear()
        self._factors.clear()
        self._streams.clear()

    def _take(self, key: Slots) -> NDArray[np.float32]:
        owed = self._owed.pop(key)
        with torch.cuda.stream(self._streams.pop(key)):  # no other stream is waited for
            values: NDArray[np.float32] = owed.cpu().numpy()
        return values * np.float32(self._factors.pop(key))

    def _chunk_lengths(self, grid: ChunkGrid, device: torch.device) -> torch.Tensor:
        """Returns the chunks' lengths in the order of the elements.

        They are copied to a device once, because the copy waits for all earlier work of the stream.
        """
        key = (id(grid), device)
        known = self._lengths.get(key)
        if known is None or known[0] is not grid:
            if len(self._lengths) >= 256:
                self._lengths.clear()
            order = np.argsort(grid.offsets, kind="stable")
            lengths = torch.from_numpy(grid.lengths[order].astype(np.int64)).to(device)
            known = self._lengths[key] = (grid, lengths)
        return known[1]
