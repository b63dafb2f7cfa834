"""`gradwire probe`: measures the path between two hosts, without torch and without a job."""

from __future__ import annotations

import errno
import ipaddress
import json
import signal
import socket
from dataclasses import asdict
from typing import Annotated

import typer

from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.doctor.findings import Finding, as_json, exit_status, lines, summary, wrapped
from gradwire.doctor.host import environment_settings
from gradwire.doctor.judge import accept, path_findings, rtt_text, way_rows
from gradwire.doctor.prober import Measurement, Prober
from gradwire.doctor.responder import Event, Responder
from gradwire.doctor.udp import SocketAddress, UdpSocket, place_text
from gradwire.transport.addresses import (
    LocalAddress,
    local_addresses,
    on_first_free,
    reachable_interfaces,
    route_mtu,
    with_port,
)

__all__ = ["app", "reached"]

app = typer.Typer(add_completion=False)

PORT = 28_900
"""The port of `gradwire probe --listen` where nothing chooses another."""
CONTACT_S = 5.0
IDLE_S = 300.0
LONGEST_S = 60.0
"""How long a measurement takes at most, in seconds."""
LONGEST_WAIT_S = 86_400.0


@app.command()
def probe(
    target: Annotated[
        str,
        typer.Argument(
            metavar="HOST[:PORT]",
            help="the host that listens (an IPv6 address with a port in brackets); with --listen "
            "the port, else GRADWIRE_PORT, else 28900",
        ),
    ] = "",
    listen: Annotated[bool, typer.Option("--listen", help="answer the probes of others")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="seconds to wait for the first answer (5); with --listen seconds without a "
            "probe until the end (300)"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure the network between two hosts: `gradwire probe --listen` there, then this here.

    It measures in both directions: whether UDP passes, round-trip time, path MTU, ECN, rate, loss
    and segmentation offloads. GRADWIRE_INTERFACE, GRADWIRE_PORT and GRADWIRE_DSCP act as in a
    job. The exit status is 0 where all is well or there are warnings, 1 where there is a problem,
    2 for an impossible option.
    """
    try:
        settings = environment_settings()
        seconds = _seconds(timeout, IDLE_S if listen else CONTACT_S)
        if listen:
            raise typer.Exit(_listen(target, settings, seconds, as_json))
        raise typer.Exit(_probe(target, settings, seconds, as_json))
    except ConfigError as error:
        if as_json:
            typer.echo(
                json.dumps({"status": "error", "setting": error.setting, "error": str(error)})
            )
        else:
            typer.echo(f"gradwire probe: {error}", err=True)
        raise typer.Exit(2) from error


def _seconds(timeout: float | None, usual: float) -> float:
    if timeout is None:
        return usual
    if not 0.1 <= timeout <= LONGEST_WAIT_S:
        raise ConfigError.of("timeout", timeout, f"seconds, 0.1 to {LONGEST_WAIT_S:g}")
    return timeout


# ---------------------------------------------------------------------------- the one that listens


def _listen(target: str, settings: Settings, idle_s: float, as_json: bool) -> int:
    port = _port(target, target) if target else settings.ports[0] or PORT
    sockets = _listening(settings, port)

    def say(name: str, text: str, **more: object) -> None:
        print(json.dumps({"event": name, "message": text, **more}) if as_json else text, flush=True)

    def notice(event: Event) -> None:
        say(event.name, event.text, peer=event.peer)
        if event.name == "unheard" and not as_json:
            host = event.peer.rpartition(":")[0]
            print(f"  type: {accept(host, event.local, None)}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    responder = Responder(sockets, notice)
    addresses = _own_addresses(settings)
    typed = f"gradwire probe {addresses[0] if port == PORT else with_port(addresses[0], port)}"
    text = (
        f"Listening on UDP port {port} of {', '.join(addresses)}.\nType on the other host: {typed}"
    )
    try:
        say("listening", text, port=port, addresses=addresses)
        responder.serve(idle_s)
    except KeyboardInterrupt:
        pass
    finally:
        for each in sockets:
            each.close()
    if responder.hellos == 0:
        text = (
            f"Nothing arrived at UDP port {port}: nobody probed this host, or a firewall here or "
            "between drops UDP."
        )
    else:
        text = (
            f"Measurements that came to their end: {responder.finished}. Hosts at which no answer "
            f"arrived: {responder.unheard}."
        )
    say("ended", text, measurements=responder.finished, unheard=responder.unheard)
    return 0 if responder.finished and not responder.unheard else 1


def _own_addresses(settings: Settings) -> list[str]:
    """Returns the addresses at which others may reach this host, the likeliest first."""
    chosen = [each.address for each in local_addresses(settings.interface, None)]
    if settings.interface is None:
        others = [address for each in reachable_interfaces().values() for address in each]
        chosen = [*(each for each in chosen if each in others), *others]
    return list(dict.fromkeys(chosen)) or ["127.0.0.1"]


def _listening(settings: Settings, port: int) -> list[UdpSocket]:
    """Opens the sockets: of the chosen interface, or of all addresses of both versions of IP."""
    if settings.interface is None:
        wanted = ["0.0.0.0", "::"] if socket.has_ipv6 else ["0.0.0.0"]
    else:
        wanted = [each.bound for each in local_addresses(settings.interface, None)]
    sockets: list[UdpSocket] = []
    for address in wanted:
        try:
            sockets.append(UdpSocket(address, port, settings.dscp))
        except OSError as error:
            if address == "::" and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # IPv6 is switched off
            for each in sockets:
                each.close()
            allowed = f"cannot be opened ({error.strerror}); choose another, as in {PORT + 1}"
            raise ConfigError.of("port", port, allowed) from error
    return sockets


# ---------------------------------------------------------------------------- the one that measures


def _probe(target: str, settings: Settings, contact_s: float, in_json: bool) -> int:
    host, port = _host_and_port(target, settings.ports[0] or PORT)
    own, peer = _ends(host, port, settings)
    limit = own.datagram(route_mtu(own.bound, _plain(peer)))
    if settings.datagram:
        limit = min(limit, settings.datagram)
    try:
        socket_ = on_first_free(
            settings.ports, lambda port: UdpSocket(own.bound, port, settings.dscp)
        )
    except OSError as error:
        raise ConfigError.of("port", settings.port, f"cannot be opened: {error}") from error
    try:
        socket_.connect(peer)
        found = Prober(socket_, peer, limit, LONGEST_S + contact_s).measure(contact_s)
    finally:
        socket_.close()
    here, there = own.address, str(peer[0])
    findings = reached(found, here, there, port)
    if found.answered:
        findings += path_findings(found, here, there)
    if in_json:
        ends = {"from": here, "interface": own.interface, "to": there, "port": port}
        typer.echo(json.dumps({**as_json(findings), **ends, "measurement": asdict(found)}))
        return exit_status(findings)
    typer.echo(
        f"gradwire probe: {here} ({own.interface or 'no interface'}) to {place_text(peer)}\n"
    )
    typer.echo("\n".join(lines(findings)))
    if found.answered:
        typer.echo("\n" + _table(found))
    typer.echo(f"\n{summary(findings)}")
    return exit_status(findings)


def reached(found: Measurement, here: str, there: str, port: int) -> list[Finding]:
    """Returns whether datagrams pass between the hosts, as far as the prober alone can know."""
    if found.answered:
        return [Finding("ok", "UDP", f"Datagrams pass from {here} to {there} and back.")]
    listens = f"gradwire probe --listen {port}   # on {there}"
    refusal = found.refusal
    if "refused" in refusal:
        text = (
            f"{there} is reached and refuses UDP port {port}: nothing listens there, or a firewall "
            "rejects it."
        )
        return [Finding("problem", "UDP", text, listens)]
    if refusal:
        text = f"The kernel of {here} refuses datagrams to {there}: {refusal}."
        typed = "ip route get " + there + "; iptables -S OUTPUT"
        return [Finding("problem", "UDP", text, typed)]
    text = (
        f"No answer of {there} arrives at {here}. UDP is blocked on the way back if "
        "`gradwire probe --listen` prints there that datagrams arrive, and on the way there if it "
        "prints nothing."
    )
    typed = f"{accept(there, here, port)}\n{accept(here, there, None)}"
    return [Finding("problem", "UDP", text, typed)]


def _table(found: Measurement) -> str:
    rtt = found.rtt
    times = ", ".join(
        f"{name} {rtt_text(value)}"
        for name, value in (("min", rtt.least), ("median", rtt.median), ("p99", rtt.p99))
    )
    rows = [("", "there", "back"), *way_rows(found)]
    first, there, back = (max(map(len, column)) for column in zip(*rows, strict=True))
    table = [f"  {row[0]:{first}}  {row[1]:>{there}}  {row[2]:>{back}}" for row in rows]
    answered = f"{rtt.sent - rtt.lost} of {rtt.sent} answered"
    last = wrapped(f"round-trip time: {times} ({answered})", 2)
    return "\n".join([*table, "", *(f"  {line}" for line in last)])


def _ends(host: str, port: int, settings: Settings) -> tuple[LocalAddress, SocketAddress]:
    """Returns the local address that gradwire would use towards a host, and the host's place."""
    own = local_addresses(settings.interface, host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError.of("HOST", host, f"it has no address ({error})") from error
    for each in own:
        family = socket.AF_INET if each.version == 4 else socket.AF_INET6
        for candidate in found:
            if candidate[0] == family:
                return each, candidate[4]
    versions = " and ".join(f"IPv{each.version}" for each in own)
    raise ConfigError.of("HOST", host, f"it has no address of {versions}, as this host has")


def _plain(peer: SocketAddress) -> str:
    text = place_text(peer).rpartition(":")[0]
    return text.removeprefix("[").removesuffix("]")


def _host_and_port(target: str, usual: int) -> tuple[str, int]:
    """Splits HOST, HOST:PORT, an IPv6 address or [IPv6 address]:PORT; raises ConfigError."""
    if not target:
        raise ConfigError.about(
            "no HOST",
            "type gradwire probe --listen on the other host, then gradwire probe HOST here",
            setting="HOST",
        )
    plain = target.removeprefix("[").removesuffix("]")
    try:
        ipaddress.IPv6Address(plain.partition("%")[0])
        return plain, usual
    except ValueError:
        pass
    host, colon, port = target.rpartition(":")
    if not colon:
        return target, usual
    return host.removeprefix("[").removesuffix("]"), _port(port, target)


def _port(text: str, value: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 65_536:
        return int(text)
    raise ConfigError.of("PORT", value, "a UDP port from 1 to 65535")
