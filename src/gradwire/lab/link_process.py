"""The process whose threads carry frames between TAP devices.

Arguments: the process id of the keeper, the descriptor of a socket to it, the seed, and for each
link its two descriptors as FIRST:SECOND. It answers the keeper's questions and dies with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from gradwire import _engine
from gradwire.lab.kernel import die_with_parent

MAX_MESSAGE = 1 << 16


def _counters(link: _engine.TapLink) -> list[dict[str, int]]:
    return [link.counters(direction) for direction in (0, 1)]


def obey(request: dict[str, Any], links: list[_engine.TapLink]) -> dict[str, Any]:
    """Set a direction of a link, or tell what both have seen."""
    link = links[request["link"]]
    failure = link.failure()
    if failure:
        return {"error": failure}
    if "options" in request:
        for direction in request["directions"]:
            link.set(direction, **request["options"])
        return {}
    return {"counters": _counters(link)}


def main(arguments: list[str]) -> None:
    """Carry frames until the keeper is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when it is over
    die_with_parent(int(arguments[0]))
    channel = socket.socket(fileno=int(arguments[1]))
    seed = int(arguments[2])
    links = []
    for number, pair in enumerate(arguments[3:]):
        first, second = (int(text) for text in pair.split(":"))
        links.append(_engine.TapLink(first, second, headed=True, seed=seed * 1000 + number))
        os.close(first)
        os.close(second)
    while message := channel.recv(MAX_MESSAGE):
        try:
            answer = obey(json.loads(message), links)
        except (ValueError, RuntimeError) as error:
            answer = {"error": str(error)}
        channel.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
