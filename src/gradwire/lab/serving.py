"""A server in a thread of a rank's own process, on a host that sums for the workers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gradwire.server import serve
from gradwire.settings import Settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["ServerThread"]

_STOP_SECONDS = 10.0


class ServerThread:
    """Serves one group from its making until all workers have left or it is closed."""

    def __init__(
        self, store: Store, *, workers: int, index: int, settings: Settings, group: str = "world"
    ) -> None:
        """Start; the workers, which it meets in the store, need not be there yet.

        Args:
            store: of the job.
            workers: how many push to it.
            index: which of the job's servers this is, from 0.
            settings: the workers'.
            group: theirs.
        """
        self._store = store
        self._place = {"workers": workers, "index": index}
        self._settings = settings
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
                **self._place,
                settings=self._settings,
                stop=self._stop,
                group=self._group,
            )
        except Exception as error:
            self._failure = error

    def check(self) -> None:
        """Raises what the server failed with, if it has."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop serving. May be called again."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)
