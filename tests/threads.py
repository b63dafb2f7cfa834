"""Ranks in one process: a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def at_once(count: int, call: Callable[[int], Any], seconds: float = 60.0) -> list[Any]:
    """Calls call(0…count-1) at once; an exception is returned as a result."""
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = call(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    return results
