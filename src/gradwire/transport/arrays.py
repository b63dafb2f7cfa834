"""The memory on which a transfer works in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["as_float32"]


def as_float32(array: NDArray[np.float32] | torch.Tensor) -> NDArray[np.float32]:
    """Returns a flat (1-D) view of the array's memory, without a copy.

    Args:
        array: float32, contiguous; a writable numpy array or a torch tensor on the CPU.

    Returns:
        The view.

    Raises:
        TypeError: The dtype, the device or the kind of object is another one.
        ValueError: The memory is not contiguous or not writable.
    """
    if not isinstance(array, np.ndarray):
        array = _tensor_memory(array)
    if array.dtype != np.float32:
        raise TypeError(f"array of dtype {array.dtype}: all_reduce takes float32")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError("all_reduce works in place: the array must be contiguous and writable")
    return array.reshape(-1)


def _tensor_memory(tensor: Any) -> NDArray[np.float32]:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"all_reduce of a {type(tensor).__name__}: takes numpy arrays and torch CPU tensors"
        )
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        raise TypeError(
            f"all_reduce of a {tensor.dtype} tensor on {tensor.device}: takes float32 on the CPU"
        )
    if not tensor.is_contiguous():
        raise ValueError("all_reduce works in place: the tensor must be contiguous")
    memory: NDArray[np.float32] = tensor.detach().numpy()
    return memory
