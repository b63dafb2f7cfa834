"""One rank's saved state under a key with its rank, as torch's distributed checkpoint needs it.

`torch.distributed.checkpoint` takes equal keys of several ranks for copies of one value, and loads
only keys that the present state has. So everything that a rank keeps is one entry, which is there
before the first step and has a name of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gradwire.core.checks import is_whole, plain
from gradwire.core.errors import ConfigError

RANKS = "ranks"
_ENTRY = re.compile(r"rank (\d+) of (\d+)")


def of_rank(state: Mapping[str, object], rank: int, ranks: int) -> dict[str, object]:
    """Returns what one of so many ranks saves.

    Its state is in a tuple, which the distributed checkpoint stores whole; it would divide a
    dictionary into its values.
    """
    return {RANKS: ranks, _key(rank, ranks): (dict(state),)}


def read_rank(saved: object, rank: int, ranks: int) -> tuple[object, str | None]:
    """Finds a rank's state in what was saved.

    Args:
        saved: What `of_rank` returned on this rank or another one, those of several ranks in one
            dictionary, or the bare state, which versions before it saved.

    Returns:
        The state, and None or the rank that it belongs to instead, as in "rank 0 of 2".
    """
    if not isinstance(saved, Mapping) or RANKS not in saved:
        return saved, None
    count = plain(saved[RANKS])
    if not is_whole(count) or count < 1:
        raise ConfigError.about(
            f"state[{RANKS!r}]={saved[RANKS]!r}",
            "a whole number from 1 on is needed",
            setting=f"state[{RANKS!r}]",
            value=saved[RANKS],
        )
    own = _key(rank, ranks)
    found = {key: _rank_of(key, count) for key in saved if key != RANKS and key != own}
    if count == ranks and own in saved:
        return _unpacked(saved, own), None
    theirs = {place: key for key, place in found.items() if place is not None}
    if not theirs:
        raise ConfigError.about(
            f"the state of {own!r} is not among those of {count} ranks",
            "start as many ranks as saved it, each with its own state; or flush() before saving "
            "and go on without it",
            setting="state",
            value=sorted(map(str, saved)),
        )
    other = theirs[min(theirs)]
    return _unpacked(saved, other), other


def _key(rank: int, ranks: int) -> str:
    return f"rank {rank} of {ranks}"


def _rank_of(key: Any, ranks: int) -> int | None:
    """Returns the rank of an entry; None where it is of another number of ranks."""
    matched = _ENTRY.fullmatch(key) if isinstance(key, str) else None
    if matched is None:
        raise ConfigError.about(
            f"state[{key!r}]",
            f"no such key; allowed are {RANKS!r} and 'rank 0 of {ranks}' or the like",
            setting=f"state[{key!r}]",
            value=key,
        )
    return int(matched[1]) if int(matched[2]) == ranks else None


def _unpacked(saved: Mapping[Any, Any], key: str) -> object:
    entry = saved[key]
    if not isinstance(entry, (tuple, list)) or len(entry) != 1:
        raise ConfigError.about(
            f"state[{key!r}]",
            "a tuple of one dictionary is needed; the state is damaged",
            setting=f"state[{key!r}]",
            value=type(entry).__name__,
        )
    state: object = entry[0]
    return state
