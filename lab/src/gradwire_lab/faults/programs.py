"""The programs that a fork server forks: the store of a job, its ranks and its servers.

Each gets a configuration and tells what becomes of it, line by line.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.errors import GradwireError, RendezvousError, TransferError
from gradwire.core.settings import Settings
from gradwire.server import serve
from gradwire_lab.contest.fingerprint import fingerprint
from gradwire_lab.faults.soak_rank import SoakRank
from gradwire_lab.faults.strikes import Strike, engine_socket

INPUTS, WIDTH = 64, 1024
"""Of the model, whose gradient is about half a megabyte."""
SHARES = {"push": 0.25, "turn": 0.6, "pull": 0.9}
"""The phases of a step that are told by the share of its bytes that a rank has sent."""
LOOK_S = 0.002
STORE_S = 60.0

Config = dict[str, Any]


class Tell:
    """A tell writes lines to the ground: an event, the time, and what belongs to it."""

    def __init__(self, channel: socket.socket) -> None:
        """Take over the channel."""
        self._channel = channel
        self._lock = threading.Lock()

    def __call__(self, event: str, **more: Any) -> None:
        """Tell one event."""
        line = json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n"
        with self._lock:
            self._channel.sendall(line.encode())

    def wait(self) -> bool:
        """Wait until the ground says to go on, or closes the channel, as it does at a job's end.

        Returns:
            Whether to go on.
        """
        return bool(self._channel.recv(1))


def store(config: Config, tell: Tell) -> int:
    """Host the store of all jobs, as the agent of a launcher does."""
    held = TCPStore(config["host"], config["port"], None, is_master=True, wait_for_workers=False)
    tell("ready")
    tell.wait()
    del held
    return 0


def _join(config: Config) -> Any:
    host, port = config["store"]
    return TCPStore(host, port, None, is_master=False, wait_for_workers=False)


def server(config: Config, tell: Tell) -> int:
    """Serve one job, as `gradwire server` does."""
    settings = Settings.build(config["settings"])
    strike = Strike.of(config)
    if strike.phase == "attach":
        threading.Thread(target=_when_open, args=(strike, tell), daemon=True).start()

    def say(event: str, text: str) -> None:
        tell(event)
        if event == "serving":
            strike.at("serving", 0, tell)

    try:
        serve(
            _join(config),
            workers=config["workers"],
            index=config["index"],
            settings=settings,
            say=say,
        )
    except (GradwireError, ValueError, MemoryError) as error:
        tell_error(tell, error, -1, "server")
        return 1
    tell("done")
    return 0


def tell_error(tell: Tell, error: BaseException, step: int, where: str) -> None:
    """Tell an error with its fields."""
    tell(
        "error",
        kind=type(error).__name__,
        text=str(error) or repr(error),
        step=getattr(error, "step", step),
        rank=getattr(error, "rank", None),
        ranks=list(getattr(error, "ranks", ())),
        cause=getattr(error, "cause", ""),
        where=where,
        trace=traceback.format_exc(),
    )


def _when_open(strike: Strike, tell: Tell) -> None:
    """Strike as soon as this process's engine has its socket, so while the ranks meet."""
    while engine_socket() is None:
        time.sleep(LOOK_S)
    strike.at("attach", 0, tell)


