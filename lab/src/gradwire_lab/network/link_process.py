"""The threads of this process carry frames between TAP devices.

Its arguments are the descriptor of a socket to the keeper and the process id of that. It does what
the keeper asks for and dies with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from gradwire_lab import _link
from gradwire_lab.network.channel import MAX_MESSAGE
from gradwire_lab.network.kernel import die_with_parent


def obey(
    request: dict[str, Any], descriptors: list[int], links: dict[int, _link.TapLink]
) -> dict[str, Any]:
    """Start, set or count the link of a host."""
    host = request["host"]
    if request["ask"] == "start":
        first, second = descriptors
        links[host] = _link.TapLink(first, second, headed=True, seed=request["seed"])
    elif failure := links[host].failure():
        return {"error": failure}
    elif request["ask"] == "set":
        links[host].set(request["direction"], **request["options"])
    elif request["ask"] == "count":
        cpu = links[host].processor_time_ns()
        return {"counters": [links[host].counters(way) | {"cpu_ns": cpu} for way in (0, 1)]}
    return {}


def main(arguments: list[str]) -> None:
    """Carry frames until the keeper is gone."""
    # Ctrl-C is for the keeper, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(arguments[0]))
    die_with_parent(int(arguments[1]))
    links: dict[int, _link.TapLink] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 2)
        if not message:
            return
        try:
            answer = obey(json.loads(message), descriptors, links)
        except Exception as error:  # the keeper raises it, whatever it is
            answer = {"error": str(error)}
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
