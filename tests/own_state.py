"""What one rank keeps, out of what its attachment saves."""

from __future__ import annotations

from typing import Any

import torch


def own_state(saved: dict[str, Any]) -> dict[str, Any]:
    """The one rank's state in what `attachment.state_dict()` returned."""
    ((state,),) = (entry for key, entry in saved.items() if key != "ranks")
    assert isinstance(state, dict)
    return state


def same(one: Any, other: Any) -> bool:
    """Whether two states are alike to the bit, by key."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return repr(one) == repr(other)
