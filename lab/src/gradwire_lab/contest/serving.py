"""A scenario's servers run in threads of ranks' processes, on hosts that sum for workers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradwire.core.errors import GradwireError
from gradwire.core.settings import Settings
from gradwire.server import serve

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["ServerThread", "route_settings"]

_STOP_SECONDS = 10.0
_MEETING_SECONDS = 300.0
"""Seconds that a server waits for its workers, which meet it one contestant after the other.

The parent of the ranks has given up by then.
"""


def route_settings(servers: int) -> dict[str, Any]:
    """Return the settings for so many servers, or for none, whatever the environment says."""
    return {"route": "server" if servers else "sharded", "servers": servers}


class ServerThread:
    """A server thread serves one group until all workers have left or it is closed."""

    def __init__(
        self, store: Store, *, workers: int, index: int, settings: Settings, group: str = "world"
    ) -> None:
        """Start; the workers, which it meets in the store, need not be there yet.

        Args:
            index: which of the job's servers this is, from 0.
        """
        self._store = store
        self._workers, self._index = workers, index
        patience = max(settings.rendezvous_timeout, _MEETING_SECONDS)
        self._settings = replace(settings, rendezvous_timeout=patience)
        self._group = group
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(
            target=self._serve, name=f"gradwire-server-{index}", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        try:
            serve(
                self._store,
                workers=self._workers,
                index=self._index,
                settings=self._settings,
                stop=self._stop,
                group=self._group,
            )
        except Exception as error:
            self._failure = error

    def check(self) -> None:
        """Raises what the server failed with, if it has; GradwireError if it ended all the same."""
        if self._failure is not None:
            raise self._failure
        if not self._thread.is_alive() and not self._stop.is_set():
            raise GradwireError(f"server {self._index} has ended: all workers have left")

    def close(self) -> None:
        """Stop serving. May be called again."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)
