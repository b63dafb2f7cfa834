"""The state of an engine, as `gradwire.live` offers it to readers: its totals and its paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire import _engine
    from gradwire.core.names import Names

MOST_PATHS = 64
"""How many paths of an engine are offered at most: the worst ones."""


def engine_state(native: _engine.Engine, names: Names, endpoint: int, group: str) -> dict[str, Any]:
    """Returns an engine's state, as JSON takes it."""
    failure = native.failure()
    paths = [
        {
            "peer": names.name(peer.endpoint),
            "silence_s": peer.silence_ns / 1e9,
            **peer.path(),
        }
        for peer in native.peers()
    ]
    if len(paths) > MOST_PATHS:
        paths = sorted(paths, key=_badness, reverse=True)[:MOST_PATHS]
    return {
        "name": names.name(endpoint),
        "group": group,
        "workers": len(names.ranks),
        "failure": None if failure is None else failure.text,
        "waits": None,
        "counters": native.counters(),
        "paths": paths,
    }


def _badness(path: dict[str, Any]) -> tuple[float, float, float]:
    return path["loss_to"] + path["loss_from"], path["waited_ns"], path["round_ns"]
