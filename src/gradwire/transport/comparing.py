"""Ranks compare texts through the job's store, to find out why an engine has failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from gradwire.transport.store import BoundedStore, Store

MOST_COMPARED = 64
"""How many ranks' texts are compared at most."""


def compare_texts(
    job_store: Store, prefix: str, rank: int, ranks: Sequence[int], text: str, wait_s: float
) -> dict[int, str]:
    """Publishes a rank's text in the store, and returns those of the ranks that publish theirs.

    Errors of the store are dropped, since they would hide the cause. A rank that has read the
    texts stays until the others have, because the store may end with it.

    Args:
        prefix: The prefix of the keys, the same on all ranks and new for each comparison.
        ranks: All ranks; of large jobs some are compared.
        wait_s: Seconds to wait for the others, at most.
    """
    texts = {rank: text}
    with contextlib.suppress(Exception):
        store = BoundedStore(job_store, wait_s)
        store.set(f"{prefix}/{rank}", text)
        keys = {each: f"{prefix}/{each}" for each in ranks[:MOST_COMPARED]}
        end = time.monotonic() + wait_s
        _await_keys(store, keys.values(), end)
        for each, key in keys.items():
            if store.check([key]):
                texts[each] = store.get(key).decode()
        store.set(f"{prefix}/{rank}/read", "1")
        _await_keys(store, [f"{keys[each]}/read" for each in texts if each in keys], end)
    return dict(sorted(texts.items()))


def _await_keys(store: BoundedStore, keys: Iterable[str], end: float) -> None:
    """Waits until a store has all of these keys, or the time has come."""
    asked = list(keys)
    while not store.check(asked) and time.monotonic() < end:
        time.sleep(0.05)
