"""Priority classes of chunks by layer, by gradient magnitude or by last result; class 0 goes first.

Everything here is a pass or two of vectorised arithmetic over a bucket. Classes by magnitude are
each worker's own, and no other rank needs to know them. Last results are the same on all replicas,
which therefore leave out the same chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradwire.core.errors import ConfigError
from gradwire.core.plan import PRIORITY_CLASSES, check_choice
from gradwire.core.regions import TensorSlot

Priorities = NDArray[np.uint8]


class Chunks(Protocol):
    """The chunk grid of a plan, as far as a policy needs it: arrays of one entry per chunk.

    Attributes:
        offsets: uint64, rising; each chunk's first element.
        lengths: uint32; each chunk's number of elements.
        regions: uint32, rising; the index of the region that a chunk belongs to.
        aggregators: uint32, rising; the index of the aggregator that sums it.
    """

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    regions: NDArray[np.uint32]
    aggregators: NDArray[np.uint32]

    @property
    def groups(
        self,
    ) -> tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.intp], NDArray[np.intp]]:
        """For each chunk its group, where that begins, and how many chunks are in it.

        A group is the chunks of one region at one aggregator.
        """
        ...

    def mean_magnitudes(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns each chunk's mean magnitude, infinite where the sum is not finite."""
        ...


class LayerOrder:
    """The place of each layer of a model, front to back.

    Args:
        tensors: Names of the parameters in the order of `model.named_parameters()`. A layer is the
            module that owns a parameter.
    """

    def __init__(self, tensors: Iterable[str]) -> None:
        self._place: dict[str, int] = {}
        for name in tensors:
            self._place.setdefault(TensorSlot(name, 0, 1).layer, len(self._place))

    def classes(self, slots: tuple[TensorSlot, ...], chunks: Chunks, count: int) -> Priorities:
        """Makes classes of equally many layers."""
        layers = len(self._place)
        of_slot = [self._place[slot.layer] * count // layers for slot in slots]
        starts = np.array([slot.offset for slot in slots], np.uint64)
        at = np.searchsorted(starts, chunks.offsets, side="right") - 1
        return np.array(of_slot, np.uint8)[at]


def by_size(order: NDArray[np.intp], count: int) -> Priorities:
    """Makes `count` classes of equally many chunks, the largest first.

    Args:
        order: The chunks from the smallest to the largest (argsort).
    """
    classes = np.empty(len(order), np.uint8)
    classes[order[::-1]] = np.arange(len(order)) * count // max(1, len(order))
    return classes


def by_region(values: NDArray[np.float32], chunks: Chunks, seed: int) -> Priorities:
    """Spreads each region's chunks at each aggregator equally over all classes, the largest first.

    An eager close leaves out a share of each region, hence the last classes of each, whatever that
    share is.

    Args:
        values: float32 for each chunk, none below 0.
        seed: Seed of the order of equal values (an embedding's rows without a gradient).

    Returns:
        uint8 for each chunk.
    """
    groups, starts, sizes = chunks.groups
    drawn = np.random.default_rng(seed).permutation(len(values))
    # The sort key is one number of 64 bits: group, value (a float's bits rise with it), place in a
    # random permutation. Values lose their last bits where the other two leave less than 31 bits.
    low = len(values).bit_length()
    bits = min(31, 64 - low - int(groups.max(initial=0)).bit_length())
    keys = (values[drawn].view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys >>= np.uint64(31 - bits)
    keys |= groups[drawn].astype(np.uint64) << np.uint64(bits)
    keys <<= np.uint64(low)
    keys |= np.arange(len(values), dtype=np.uint64)
    keys.sort()
    order = drawn[(keys & np.uint64((1 << low) - 1)).astype(np.intp)]
    classes = np.empty(len(values), np.uint8)
    place = np.arange(len(values)) - starts
    classes[order] = PRIORITY_CLASSES - 1 - place * PRIORITY_CLASSES // sizes
    return classes


def lowest(order: NDArray[np.intp], chunks: Chunks, share: float) -> NDArray[np.bool_]:
    """Marks the smallest chunks: the share `share`, rounded up, of each region at each aggregator.

    An eager close of bound `share` leaves out no others, where these are in the last class.

    Args:
        order: The chunks from the smallest to the largest (argsort).

    Returns:
        bool for each chunk.
    """
    groups, starts, sizes = chunks.groups
    within = order[np.argsort(groups[order], kind="stable")]
    marked = np.empty(len(order), np.bool_)
    marked[within] = np.arange(len(order)) - starts < np.ceil(share * sizes - 1e-9)
    return marked


def check_priority(
    priority: object, allowed: tuple[str, ...], control: str, order: str | None, pull: str | None
) -> None:
    check_choice("priority", priority, allowed)
    if priority == "none":
        return
    if control != "stream":
        raise ConfigError.of(
            "control",
            control,
            "every pass goes through all chunks; set control='stream' or priority='none'",
            beside=f"with priority={priority!r}",
        )
    if order not in (None, "shuffled"):
        raise ConfigError.of(
            "order",
            order,
            "chunks go by priority, shuffled within a class; leave order out, or set "
            "priority='none'",
            beside=f"with priority={priority!r}",
        )
    if priority == "results" and pull == "lossy":
        raise ConfigError.of(
            "pull",
            "lossy",
            "replicas then get different results and would rank chunks differently; set "
            "pull='exact' or 'committed', or priority='none'",
            beside="with priority='results'",
        )
