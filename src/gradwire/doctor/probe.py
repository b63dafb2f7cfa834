"""`gradwire probe`: measures the path between two hosts, without torch and without a job."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from gradwire.core.errors import ConfigError
from gradwire.core.plan import LARGEST_DATAGRAM
from gradwire.core.settings import Settings
from gradwire.doctor.findings import Finding, as_json, exit_status, lines, refuse, summary, table
from gradwire.doctor.greeting import Greeted, Listener, SocketAddress, greet
from gradwire.doctor.host import environment_settings
from gradwire.doctor.judge import accept, path_findings, rtt_text, way_rows
from gradwire.doctor.measure import End, Measurement, exchange, joined, measure, open_engine
from gradwire.transport.addresses import (
    ETHERNET_DATAGRAM,
    UDP_OVERHEAD,
    LocalAddress,
    can_be_bound,
    local_addresses,
    on_first_free,
    reachable_interfaces,
    route_mtu,
    scoped,
    udp_socket,
    with_port,
)

app = typer.Typer(add_completion=False)

PORT = 28_900
"""The port of `gradwire probe --listen` where nothing chooses another."""
CONTACT_S = 5.0
"""How long to wait for the first answer, and then for datagrams of full length, in seconds."""
IDLE_S = 300.0
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
        refuse("probe", error, in_json=as_json)


def _seconds(timeout: float | None, usual: float) -> float:
    if timeout is None:
        return usual
    if not 0.1 <= timeout <= LONGEST_WAIT_S:
        raise ConfigError.of("timeout", timeout, f"seconds, 0.1 to {LONGEST_WAIT_S:g}")
    return timeout


# ---------------------------------------------------------------------------- the one that listens


def _listen(target: str, settings: Settings, idle_s: float, as_json: bool) -> int:
    port = _port(target, target) if target else settings.ports[0] or PORT
    addresses = _own_addresses(settings)
    finished = 0

    def say(name: str, text: str, **more: object) -> None:
        print(json.dumps({"event": name, "message": text, **more}) if as_json else text, flush=True)

    def unheard(peer: SocketAddress, local: str) -> None:
        text = (
            f"Datagrams from {_text(peer)} arrive here, and no answer arrives there: UDP is "
            "blocked on the way back, by a firewall there or between."
        )
        say("unheard", text, peer=_text(peer))
        if not as_json:
            print(f"  type: {accept(peer[0], local, None)}", flush=True)

    bound = addresses if settings.interface else [*addresses, *_loopbacks(addresses)]
    with _port_of(port):
        listener = Listener(bound, port, lambda own, to: _limit(own, to, settings), unheard)
    typed = addresses[0] if port == PORT else with_port(addresses[0], port)
    text = (
        f"Listening on UDP port {port} of {', '.join(addresses)}.\n"
        f"Type on the other host: gradwire probe {typed}"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    try:
        say("listening", text, port=port, addresses=addresses)
        while (greeted := listener.wait(idle_s)) is not None:
            peer = _text(greeted.peer)
            say("measures", f"{peer} measures.", peer=peer)
            listener.close()  # the engine takes the port
            own, other = _measure(1, greeted, settings)
            if other is not None:
                finished += 1
                say("measured", f"{peer} is done, and has the results.", peer=peer)
            elif not own.answered:
                say("left", f"{peer} does not measure after all.", peer=peer)
            else:
                say(
                    "failed",
                    f"{peer} has no results: the sums did not come to their end.",
                    peer=peer,
                )
            with _port_of(port):
                listener.open()
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    if listener.hellos == 0:
        text = (
            f"Nothing arrived at UDP port {port}: nobody probed this host, or a firewall here or "
            "between drops UDP."
        )
    else:
        text = (
            f"Measurements that came to their end: {finished}. Hosts at which no answer arrived: "
            f"{len(listener.deaf)}."
        )
    say("ended", text, measurements=finished, unheard=len(listener.deaf))
    return 0 if finished and not listener.deaf else 1


def _measure(endpoint: int, greeted: Greeted, settings: Settings) -> tuple[End, End | None]:
    """Measures with who has greeted; returns what this end has seen, and what the other one has."""
    local, peer = (
        (scoped(place[0], _interface(place)), place[1]) for place in (greeted.local, greeted.peer)
    )
    session, datagram = greeted.token, greeted.datagram
    try:
        engine = open_engine(endpoint, session, local[0], local[1], datagram, settings)
    except OSError as error:  # somebody has taken the port since the greeting
        allowed = f"cannot be opened: {error.strerror}"
        raise ConfigError.of("port", local[1], allowed) from error
    try:
        engine.connect([peer, local] if endpoint else [local, peer])
        own = measure(engine, CONTACT_S)
        return own, exchange(engine, own) if own.complete else None
    finally:
        engine.close()


def _interface(place: SocketAddress) -> str:
    """Returns the interface of a link-local address of IPv6, "" for any other one."""
    with contextlib.suppress(OSError, IndexError):
        return socket.if_indextoname(place[3])
    return ""


def _text(place: SocketAddress) -> str:
    return with_port(scoped(place[0], _interface(place)), place[1])


def _limit(own: str, to: str, settings: Settings) -> int:
    """Returns the longest datagram that the engine would send from an address to another one."""
    try:
        (local,) = local_addresses(own, None)
        limit = local.datagram(route_mtu(local.bound, to))
    except (ConfigError, OSError, ValueError):
        limit = ETHERNET_DATAGRAM
    return min(limit, settings.datagram or limit)


@contextlib.contextmanager
def _port_of(port: int) -> Iterator[None]:
    """Says of a port that cannot be opened what to do."""
    try:
        yield
    except OSError as error:
        allowed = f"cannot be opened ({error.strerror}); choose another, as in {PORT + 1}"
        raise ConfigError.of("port", port, allowed) from error


def _loopbacks(addresses: list[str]) -> list[str]:
    """Returns the loopback addresses of this host that are not among others."""
    known = ("127.0.0.1", "::1")
    return [each for each in known if each not in addresses and can_be_bound(each)]


def _own_addresses(settings: Settings) -> list[str]:
    """Returns the addresses at which others may reach this host, the likeliest first."""
    chosen = [each.address for each in local_addresses(settings.interface, None)]
    if settings.interface is None:
        others = [address for each in reachable_interfaces().values() for address in each]
        chosen = [*(each for each in chosen if each in others), *others]
    return list(dict.fromkeys(chosen)) or ["127.0.0.1"]


# ---------------------------------------------------------------------------- the one that measures


def _probe(target: str, settings: Settings, contact_s: float, in_json: bool) -> int:
    host, port = _host_and_port(target, settings.ports[0] or PORT)
    own, peer = _ends(host, port, settings)
    to = scoped(peer[0], _interface(peer))
    try:
        limit = min(own.datagram(route_mtu(own.bound, to)), settings.datagram or LARGEST_DATAGRAM)
        found = _greet_and_measure(own, peer, limit, settings, contact_s)
    except OSError as error:  # no route
        found = Measurement(refusal=str(error.strerror or error))
    here, there = own.address, str(peer[0])
    findings = reached(found, here, there, port)
    if found.answered:
        findings += path_findings(found, here, there)
    if in_json:
        ends = {"from": here, "interface": own.interface, "to": there, "port": port}
        typer.echo(json.dumps({**as_json(findings), **ends, "measurement": asdict(found)}))
        return exit_status(findings)
    typer.echo(
        f"gradwire probe: {here} ({own.interface or 'no interface'}) to {with_port(to, port)}\n"
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
    if found.heard:
        text = (
            f"{here} and {there} hear each other, but datagrams of {found.limit} bytes get no "
            "answer: the path carries shorter ones only, or loses most."
        )
        typed = f"export GRADWIRE_DATAGRAM={ETHERNET_DATAGRAM // 2}   # on both hosts, to try"
        return [Finding("problem", "UDP", text, typed)]
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


def _greet_and_measure(
    own: LocalAddress, peer: SocketAddress, limit: int, settings: Settings, contact_s: float
) -> Measurement:
    """Finds who listens, and measures; once more where only the greeting came through."""
    headers = UDP_OVERHEAD[own.version]
    found = Measurement(limit=limit, headers=headers)
    until = time.monotonic() + contact_s
    while not found.answered and (left := until - time.monotonic()) > 0:
        try:
            opened = on_first_free(settings.ports, lambda port: udp_socket(own.bound, port))
        except OSError as error:
            raise ConfigError.of("port", settings.port, f"cannot be opened: {error}") from error
        with opened:
            greeted = greet(opened, peer, limit, left)
        found.refusal = greeted.refusal
        if greeted.answered:
            mine, theirs = _measure(0, greeted, settings)
            found = joined(mine, theirs, greeted.datagram, headers)
            found.heard = True  # by the greeting
    return found


def _table(found: Measurement) -> str:
    rows = table([("", "there", "back"), *way_rows(found)])
    return "\n".join([*rows, "", f"  smallest round-trip time: {rtt_text(found.rtt_s)}"])


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
    raise ConfigError.of("PORT", value, "expected a UDP port from 1 to 65535")
