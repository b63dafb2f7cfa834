"""The names of a model's tensors: the same with and without compilation and checkpointing.

`torch.compile` and activation checkpointing wrap a module, which adds a part to the names of all
its tensors. These parts are left out, so that a table, a pattern or a saved state fits the model
with and without wrappers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.core.words import numbered

if TYPE_CHECKING:
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
    more = f", … ({len(ranks)})" if len(ranks) > MOST_RANKS else ""
    return numbered("rank", ranks[:MOST_RANKS]) + more


@dataclass(frozen=True)
class Names:
    """The names of endpoints: workers by their rank in the job, servers by index."""

    ranks: Sequence[int]

    def rank_of(self, endpoint: int) -> int:
        """Returns a worker's rank in the job, or a server's endpoint number."""
        return self.ranks[endpoint] if 0 <= endpoint < len(self.ranks) else endpoint

    def name(self, endpoint: int) -> str:
        """Names an endpoint: "rank 2", "server 0"; "" for -1, which is none."""
        if endpoint < 0:
            return ""
        workers = len(self.ranks)
        here = endpoint < workers
        return f"rank {self.ranks[endpoint]}" if here else f"server {endpoint - workers}"

    def describe(self, endpoints: Iterable[int]) -> str:
        """Names endpoints as text: "rank 2", "ranks 1, 3", "rank 0 and server 1"."""
        endpoints, workers = list(endpoints), len(self.ranks)
        ranks = [self.ranks[each] for each in endpoints if each < workers]
        servers = [each - workers for each in endpoints if each >= workers]
        words = (("rank", ranks), ("server", servers))
        return " and ".join(numbered(of, numbers) for of, numbers in words if numbers)
