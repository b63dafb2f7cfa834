"""Times what each rank of a large job computes of all ranks' introductions, without a network.

    python tools/introductions.py              # 64, 256, 1,024 and 2,048 hosts of one rank
    python tools/introductions.py 4096

A rank reads the outcome of the exchange, parses the introductions in it, and checks them. The size
of that outcome is what the host of the job's store sends to every rank.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from torch.distributed import HashStore

from gradwire.transport.addresses import LocalAddress
from gradwire.transport.introductions import Introduction, check_introductions
from gradwire.transport.meeting import Meeting, Outcome


def introduction(rank: int, ranks: int) -> Introduction:
    """Returns that of a rank with a host of its own, which has containers and a second network."""
    low = f"{rank // 256}.{rank % 256}"
    return Introduction(
        rank,
        protocol=1,
        addresses=(LocalAddress(f"10.0.{low}", "eth0", 1500),),
        host=f"node{rank}",
        identity=f"{rank:032x}/4026531992",
        interfaces={
            "eth0": [f"10.0.{low}", f"fd00::{rank:x}"],
            "eth1": [f"172.16.{low}"],
            "docker0": ["172.17.0.1"],
        },
        configuration={"route": "sharded", "servers": 0, "workers": ranks, "cores": 1},
    )


def main() -> None:
    """Prints a line for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ranks", nargs="*", type=int, default=[64, 256, 1024, 2048])
    for ranks in parser.parse_args().ranks:
        texts = [json.dumps(asdict(introduction(rank, ranks))) for rank in range(ranks)]
        outcome = Outcome(texts=texts).dump()
        meeting = Meeting(HashStore(), "t", endpoint=0, workers=ranks, servers=0, timeout_s=1.0)
        begun = time.perf_counter()
        everybody = [Introduction.parse(text) for text in Outcome.load(outcome).texts]
        parsed = time.perf_counter()
        check_introductions(meeting, everybody)
        checked = time.perf_counter()
        print(
            f"{ranks} ranks: {checked - begun:.3f} s each ({parsed - begun:.3f} to parse "
            f"{len(outcome) / 1e6:.2f} MB, {checked - parsed:.3f} to check)",
            flush=True,
        )


if __name__ == "__main__":
    main()
