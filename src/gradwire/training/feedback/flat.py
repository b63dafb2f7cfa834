"""FlatBook: one float32 value per gradient element, kept by parameter from step to step.

The values belong to parameters, because DDP rebuilds its buckets. Those of a bucket lie in one flat
array, so that adding and clearing are single passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire.core.errors import ConfigError
from gradwire.core.regions import TensorSlot

FlatArray = NDArray[np.float32]

BLOCK = 1 << 16
"""Number of elements that are processed at once where NumPy needs temporary memory."""


def blocks(values: FlatArray) -> Iterator[FlatArray]:
    """Returns consecutive views of the values (1-D)."""
    return (values[at : at + BLOCK] for at in range(0, len(values), BLOCK))


class FlatBook:
    """Values of one rank by parameter name; 0 where there are none."""

    kind: ClassVar[str] = "value"
    """Name of one value, for errors."""

    def __init__(self) -> None:
        self._by_name: dict[str, FlatArray] = {}
        self._flat: dict[tuple[TensorSlot, ...], FlatArray] = {}

    def values(self, slots: tuple[TensorSlot, ...]) -> FlatArray:
        return self._flat[slots]

    def of(self, key: str) -> FlatArray:
        return self._by_name[key]

    def rescale(self, factor: float) -> None:
        for values in self._by_name.values():
            values *= np.float32(factor)

    def clear(self) -> None:
        self._by_name, self._flat = {}, {}

    def state_dict(self) -> dict[str, FlatArray]:
        return {name: values.copy() for name, values in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, FlatArray]) -> None:
        read: dict[str, FlatArray] = {}
        for name, values in state.items():
            array = np.asarray(values)
            if array.ndim != 1 or not np.issubdtype(array.dtype, np.floating):
                raise ConfigError.about(
                    f"{self.kind} of parameter {name!r} of shape {array.shape} and type "
                    f"{array.dtype}",
                    "one float for each element, in one dimension",
                    setting=f"{self.kind} of parameter {name!r}",
                    value=array.shape,
                )
            with np.errstate(over="ignore"):
                read[name] = np.array(array, dtype=np.float32)
            if not np.isfinite(read[name]).all():
                raise ConfigError.about(
                    f"{self.kind} of parameter {name!r} holds values that are not finite",
                    "only finite ones are ever kept, so the state is damaged",
                    setting=f"{self.kind} of parameter {name!r}",
                    value=array.shape,
                )
        self.clear()
        self._by_name = read

    def open(self, slots: tuple[TensorSlot, ...], elements: int) -> FlatArray:
        """Returns the flat array of a bucket; gathers a new one from its parameters."""
        flat = self._flat.get(slots)
        if flat is not None:
            return flat
        flat = np.zeros(elements, np.float32)
        names = {slot.key for slot in slots}
        rebuilt = not names.isdisjoint(self._by_name)
        for slot in slots:
            view = flat[slot.offset : slot.offset + slot.length]
            known = self._by_name.get(slot.key)
            if known is not None:
                if known.size != slot.length:
                    raise ConfigError.about(
                        f"{self.kind} of parameter {slot.key!r} has {known.size} elements, the "
                        f"parameter has {slot.length}",
                        "the state is of another model",
                        setting=f"{self.kind} of parameter {slot.key!r}",
                        value=known.size,
                    )
                view[:] = known
            self._by_name[slot.key] = view
        if rebuilt:
            for old in [key for key in self._flat if any(slot.key in names for slot in key)]:
                del self._flat[old]
        self._flat[slots] = flat
        return flat
