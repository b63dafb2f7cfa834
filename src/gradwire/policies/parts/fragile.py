"""Which tensors may lose nothing where nobody says otherwise: norm layers and biases."""

from __future__ import annotations

import re

__all__ = ["is_fragile"]

_NAMES = re.compile(r"(^|\.)bias$|norm|(^|[._])(bn|ln)\d*([._]|$)", re.IGNORECASE)


def is_fragile(name: str) -> bool:
    """Whether a tensor is called as those of norm layers and biases are.

    Most have one dimension, which tells them better; but a layer norm over two has a weight of two.
    """
    return _NAMES.search(name) is not None
