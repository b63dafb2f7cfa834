"""Makes the pictures of `gradwire top` in docs, from a small job that runs for some twenty seconds.

    python tools/top_pictures.py    # needs Chromium; writes docs/top*.svg and docs/top*.png

Three workers train on this machine under policy `dblp`, and their engines drop packets in bursts.
Its times are those of a machine that does several things at once, so they measure nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
WORKERS, SECONDS = 3, 20.0
COLUMNS = 112


def train(rank: int, store: str, seconds: float) -> None:
    """Trains as one worker of the job."""
    import torch
    import torch.distributed as dist

    import gradwire

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    width = 256
    layers = [torch.nn.Linear(width, width) for _ in range(10)]
    net = torch.nn.Sequential(*(part for each in layers for part in (each, torch.nn.Tanh())))
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.6)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    attachment = gradwire.attach(ddp, "dblp", optimizer=optimizer, spend="lost", p_low=0.1, eta=0.2)
    target = torch.randn(width, width) / width**0.5
    end, going = time.monotonic() + seconds, torch.ones(1)
    while going.item():
        burst = attachment.step % 50 >= 42
        attachment.communicator.set_drop(0.1 if burst else 0.002, 8.0, attachment.step)
        inputs = torch.randn(32, width)
        optimizer.zero_grad()
        loss = (ddp(inputs) - torch.tanh(inputs @ target)).square().mean()
        loss.backward()
        optimizer.step()
        attachment.loss(loss)
        time.sleep(0.03)
        going.fill_(time.monotonic() < end)
        dist.all_reduce(going, dist.ReduceOp.MIN)
    attachment.detach()
    dist.destroy_process_group()


def job_of(number: int) -> str:
    """Waits until a process offers its state; returns its job."""
    from gradwire.live.address import addresses

    while True:
        for address in addresses():
            if int(address.own.partition("-")[0], 16) == number:
                return address.job
        time.sleep(0.2)


def photograph(browser: str, url: str, out: Path, scheme: int) -> None:
    """Saves a picture of a page, in its dark (0) or light (1) form."""
    subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server"),
            *("--hide-scrollbars", "--window-size=900,1000", "--virtual-time-budget=3000"),
            *(f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={out}", url),
        ],
        check=True,
        capture_output=True,
    )
    from PIL import Image  # matplotlib, of the lab, brings it

    with Image.open(out) as picture:
        few = picture.convert("RGB").quantize(64)
    few.save(out, optimize=True)
    print(out, out.stat().st_size, "bytes")


def draw_terminal(figures: dict[str, object], out: Path) -> None:
    """Saves what the terminal shows as a picture without resources from elsewhere."""
    from rich.console import Console

    from gradwire.watch.table import draw

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(draw(figures, COLUMNS, 44, True))
        picture = console.export_svg(title="gradwire top", unique_id="top")
    picture = re.sub(r"\s*<!--.*?-->", "", picture, flags=re.S)
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)
    out.write_text(re.sub(r"[ \t]+$", "", picture, flags=re.M), encoding="utf-8")
    print(out, out.stat().st_size, "bytes")


def main() -> None:
    """Runs the job and makes the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.rank, options.store, SECONDS + 60)
        return
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium is installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", f"{folder}/store", "--rank"]
        workers = [subprocess.Popen([*command, str(rank)]) for rank in range(WORKERS)]
        top = [sys.executable, "-m", "gradwire.cli", "top"]
        server = subprocess.Popen(
            [*top, "--web", job_of(workers[0].pid)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:  # the page shows what was seen since it was opened
                with urllib.request.urlopen(f"{url}state") as answer:
                    figures = json.load(answer)
                time.sleep(1.0)
            photograph(browser, url, DOCS / "top-light.png", 1)
            photograph(browser, url, DOCS / "top-dark.png", 0)
            figures["steps"] = figures["steps"][-40:]
            draw_terminal(figures, DOCS / "top.svg")
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
            for worker in workers:
                worker.terminate()
                worker.wait()


if __name__ == "__main__":
    main()
