"""Judges what two hosts have measured: sentences, and what to type."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.core.plan import SMALLEST_DATAGRAM
from gradwire.doctor.findings import Finding
from gradwire.doctor.measure import Measurement, Way

NOTICED_LOSS, GRAVE_LOSS = 0.002, 0.1
"""Shares of packets lost: what is worth a warning, and a problem."""


def path_findings(found: Measurement, here: str, there: str) -> list[Finding]:
    findings = []
    lost = "lost" in (found.there.trains, found.back.trains)  # which ends a measurement, too
    if not found.complete and not lost:
        findings.append(
            Finding(
                "problem",
                "answers",
                f"The answers of {there} stopped in the middle of the measurement: it was ended, "
                "or the network loses nearly everything.",
            )
        )
    ways = (
        (f"{here} → {there}", here, there, found.there),
        (f"{there} → {here}", there, here, found.back),
    )
    findings += _mtu(found, ways)
    for check in (_ecn, _trains, _loss):
        for name, sender, receiver, way in ways:
            findings += check(name, sender, receiver, way)
    return findings


def accept(receiver: str, sender: str, port: int | None) -> str:
    """Returns what lets UDP pass into a host, to be typed there."""
    where = "" if port is None else f" --dport {port}"
    return f"iptables -I INPUT -p udp -s {sender}{where} -j ACCEPT   # on {receiver}"


Ways = tuple[tuple[str, str, str, Way], ...]


def _mtu(found: Measurement, ways: Ways) -> list[Finding]:
    findings = []
    for name, sender, _, way in ways:
        if way.datagram == 0 or way.datagram >= found.limit:
            continue
        size = way.datagram
        text = (
            f"{name}: the path carries datagrams of {size} bytes (MTU {size + found.headers}), the "
            f"interfaces and routes {found.limit}."
        )
        if size < SMALLEST_DATAGRAM:
            need = f" gradwire needs {SMALLEST_DATAGRAM}."
            findings.append(Finding("problem", "path MTU", text + need))
            continue
        text += (
            " A job finds out in its first steps, and sends these in parts. Correct the MTU of "
            f"{sender}, or choose the size."
        )
        typed = f"export GRADWIRE_DATAGRAM={size}   # on all hosts"
        findings.append(Finding("warning", "path MTU", text, typed))
    sizes = {way.datagram for _, _, _, way in ways}
    if not findings and 0 not in sizes:
        text = f"Datagrams of {found.limit} bytes pass both ways, the longest that both hosts send."
        findings.append(Finding("ok", "path MTU", text))
    return findings


def _ecn(name: str, sender: str, receiver: str, way: Way) -> list[Finding]:
    if way.ecn != "cleared":
        return []
    text = (
        f"{name}: the network changes the ECN field; jobs find out and go on without ECN on this "
        "path."
    )
    return [Finding("warning", "ECN", text, "export GRADWIRE_ECN=false   # to switch it off")]


def _trains(name: str, sender: str, receiver: str, way: Way) -> list[Finding]:
    if way.trains == "lost":
        text = (
            f"{name}: the network carries single datagrams and loses all trains (UDP_SEGMENT), "
            "which gradwire sends. A tunnel or an interface segments them wrongly."
        )
        typed = f"ethtool -K INTERFACE tx-udp-segmentation off   # on {sender}"
        return [Finding("problem", "GSO", text, typed)]
    if way.trains == "refused":
        text = (
            f"{name}: the interface of {sender} refuses trains (UDP_SEGMENT), so every datagram "
            "costs a system call."
        )
        typed = f"ethtool -K INTERFACE tx-udp-segmentation on tx-checksumming on   # on {sender}"
        return [Finding("warning", "GSO", text, typed)]
    return []


def _loss(name: str, sender: str, receiver: str, way: Way) -> list[Finding]:
    findings = []
    if way.overflows:
        text = (
            f"{name}: the receive buffer of {receiver} ran over and lost {way.overflows} "
            "packets of the measurement."
        )
        typed = f"sysctl -w net.core.rmem_max=16777216   # on {receiver}"
        findings.append(Finding("warning", "buffers", text, typed))
    if way.packets and way.loss >= NOTICED_LOSS:
        grave = way.loss >= GRAVE_LOSS
        text = f"{name}: {way.loss:.1%} of {way.packets} packets were lost"
        text += (
            ": look for a bad cable, a duplex mismatch or a policer."
            if grave
            else ". gradwire bears that; other traffic or a bad cable may cause it."
        )
        typed = f"ip -s link; nstat -az UdpRcvbufErrors   # on {receiver}"
        findings.append(Finding("problem" if grave else "warning", "loss", text, typed))
    return findings


def rate_text(rate: int) -> str:
    if rate == 0:
        return "–"
    return f"{rate / 1e9:.1f} Gbit/s" if rate >= 999_500_000 else f"{rate / 1e6:.0f} Mbit/s"


def rtt_text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def way_rows(found: Measurement) -> list[tuple[str, str, str]]:
    def row(name: str, of: Callable[[Way], str]) -> tuple[str, str, str]:
        return name, of(found.there), of(found.back)

    return [
        row("longest datagram", lambda way: f"{way.datagram} bytes" if way.datagram else "–"),
        row("rate", lambda way: rate_text(way.rate)),
        row("loss", lambda way: f"{way.loss:.2%} of {way.packets}" if way.packets else "–"),
        row("ECN", lambda way: way.ecn),
        row("trains (GSO)", lambda way: way.trains),
    ]
