"""What authenticated and encrypted datagrams cost, over those that go as they are."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
from typing import Any

from rich.table import Table

BASE = "auth none"
_CIPHERS = ("aes-128-gcm", "chacha20-poly1305")
_DATAGRAM = 1472
_SPEED_SECONDS = 1


def kinds() -> dict[str, dict[str, object]]:
    """Return the settings to compare, by the contestants' names, the base first."""
    found: dict[str, dict[str, object]] = {
        f"auth {auth}": {"auth": auth} for auth in ("none", "session", "whole")
    }
    return {**found, "key": {"key": secrets.token_hex(32)}}


def openssl_speed() -> dict[str, float]:
    """Return the bytes per second that `openssl speed` encrypts in pieces of a datagram's length.

    Without the command there are none.
    """
    if shutil.which("openssl") is None:
        return {}
    found = {}
    for cipher in _CIPHERS:
        asked = ["-evp", cipher, "-bytes", str(_DATAGRAM), "-seconds", str(_SPEED_SECONDS)]
        done = subprocess.run(
            ["openssl", "speed", *asked], capture_output=True, text=True, check=False
        )
        lines = re.findall(r"(\d+(?:\.\d+)?)k\s*$", done.stdout, re.MULTILINE)
        if lines:
            found[cipher] = 1e3 * float(lines[-1])
    return found


def costs(contestants: dict[str, dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return times and processor times of the ranks over those of the base, by contestant."""
    base = contestants[BASE]
    return {
        name: (
            each["median"] / base["median"],
            each["processor_per_gb"] / base["processor_per_gb"],
        )
        for name, each in contestants.items()
        if name in kinds()
    }


def table(title: str, cells: list[dict[str, Any]], size_text: Any) -> Table:
    """Return the table of what each size's datagrams cost, over those of `auth="none"`."""
    speeds = [f"{name} {rate / 1e9:.2f} GB/s" for name, rate in openssl_speed().items()]
    made = Table(
        title=f"{title}: over {BASE}",
        caption=f"openssl speed, {_DATAGRAM} bytes: {', '.join(speeds) or 'no openssl here'}",
    )
    for column in ("size", "contestant", "time", "processor"):
        made.add_column(column, justify="right" if column in ("time", "processor") else "left")
    for cell in cells:
        for name, (time, processor) in costs(cell["contestants"]).items():
            size = size_text(cell["bytes"]) if name == BASE else ""
            made.add_row(size, name, f"{time:.3f}", f"{processor:.3f}")
        made.add_section()
    return made
