"""The names of a model's tensors: the same with and without compilation and checkpointing.

`torch.compile` and activation checkpointing wrap a module, which adds a part to the names of all
its tensors. These parts are left out, so that a table, a pattern or a saved state fits the model
with and without wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOST_NAMED = 3
"""How many of several names a text has at most."""
MOST_RANKS = 8
"""How many of several ranks a text has at most."""

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""The names under which compiled modules and torch's checkpoint wrappers hold the wrapped one."""


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the model's parameters by name, in the model's order.

    Returns:
        The parameters under their names without wrappers, or under the model's own names where two
        parameters would have the same name without them.
    """
    own = dict(model.named_parameters())
    plain = {plain_name(name): parameter for name, parameter in own.items()}
    return plain if len(plain) == len(own) else own


def plain_name(name: str) -> str:
    """Returns a tensor's or module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def some_of(names: Sequence[str]) -> str:
    """Returns names as text: "'a'", "'a', 'b'", "'a', 'b', 'c' and 5 more"."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more


def ranks_as_text(ranks: Sequence[int]) -> str:
    """Returns ranks as text: "rank 1", "ranks 0, 2", "ranks 0, 1, … (60)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f", … ({len(ranks)})" if len(ranks) > MOST_RANKS else ""
    return f"ranks {', '.join(map(str, ranks[:MOST_RANKS]))}{more}"
