"""The shape of an answer: what of a process's state is whole enough to be read.

A process that answers may have just begun, be of another gradwire, or be another program of this
user. What lacks a key is left out here, so that nobody who reads on has to look again.
"""

from __future__ import annotations

import math
from typing import Any

# Each shape is an example: 0 stands for a finite number, "" for a text, [0] for a list of numbers,
# [] for any list, {...: 0} for numbers by whatever keys, and a tuple for one of several shapes.
_TOTALS = dict.fromkeys(
    ("packets_sent", "bytes_sent", "bytes_received", "retransmissions", "declared_lost"), 0
)
_COUNTERS = {
    **_TOTALS,
    **dict.fromkeys(("rtprop_ns", "queue_delay_ns", "btlbw", "send_window", "receive_window"), 0),
}
_PATH = {
    "peer": "",
    **_TOTALS,
    **dict.fromkeys(("loss_to", "loss_from", "rtprop_ns", "round_ns", "queue_to_ns"), 0),
    **dict.fromkeys(("window", "in_flight", "waited_ns", "silence_s"), 0),
}
_ENGINE = {
    "name": "",
    "group": "",
    "workers": 0,
    "failure": (None, ""),
    "counters": _COUNTERS,
    "waits": (None, {"step": 0, "seconds": 0, "for": [""]}),
    "paths": [_PATH],
}
_STEP = {
    **dict.fromkeys(("phase", "encoding", "guard"), ""),
    **dict.fromkeys(("step", "delivered", "bound", "period_s", "comm_s", "push_s", "pull_s"), 0),
    **dict.fromkeys(("exposed_s", "bytes", "packets", "retransmissions", "at"), 0),
    "loss": (None, 0, ""),
    "lost": {...: 0},
}
_ATTACHMENT = {
    "id": "",
    "noted": 0,
    "policy": "",
    "number": 0,
    "ranks": [0],
    "keys": [""],
    "steps": [[]],
}
_STATE = {
    **dict.fromkeys(("job", "host", "script"), ""),
    **dict.fromkeys(("pid", "started", "at", "clock"), 0),
    **dict.fromkeys(("processor_s", "keeping_s", "answering_s"), 0),
    "engines": [],
    "attachments": [],
}


def whole(answer: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what can be read of an answer, steps as dicts; None where nothing can."""
    if not _fits(answer, _STATE):
        return None
    engines = [each for each in answer["engines"] if _fits(each, _ENGINE)]
    attachments = []
    for each in answer["attachments"]:
        if _fits(each, _ATTACHMENT):
            rows = [dict(zip(each["keys"], row, strict=False)) for row in each["steps"]]
            attachments.append({**each, "steps": [row for row in rows if _fits(row, _STEP)]})
    return {**answer, "engines": engines, "attachments": attachments}


def _fits(value: Any, like: Any) -> bool:
    if isinstance(like, tuple):
        return any(_fits(value, each) for each in like)
    if isinstance(like, dict):
        if not isinstance(value, dict):
            return False
        if ... in like:
            return all(_fits(each, like[...]) for each in value.values())
        return all(name in value and _fits(value[name], each) for name, each in like.items())
    if isinstance(like, list):
        return isinstance(value, list) and all(_fits(each, like[0]) for each in value if like)
    if isinstance(like, str):
        return isinstance(value, str)
    if like is None:
        return value is None
    return isinstance(value, (int, float)) and math.isfinite(value)
