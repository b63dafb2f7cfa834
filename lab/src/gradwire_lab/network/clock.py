"""All hosts of a lab share the clock ``time.monotonic()``."""

from __future__ import annotations

import time


def sleep_until(moment: float) -> None:
    """Wait for a moment, to a few microseconds where the machine is idle."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)
