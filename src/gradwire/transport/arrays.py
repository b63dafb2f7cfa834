"""The memory on which a transfer works in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def own_encoding(dtype: torch.dtype) -> str:
    """Returns the encoding that carries the elements of a bucket of this type unchanged.

    float16 and bfloat16 have one of their width; elements of other types are sent as float32.
    """
    import torch

    return {torch.float16: "half", torch.bfloat16: "bf16"}.get(dtype, "f32")


def as_flat(array: NDArray[Any] | torch.Tensor) -> tuple[NDArray[Any], str]:
    """Returns a flat (1-D) view of the array's memory, without a copy.

    Args:
        array: Contiguous; a writable numpy array of float32 or float16, or a torch tensor on the
            CPU of float32, float16 or bfloat16.

    Returns:
        The view, float32, or uint16 for the other types; and the encoding that carries the elements
        unchanged.

    Raises:
        TypeError: The dtype, the device or the kind of object is another one.
        ValueError: The memory is not contiguous or not writable.
    """
    if not isinstance(array, np.ndarray):
        return _tensor_memory(array)
    if array.dtype not in (np.float32, np.float16):
        raise TypeError(f"array of dtype {array.dtype}: all_reduce takes float32 and float16")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError("all_reduce works in place: the array must be contiguous and writable")
    flat = array.reshape(-1)
    return (flat.view(np.uint16), "half") if array.dtype == np.float16 else (flat, "f32")


def as_tensor(flat: NDArray[Any], encoding: str) -> torch.Tensor:
    """Returns what `as_flat` returned as a tensor of the elements' type, on the same memory."""
    import torch

    if flat.dtype != np.uint16:
        return torch.from_numpy(flat)
    kind = {"half": torch.float16, "bf16": torch.bfloat16}[encoding]
    return torch.from_numpy(flat.view(np.int16)).view(kind)


def _tensor_memory(tensor: Any) -> tuple[NDArray[Any], str]:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"all_reduce of a {type(tensor).__name__}: takes numpy arrays and torch CPU tensors"
        )
    encoding = own_encoding(tensor.dtype)
    known = tensor.dtype == torch.float32 or encoding != "f32"
    if tensor.device.type != "cpu" or not known:
        raise TypeError(
            f"all_reduce of a {tensor.dtype} tensor on {tensor.device}: takes float32, float16 and "
            "bfloat16 on the CPU"
        )
    if not tensor.is_contiguous():
        raise ValueError("all_reduce works in place: the tensor must be contiguous")
    flat = tensor.detach().view(-1)
    if encoding == "f32":
        return flat.numpy(), encoding
    return flat.view(torch.int16).numpy().view(np.uint16), encoding
