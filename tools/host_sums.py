"""Times the sum of a host's ranks at their leader and back: shared memory beside Gloo's groups.

    python tools/host_sums.py                  # 2 to 4 ranks, buckets of 1 to 25 MiB
    python tools/host_sums.py --rounds 50

Both ways take turns round by round, in the same processes. A row has the median of the longest
rank's time and of the processor time of all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.training.hosts.rows import Rows, has_shard
from gradwire.transport.host_link import Listener, connect

RANKS, MEBIBYTES = (2, 3, 4), (1, 4, 16, 25)


class Inbox:
    """Keeps the messages of a rank's connections, which hold it weakly."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[tuple[Any, int | None]] = queue.SimpleQueue()

    def take(self, _place: int, message: Any, memory: int | None) -> None:
        self.messages.put((message, memory))

    def gone(self, place: int) -> None:
        self.messages.put((f"rank {place} has ended", None))


def shared(rank: int, ranks: int, elements: int) -> Callable[[torch.Tensor], None]:
    """Returns the way through shared memory, with the messages of `gradwire.training.hosts`."""
    address: list[Any] = [None]
    listener = Listener() if rank == 0 else None
    if listener is not None:
        address = [listener.address]
    dist.broadcast_object_list(address, 0)
    link = (
        connect(address[0], rank, 30)
        if listener is None
        else listener.accept([*range(1, ranks)], 30)
    )
    inbox = Inbox()
    link.listen(inbox.take, inbox.gone)
    if rank == 0:
        memory = Rows.make(ranks, elements)
        link.send("memory", memory=memory)
    else:
        memory = inbox.messages.get()[1] or -1
    rows = Rows(memory, ranks, elements)
    os.close(memory)
    helpers = [place for place in range(1, ranks) if has_shard(elements, ranks, place)]

    def await_messages(count: int) -> None:
        for _ in range(count):
            inbox.messages.get()

    def carry(bucket: torch.Tensor) -> None:
        np.copyto(rows.of(rank), bucket.numpy())
        if rank == 0:
            await_messages(ranks - 1)
            link.send("sum")
            rows.add(0, 1 / ranks)
            await_messages(len(helpers))
            link.send("result")
        else:
            link.send("ready")
            await_messages(1)
            if rank in helpers:
                rows.add(rank, 1 / ranks)
                link.send("summed")
            await_messages(1)

    return carry


def groups(rank: int, ranks: int) -> Callable[[torch.Tensor], None]:
    """Returns the way by a reduce to the leader and a broadcast, in a group of the host's ranks."""
    group = dist.new_group([*range(ranks)], use_local_synchronization=True)

    def carry(bucket: torch.Tensor) -> None:
        dist.reduce(bucket, 0, group=group)
        if rank == 0:
            bucket.mul_(1 / ranks)
        dist.broadcast(bucket, 0, group=group)

    return carry


def work(rank: int, ranks: int, store: str, mebibytes: int, rounds: int, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    elements = mebibytes << 18
    ways = {"shared memory": shared(rank, ranks, elements), "Gloo's groups": groups(rank, ranks)}
    gradient = torch.from_numpy(np.random.default_rng(rank).standard_normal(elements, np.float32))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    bucket = torch.empty(elements)
    for turn in range(rounds + 2):  # the first two make memory and connections
        for name, carry in ways.items():
            bucket.copy_(gradient)
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            carry(bucket)
            taken = [0.0] * ranks
            own = (time.perf_counter() - began, time.process_time() - used)
            dist.all_gather_object(taken, own)
            if turn > 1:
                found[name].append((max(each[0] for each in taken), sum(each[1] for each in taken)))
    if rank == 0:
        out.put(
            {
                name: [statistics.median(each) for each in zip(*found[name], strict=True)]
                for name in ways
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    spawn = multiprocessing.get_context("spawn")
    for ranks, mebibytes in itertools.product(RANKS, MEBIBYTES):
        with tempfile.TemporaryDirectory() as folder:
            out = spawn.Queue()
            rest = (ranks, f"{folder}/store", mebibytes, rounds, out)
            processes = [spawn.Process(target=work, args=(r, *rest)) for r in range(ranks)]
            for each in processes:
                each.start()
            for name, (wall, used) in out.get().items():
                row = f"{1e3 * wall:7.2f} ms, {1e3 * used:7.2f} ms of processor time"
                print(f"{ranks} ranks, {mebibytes:2} MiB, {name:13}: {row}", flush=True)
            for each in processes:
                each.join()


if __name__ == "__main__":
    main()
