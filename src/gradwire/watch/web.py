"""`gradwire top --web`: a job as a page of this host alone.

The page is one file without resources from elsewhere. It asks for new figures each second, and the
job is looked at only then. Its address has a secret part, because other users of the host can
connect to the loopback, too.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gradwire.watch.figures import picture
from gradwire.watch.source import Watched

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load: nothing, but for the figures."""


class PageServer(ThreadingHTTPServer):
    """Serves the page and its figures."""

    daemon_threads = True

    def __init__(self, watched: Watched, interval: float, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._path = f"/{secrets.token_urlsafe(12)}/"
        self.url = f"http://127.0.0.1:{self.server_address[1]}{self._path}"
        self._watched = watched
        self._interval = interval
        self._mutex = threading.Lock()
        self._looked = -1e9
        self._figures: dict[str, Any] = {}

    def answer(self, target: str) -> tuple[str, bytes] | None:
        """Returns type and content of what a browser asks for; None for what does not exist."""
        asked = urlsplit(target)
        if asked.path == self._path:
            return "text/html; charset=utf-8", Path(__file__).with_name("page.html").read_bytes()
        if asked.path != f"{self._path}state":
            return None
        try:
            since = float(parse_qs(asked.query)["since"][0])
        except (KeyError, ValueError):
            since = 0.0
        return "application/json", json.dumps(self._since(since)).encode()

    def _since(self, since: float) -> dict[str, Any]:
        """Returns the figures, with the steps that ended after a time."""
        with self._mutex:
            pause = self._watched.pause(self._interval)
            if time.monotonic() - self._looked >= pause:
                self._watched.look()
                self._figures = picture(self._watched)
                self._looked = time.monotonic()
            steps = [each for each in self._figures["steps"] if each["at"] > since]
            return {**self._figures, "steps": steps}


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        answer = self.server.answer(self.path)
        if answer is None:
            self.send_error(404)
            return
        kind, content = answer
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing: the address has a secret part."""
