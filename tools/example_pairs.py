"""Times the first example with gradwire and without it, in turn, on this machine.

    python tools/example_pairs.py             # ten pairs of 100 steps; nothing else should run
    python tools/example_pairs.py --pairs 3 --policy reliable

Prints the steps per second of each run, and the median over the pairs of how long gradwire's steps
take relative to those without it. Of gradwire's runs it counts the steps, by their reports, that
went in another encoding than most.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_ddp.py"


def run(policy: str, steps: int, folder: str, report: Path | None = None) -> float:
    """Runs the example; returns its steps per second. What torchrun logs goes with the folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--policy", policy, "--steps", str(steps)]
    if report is not None:
        command += ["--report", str(report)]
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": folder},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    found = re.search(r"^([\d.]+) steps/s$", done.stdout, re.M)
    if done.returncode or found is None:
        sys.exit(f"the example failed under policy {policy}:\n{done.stdout}")
    return float(found[1])


def in_another_encoding(report: Path) -> int:
    """Returns how many steps of a report went in another encoding than most."""
    lines = report.read_text(encoding="utf-8").splitlines()
    shares = collections.Counter(json.loads(line)["encoded_share"] for line in lines)
    return len(lines) - max(shares.values())


def main() -> None:
    """Times the pairs and prints them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--policy", default="adaptive")
    options = parser.parse_args()
    relative = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            report = Path(folder) / f"{pair}.jsonl"
            runs = [("none", None), (options.policy, report)]
            if pair % 2:
                runs.reverse()  # whichever comes first has no advantage
            rates = {policy: run(policy, options.steps, folder, path) for policy, path in runs}
            relative.append(rates["none"] / rates[options.policy])
            print(
                f"pair {pair + 1}: {rates['none']:.2f} steps/s without, "
                f"{rates[options.policy]:.2f} with {options.policy}, which takes "
                f"{relative[-1]:.3f} of the time; {in_another_encoding(report)} steps in another "
                "encoding than most",
                flush=True,
            )
    print(
        f"median of {options.pairs} pairs: {statistics.median(relative):.3f} "
        f"({min(relative):.3f} to {max(relative):.3f})"
    )


if __name__ == "__main__":
    main()
