"""The memory traffic of an exact all-reduce beside its bytes: what the engine reads and writes.

Ranks in one process hand each other their trains in virtual time, under valgrind's DHAT, which
counts the bytes read and written of each allocation. The copies that stand for the kernel's are
taken off. Counted is what grows with the bucket: buckets, receive buffers, sums and contributions
that wait for their turn, whether or not a processor's caches hold them.

    python engine/tests/memory.py [RANKS …]    builds memory.cc into build/work and runs it
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from work import BUILD, built

ELEMENTS = 1_000_000
ROWS = ("received", "buckets", "sums", "waiting")


def traffic(ranks: int) -> dict[str, tuple[float, float]]:
    """Bytes read and written for each byte of the buckets, by row."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        command = ["valgrind", "--tool=dhat", f"--dhat-out-file={profile}"]
        command += [f"{BUILD}/gradwire_memory", str(ranks), str(ELEMENTS)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        tree = json.loads(profile.read_text())
    bucket, inbox, pushed, pulled = map(int, done.stdout.split())
    total = bucket * ranks
    read = dict.fromkeys(ROWS, 0)
    written = dict.fromkeys(ROWS, 0)
    for point in tree["pps"]:
        frames = " ".join(tree["ftbl"][frame] for frame in point["fs"])
        size = point["tb"] // point["tbk"]
        if "ShardSum::" in frames:
            row = "sums"
        elif re.search("Aggregator::add|Turns::", frames):
            row = "waiting"
        elif size in (bucket, inbox):
            row = "buckets" if size == bucket else "received"
        else:
            continue
        read[row] += point["rb"]
        written[row] += point["wb"]
    # The caller fills its bucket; the kernel reads what is sent, and writes what is received.
    read["buckets"] -= pushed + pulled
    written["buckets"] -= total
    written["received"] = 0
    return {row: (read[row] / total, written[row] / total) for row in ROWS}


def main() -> int:
    """Measures and prints; see the module's text."""
    if not shutil.which("valgrind"):
        print("memory: valgrind not found; apt-get install valgrind", file=sys.stderr)
        return 1
    built("gradwire_memory")
    for ranks in [int(word) for word in sys.argv[1:]] or [2, 4, 8]:
        rows = traffic(ranks)
        total = sum(map(sum, rows.values()))
        print(f"{ranks} ranks: {total:.2f} bytes of memory traffic for each byte of a bucket")
        for row, (read, written) in rows.items():
            print(f"  {row:10} {read:6.2f} read {written:6.2f} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
