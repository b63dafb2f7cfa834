"""Rank programs share their end of the channel to the parent (`gradwire_lab.contest.ranks`)."""

from __future__ import annotations

import json
import signal
import socket
import traceback
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire_lab.contest.ranks import Message

Commands = Mapping[str, Callable[..., Message]]
"""The parent's commands by name: each gets its arguments by name and returns the answer."""


def meet(config: Message) -> tuple[int, int]:
    """Join the other ranks of a `gradwire_lab.contest.job.Job`; return rank and world size."""
    rank, world = config["rank"], config["world"]
    store = TCPStore(config["store_host"], config["store_port"], world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return rank, world


def obey(
    descriptor: int,
    set_up: Callable[[Message, Callable[[Message], None]], tuple[Message, Commands]],
) -> None:
    """Set the program up, then obey the parent until it hangs up; an error is the last answer.

    Args:
        set_up: given the configuration, and something to call with news between a command and
            its answer; returns the answer to the configuration, and the commands.
    """
    # Ctrl-C is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with socket.socket(fileno=descriptor) as endpoint, endpoint.makefile("rw") as channel:

        def write(message: Message) -> None:
            channel.write(json.dumps(message) + "\n")
            channel.flush()

        try:
            config = json.loads(channel.readline())
            answer, commands = set_up(config, lambda news: write({"tick": news}))
            write(answer)
            for line in channel:
                command = json.loads(line)
                write(commands[command.pop("command")](**command))
        except Exception as error:
            summary = "".join(traceback.format_exception_only(error)).strip()
            write({"error": summary, "traceback": traceback.format_exc()})
