"""Weight pruning in a gradient transport: the elements of a bucket that are held back.

NetSenseML (arXiv 2506.16235) prunes small weights. A transport cannot change weights, so gradwire
interprets it in its own way: the gradient elements of each tensor's smallest weights do not compete
for top-k's places, and stay in the residual. Replicas are identical, so all workers hold back the
same elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.regions import TensorSlot
from gradwire.training.bucket import in_bucket_order


def smallest_weights(
    slots: Sequence[TensorSlot],
    parameters: Sequence[torch.Tensor],
    share: float,
    spared: frozenset[str],
) -> NDArray[np.intp]:
    """Returns where in a bucket each tensor's weights of smallest magnitude lie.

    Args:
        parameters: The bucket's parameters, in order, empty ones included.
        share: Share of each tensor's weights, in [0, 1), rounded down to whole elements.

    Returns:
        Indices of elements of the bucket.
    """
    found = [np.zeros(0, np.intp)]
    filled = [parameter for parameter in parameters if parameter.numel()]
    for slot, parameter in zip(slots, filled, strict=True):
        count = int(share * slot.length)
        if slot.name in spared or count == 0:
            continue
        flat = in_bucket_order(parameter.detach(), parameter)
        sizes = flat.abs().to("cpu", torch.float32).numpy()
        found.append(slot.offset + np.argpartition(sizes, count - 1)[:count])
    return np.concatenate(found)
