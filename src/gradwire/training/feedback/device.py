"""DeviceBook: what the encoding of buckets on their device took, kept there.

With error feedback, what an encoding takes has to be given back, so it is taken from the gradient
itself, where that lies: values = gradient + what is owed here, owed = values - decoded(values).
The host gets the decoded values, and its residuals hold the rest of what is owed: chunks that did
not count, results' errors. Each error is thus kept once, in one of two places; what leaves the
encodings (an exact step, a checkpoint, a bucket that DDP rebuilt) first brings the device's part
home to the host's residuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    """A bucket on its way to the host. norms: of each tensor's fresh gradient, float64; both lie
    on the device. lengths: of the chunks, in the host's memory."""

    payload: Payload
    norms: torch.Tensor
    lengths: torch.Tensor
    encoding: str

    def to_host(self, *, pinned: bool) -> Encoded:
        """A copy in host memory; into pinned memory it is only queued on the current stream."""
        norms = torch.empty(self.norms.shape, dtype=torch.float64, pin_memory=pinned)
        norms.copy_(self.norms, non_blocking=pinned)
        payload = self.payload.to_host(pinned=pinned)
        return Encoded(payload, norms, self.lengths, self.encoding)

    def decode_into(self, host: torch.Tensor) -> None:
        """Writes the values (float32); for a copy in host memory."""
        decode_on_host(self.payload, self.lengths, self.encoding, host)

    def squares(self) -> NDArray[np.float64]:
        """The squared norm of each tensor's fresh gradient; for a copy in host memory."""
        norms: NDArray[np.float64] = self.norms.numpy()
        return norms**2


class DeviceBook:
    """What one attachment's buckets owe on their devices, by bucket layout.

    feedback: whether what encodings take is kept.
    """

    def __init__(self, *, feedback: bool) -> None:
        self._feedback = feedback
        self._owed: dict[Slots, torch.Tensor] = {}
        self._factors: dict[Slots, float] = {}  # of what is owed, since it was kept
        self._lengths: dict[tuple[int, torch.device], tuple[ChunkGrid, torch.Tensor]] = {}

    def encode(
        self, slots: Slots, gradient: torch.Tensor, grid: ChunkGrid, encoding: str
    ) -> Encoded:
        """Encodes a bucket (float32, 1-D) and keeps what that takes; on the current stream."""
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
            self._owed[slots] = torch.where(finite_chunks(values, lengths), left, 0.0)
            self._factors[slots] = 1.0
        return Encoded(payload, norms, self._chunk_lengths(grid, CPU), encoding)

    def recall(self, slots: Slots, *, but: bool) -> Iterator[tuple[Slots, NDArray[np.float32]]]:
        """Takes home what is owed for any of these tensors, by the layout it was kept for; `but`:
        except what is owed for this very layout."""
        names = {slot.name for slot in slots}
        for key in list(self._owed):
            if (but and key == slots) or not any(slot.name in names for slot in key):
                continue
            yield key, self._take(key)

    def recall_all(self) -> Iterator[tuple[Slots, NDArray[np.float32]]]:
        """Takes home all that is owed."""
        for key in list(self._owed):
            yield key, self._take(key)

    def rescale(self, factor: float) -> None:
        """Multiplies all that is owed (a gradient scaler has changed its scale)."""
        for key in self._factors:
            self._factors[key] *= factor

    def clear(self) -> None:
        """Forgets all that is owed."""
        self._owed.clear()
        self._factors.clear()

    def _take(self, key: Slots) -> NDArray[np.float32]:
        owed = self._owed.pop(key)
        if owed.device.type == "cuda":  # it was kept on a stream of its own
            torch.cuda.synchronize(owed.device)
        values: NDArray[np.float32] = owed.cpu().numpy()
        return values * np.float32(self._factors.pop(key))

    def _chunk_lengths(self, grid: ChunkGrid, device: torch.device) -> torch.Tensor:
        """The chunks' lengths in the order of the elements; copied to a device once, because that
        copy waits for what the stream has to do before it."""
        key = (id(grid), device)
        known = self._lengths.get(key)
        if known is None or known[0] is not grid:
            if len(self._lengths) >= 256:
                self._lengths.clear()
            order = np.argsort(grid.offsets, kind="stable")
            lengths = torch.from_numpy(grid.lengths[order].astype(np.int64)).to(device)
            known = self._lengths[key] = (grid, lengths)
        return known[1]
