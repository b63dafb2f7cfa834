"""The tensors that may lose nothing by default: those of norm layers and biases."""

from __future__ import annotations

import re

_NAMES = re.compile(r"(^|\.)bias$|norm|(^|[._])(bn|ln)\d*([._]|$)", re.IGNORECASE)


def is_fragile(name: str) -> bool:
    """Returns whether a tensor is named as those of norm layers and biases are.

    Most of them have one dimension, which is the better test; but a layer norm over two dimensions
    has a weight of two.
    """
    return _NAMES.search(name) is not None
