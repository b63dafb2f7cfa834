"""Report files for tests of what reads them: steps as rank 0 of 8 writes them, a slow one among
them, with changes that a test asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SLOW = 412
"""The step for which rank 3's contribution came late."""


def step(number: int, **changes: Any) -> dict[str, Any]:
    """A step of 76 ms, 8 of which it waits; the slow one loses a burst from rank 3."""
    slow = number == SLOW
    slowest = {
        "bucket": 2,
        "layers": ["conv3.weight", "fc1.bias"],
        "encoding": "f16",
        "kept": 1.0,
        "spend": "lost",
        "total_s": 0.240 if slow else 0.0075,
        "out_s": 0.231 if slow else 0.0062,
        "began": "rank 3",
        "began_s": 0.0011 if slow else 0.0012,
        "pushed": "rank 3",
        "pushed_s": 0.230 if slow else 0.0061,
        "pulled": "rank 5",
        "pulled_s": 0.239 if slow else 0.0074,
        "queued": "rank 3",
        "queued_s": 0.014 if slow else 0.0004,
        "resent": "rank 3" if slow else "",
        "resent_packets": 2 if slow else 0,
        "missed": "rank 3" if slow else "",
        "missed_packets": 38 if slow else 0,
        "burst": "rank 3" if slow else "",
        "burst_packets": 17 if slow else 0,
    }
    values = {
        "format": 2,
        "step": number,
        "rank": 0,
        "workers": 8,
        "policy": "adaptive",
        "phase": "tolerant",
        "bound": 0.05,
        "delivered": 0.991 if slow else 1.0,
        "regions": [
            {"name": "fc1", "bound": 0.05, "delivered": 0.976 if slow else 1.0},
            {"name": "conv3", "bound": 0.02, "delivered": 1.0},
        ],
        "elements": 1_000_000,
        "bytes": 3_600_000,
        "packets": 2_500,
        "retransmissions": 3 if slow else 0,
        "comm_s": 0.300 if slow else 0.060,
        "exposed_s": 0.242 if slow else 0.008,
        "period_s": 0.0 if number == SLOW - 12 else 0.312 if number == SLOW + 1 else 0.076,
        "rtprop_s": 0.0004,
        "btlbw": 400e6,
        "exceeded": [],
        "guard": "",
        "encoded_share": 0.5,
        "attachment": 0,
        "agreed": {"loss": 2.0 - 0.001 * number},
        "slowest": slowest,
    }
    values.update(changes)
    return values


def write(path: Path, steps: int = 40, first: int = SLOW - 12, **changes: Any) -> Path:
    """Writes steps, which have these changes all."""
    lines = (json.dumps(step(first + i, **changes)) + "\n" for i in range(steps))
    path.write_text("".join(lines))
    return path
