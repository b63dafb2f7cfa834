"""What a rank's process uses in its rounds: processor time, wake-ups, calls, packets, memory."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path

_RESET_PEAK = "5"


class Usage:
    """A usage adds up what this process spends in rounds."""

    def __init__(self) -> None:
        self._processor = self._aside = 0.0
        self._switches = self._calls = 0

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Count what all threads of the process spend in this context."""
        calls, before = _file_calls(), resource.getrusage(resource.RUSAGE_SELF)
        yield
        after = resource.getrusage(resource.RUSAGE_SELF)
        self._processor += _processor(after) - _processor(before)
        self._switches += after.ru_nvcsw - before.ru_nvcsw
        self._calls += _file_calls() - calls

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Count the processor time of this thread that belongs to no contestant."""
        before = time.thread_time()
        yield
        self._aside += time.thread_time() - before

    def so_far(self) -> dict[str, float]:
        """Return the sums so far; the peak of memory is the one since the last call.

        The keys are ``processor`` (seconds in rounds), ``aside`` (seconds between them),
        ``wakeups`` (voluntary switches of all threads in rounds), ``file_calls`` (reads and writes
        of files and connections in rounds, not those of datagrams), ``tcp_packets`` (sent by this
        host), ``resident`` and ``peak`` (bytes).
        """
        resident, peak = _memory()
        with contextlib.suppress(OSError):  # a kernel may lack it; the peak then is the process's
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        return {
            "processor": self._processor,
            "aside": self._aside,
            "wakeups": self._switches,
            "file_calls": self._calls,
            "tcp_packets": _tcp_packets(),
            "resident": resident,
            "peak": peak,
        }


def _processor(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _file_calls() -> int:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # the kernel keeps no accounts of it
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["syscr"]) + int(counts["syscw"])


def _tcp_packets() -> int:
    names, values = (
        line.split()
        for line in Path("/proc/self/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return int(values[names.index("OutSegs")])


def _memory() -> tuple[int, int]:
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "VmHWM"):
            found[key] = int(value.split()[0]) * 1024
    return found["VmRSS"], found["VmHWM"]