class Rank:
    """A rank trains one replica."""

    def __init__(self, config: Config, tell: Tell) -> None:
        """Read the configuration."""
        self.config = config
        self.tell = tell
        self.rank: int = config["rank"]
        self.world: int = config["world"]
        self.steps: int = config["steps"]
        self.strike = Strike.of(config)
        self.step = 0
        self._sent = 0.0  # bytes of the step before
        self._base = 0.0

    def run(self) -> int:
        """Train; returns the exit status."""
        where = "join"
        try:
            joined = _join(self.config)
            dist.init_process_group(
                "gloo",
                store=PrefixStore(self.config["prefix"], joined),
                rank=self.rank,
                world_size=self.world,
                timeout=datetime.timedelta(seconds=STORE_S),
            )
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, INPUTS))
            self._model = DistributedDataParallel(net, bucket_cap_mb=0.25)
            self._optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
            self._hook(net)
            for _ in range(2):  # torch arranges its buckets anew, over Gloo
                self._loss().backward()  # type: ignore[no-untyped-call]
            where = "attach"
            self.strike.at("before", 0, self.tell)
            if self.strike.phase == "attach":
                watch = threading.Thread(target=_when_open, args=(self.strike, self.tell))
                watch.daemon = True
                watch.start()
            self._attachment = gradwire.attach(
                self._model,
                self.config.get("policy", "reliable"),
                optimizer=self._optimizer,
                **self.config["settings"],
            )
            self.tell("attached")
            self.strike.at("attached", 0, self.tell)
            where = "train"
            self._train()
            where = "detach"
            self.strike.at("detach", self.steps, self.tell)
            self._attachment.detach()
            self.tell("done", fingerprint=fingerprint(net), steps=self.steps)
            dist.destroy_process_group()
        except Exception as error:  # whatever ends a rank is told
            tell_error(self.tell, error, self.step, where)
            if where == "train":
                self._tell_fields()
            return 1
        return 0

    def _tell_fields(self) -> None:
        """Tell the failure once more, as an error of gradwire's own: torch's has its text only."""
        try:
            self._loss()
        except (TransferError, RendezvousError) as error:
            tell_error(self.tell, error, self.step, "again")
        except Exception as error:
            tell_error(self.tell, error, self.step, "other")

    def _loss(self) -> torch.Tensor:
        chance = torch.Generator().manual_seed(1000 * self.step + self.rank)
        inputs = torch.randn(16, INPUTS, generator=chance)
        loss: torch.Tensor = self._model(inputs).square().mean()
        return loss

    def _hook(self, net: nn.Sequential) -> None:
        """Strike in the backward pass before the gradients that come last are there."""
        first = next(net.parameters())
        first.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: self._at("backward")
        )

    def _at(self, phase: str) -> None:
        self.strike.at(phase, self.step, self.tell)

    def _train(self) -> None:
        for step in range(self.steps):
            self.step = step
            self._at("forward")
            with self._watched():
                self._optimizer.zero_grad()
                self._loss().backward()  # type: ignore[no-untyped-call]
            self._at("optimizer")
            self._optimizer.step()
            self.tell("step", step=self.step)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Strike as soon as a share of the step's bytes has been sent."""
        share = SHARES.get(self.strike.phase)
        if share is None:
            yield
            return
        over = threading.Event()
        base = self._bytes()
        if self.step == self.strike.step:
            target = base + share * self._sent

            def watch() -> None:
                while not over.is_set():
                    if self._bytes() >= target:
                        self._at(self.strike.phase)
                        return
                    time.sleep(LOOK_S)

            threading.Thread(target=watch, daemon=True).start()
        yield
        over.set()
        self._sent = self._bytes() - base

    def _bytes(self) -> float:
        counters = self._attachment.counters()
        return counters.get("bytes_sent", 0.0)


def rank(config: Config, tell: Tell) -> int:
    """Be one rank of a job."""
    os.environ["RANK"] = str(config["rank"])
    os.environ["WORLD_SIZE"] = str(config["world"])
    return Rank(config, tell).run()


def soak(config: Config, tell: Tell) -> int:
    """Be one rank of a soak, in one life after another."""
    os.environ["RANK"] = str(config["rank"])
    os.environ["WORLD_SIZE"] = str(config["world"])
    rank, life = SoakRank(config, _join(config), tell), config["life"]
    while True:
        rank.live(life)
        if not tell.wait():
            return 0
        life += 1


PROGRAMS: dict[str, Callable[[Config, Tell], int]] = {
    "store": store,
    "server": server,
    "rank": rank,
    "soak": soak,
}

__all__ = ["PROGRAMS", "Tell"]
