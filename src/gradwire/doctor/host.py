"""Checks of one host: versions, settings, address, buffers, offloads, ECN, CPUs and port."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from gradwire import __version__
from gradwire.core.environment import PREFIX, check_environment
from gradwire.core.errors import ConfigError, EngineMissingError
from gradwire.core.plan import SMALLEST_DATAGRAM
from gradwire.core.settings import Settings
from gradwire.doctor.findings import Finding
from gradwire.policies.base import Policy, option_names
from gradwire.policies.registry import (
    OFF,
    agreed_configuration,
    all_names,
    create_from_environment,
    name_in_environment,
    policy_class,
    unread_variables,
)
from gradwire.transport.addresses import (
    LocalAddress,
    describe_interfaces,
    is_loopback,
    local_addresses,
    reachable_interfaces,
)
from gradwire.transport.keys import KeyMaker, libcrypto_errors
from gradwire.transport.native import load_engine
from gradwire.transport.open_engine import check_cores

FEWEST_CPUS = 2
"""One for the engine's thread, one for training."""


@dataclass
class Host:
    """What was found out about this host.

    Attributes:
        addresses: The addresses that gradwire would announce, the preferred one first.
        features: What the kernel grants the engine's socket.
        cpus: CPUs that this process may use.
        settings: The settings of the environment, in which a wrong one has its default.
        agreed: What attach() needs alike on all ranks, as the environment has it; empty where a
            setting is wrong.
    """

    findings: list[Finding] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    addresses: tuple[LocalAddress, ...] = ()
    features: dict[str, Any] = field(default_factory=dict)
    cpus: int = 0
    settings: Settings = field(default_factory=Settings)
    agreed: dict[str, object] = field(default_factory=dict)


def versions() -> dict[str, str]:
    found = {"gradwire": __version__}
    try:
        found["protocol"] = str(load_engine().PROTOCOL_VERSION)
    except EngineMissingError:
        found["protocol"] = ""
    try:
        found["torch"] = metadata.version("torch")
    except metadata.PackageNotFoundError:
        found["torch"] = ""
    found["python"] = platform.python_version()
    found["kernel"] = platform.release()
    return found


def environment_settings() -> Settings:
    check_environment(all_names())
    return Settings.build()


def check_host(towards: str | None = None) -> Host:
    """Checks this host. What is wrong in one place hides nothing in another.

    Args:
        towards: The host of the job's store, None where there is none.
    """
    host = Host(versions=versions())
    host.findings.append(_versions(host.versions))
    host.findings += _settings(host)
    host.findings += _network(host, towards)
    host.findings.append(_cpus(host))
    return host


def _network(host: Host, towards: str | None) -> list[Finding]:
    try:
        load_engine()
    except EngineMissingError as error:
        return [Finding("problem", "engine", f"{error}.", "make engine")]
    settings = host.settings
    try:
        host.addresses = found = local_addresses(settings.interface, towards)
        findings = [_address(found[0], settings, towards)]
    except ConfigError as error:
        findings = [Finding("problem", "address", f"{error}.")]
        if settings.interface is None:
            return findings
        settings = dataclasses.replace(settings, interface=None)
        found = local_addresses(None, towards)
    return [*findings, _mtu(found[0], settings), *_socket(host, found[0], settings)]


def _settings(host: Host) -> list[Finding]:
    """Reads the settings and the policy of the environment; one wrong variable hides no other."""
    variables = dict(os.environ)
    findings: list[Finding] = []

    def wrong(error: ConfigError) -> str:
        """Notes what is wrong, and returns the variable; "" where it is none."""
        named = (error.setting, PREFIX + error.setting.upper())
        variable = next((each for each in named if each in variables), "")
        typed = f"unset {variable}" if variable else ""
        findings.append(Finding("problem", "settings", f"{error}.", typed))
        return variable

    def read(reads: Callable[[], Any]) -> Any:
        """Returns what a reader does once all that is wrong for it is out of the variables."""
        while True:
            try:
                return reads()
            except ConfigError as error:
                variable = wrong(error)
                if not variable:
                    return None
                del variables[variable]
                # The default of one of two that do not go together says nothing of the other.
                for each in list(variables):
                    if f" {each.removeprefix(PREFIX).lower()}=" in str(error):
                        del variables[each]

    read(lambda: check_environment(all_names(), variables))
    host.settings = read(lambda: Settings.build(environment=variables)) or host.settings
    try:
        name = name_in_environment(variables)
    except ConfigError as error:  # whose options are set is not known then
        wrong(error)
        return findings
    if name == OFF:
        host.agreed = {"policy": OFF}
        return findings
    options = option_names(policy_class(name))
    policy = read(lambda: create_from_environment(name, {}, variables))
    if not findings:
        host.agreed = _agreed(policy, host.settings)
    return findings + _unread(name, unread_variables(options, variables))


def _agreed(policy: Policy, settings: Settings) -> dict[str, object]:
    """Returns what attach() needs alike on all ranks, without what it derives from the rest."""
    agreed = agreed_configuration(policy, settings)
    if not settings.server_count:
        del agreed["servers"]
    if settings.error_feedback == "auto":
        del agreed["error_feedback"]
    return agreed


def _unread(policy: str, variables: list[str]) -> list[Finding]:
    return [
        Finding(
            "warning",
            "settings",
            f"{variable}={os.environ[variable]!r} is not read: policy {policy!r} takes no such "
            "option.",
            f"unset {variable}",
        )
        for variable in variables
    ]


def _versions(found: dict[str, str]) -> Finding:
    torch = f"torch {found['torch']}" if found["torch"] else "no torch"
    text = (
        f"gradwire {found['gradwire']} (protocol {found['protocol'] or 'unknown'}), {torch}, "
        f"Python {found['python']}, Linux {found['kernel']}."
    )
    if not found["torch"]:
        return Finding("warning", "versions", f"{text} Training needs torch.", "pip install torch")
    return Finding("ok", "versions", text)


def _address(own: LocalAddress, settings: Settings, towards: str | None) -> Finding:
    others = {
        name: addresses
        for name, addresses in reachable_interfaces().items()
        if name != own.interface
    }
    if is_loopback(own.address) and others and towards is None and settings.interface is None:
        text = (
            "A job uses the interface that leads to its store, and no job is known here. "
            f"GRADWIRE_INTERFACE chooses one: {describe_interfaces(others)}."
        )
        return Finding("ok", "address", text)
    if is_loopback(own.address):
        text = (
            f"gradwire would use {own.address}, which only ranks on this host reach; this host "
            f"has {describe_interfaces(others)}."
        )
        name = next(iter(others), "")
        return Finding(
            "warning", "address", text, f"export GRADWIRE_INTERFACE={name}" if name else ""
        )
    text = f"gradwire uses {own.address} on {own.interface or 'no listed interface'}."
    if settings.interface is None and others:
        text += f" GRADWIRE_INTERFACE chooses another: {describe_interfaces(others)}."
    return Finding("ok", "address", text)


def _mtu(own: LocalAddress, settings: Settings) -> Finding:
    longest = own.datagram()
    known = f"The MTU of {own.interface} is {own.mtu}"
    mtu = known if own.mtu else f"No interface names an MTU for {own.address}"
    if longest < SMALLEST_DATAGRAM:
        text = f"{mtu}, and datagrams of {longest} bytes are too short: {SMALLEST_DATAGRAM}."
        return Finding("problem", "MTU", text, f"ip link set {own.interface} mtu 1500")
    if settings.datagram > longest:
        text = f"{mtu}: GRADWIRE_DATAGRAM={settings.datagram} does not fit; at most {longest} do."
        return Finding("problem", "MTU", text, f"export GRADWIRE_DATAGRAM={longest}")
    return Finding("ok", "MTU", f"{mtu}, so a datagram has at most {longest} bytes.")


def _socket(host: Host, own: LocalAddress, settings: Settings) -> list[Finding]:
    native = load_engine()
    try:
        check_cores(settings.cores)
    except ConfigError as error:
        typed = f"export GRADWIRE_CORES={len(os.sched_getaffinity(0))}"
        return [Finding("problem", "CPUs", f"{error}.", typed)]
    try:
        keys = KeyMaker(0, settings)
        with libcrypto_errors():
            engine = native.Engine(
                endpoint=0,
                workers=2,
                servers=0,
                session=1,
                address=own.bound,
                ports=settings.ports,
                engines=settings.cores,
                dscp=settings.dscp,
                ecn=settings.ecn,
                **keys.engine_options([keys.hello] * 2, settings.cores),
            )
    except EngineMissingError as error:
        return [Finding("problem", "libcrypto", f"{error}.")]
    except (OSError, ValueError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        typed = f"ss -ulpn 'sport = :{settings.ports[0]}'   # names the process" if in_use else ""
        where = f"UDP {own.bound} port {settings.port or 'any'}"
        why = "another process holds the port" if in_use else str(error)
        return [Finding("problem", "port", f"{where} cannot be opened: {why}.", typed)]
    try:
        host.features = dict(engine.features())
        ports = [str(port) for _, port in engine.addresses]
    finally:
        engine.close()
    findings = [_buffers(host.features), *_offloads(host.features), _ecn(host.features, settings)]
    if settings.port:
        several = "ports" if len(ports) > 1 else "port"
        are = "are" if len(ports) > 1 else "is"
        text = f"UDP {several} {', '.join(ports)} {are} free; each process of a host needs its own."
        findings.append(Finding("ok", "port", text))
    return findings


def _buffers(features: dict[str, Any]) -> Finding:
    small = []
    words = []
    for name, key, limit in (("receive", "rcvbuf", "rmem_max"), ("send", "sndbuf", "wmem_max")):
        # The kernel reports twice what it grants, for its own overhead.
        granted, asked = features[key] // 2, features[f"{key}_asked"]
        words.append(f"{_size(granted)} of {_size(asked)} to {name}")
        if granted < asked:
            small.append(f"net.core.{limit}={asked}")
    text = f"The kernel grants buffers of {' and '.join(words)}."
    if not small:
        return Finding("ok", "buffers", text)
    text += " Small ones lose datagrams in bursts."
    return Finding("warning", "buffers", text, f"sysctl -w {' '.join(small)}")


def _size(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB" if count >= 1 << 20 else f"{count / 1024:.0f} KiB"


def _offloads(features: dict[str, Any]) -> list[Finding]:
    findings = []
    for name, key, since in (("GSO", "udp_segment", "4.18"), ("GRO", "udp_gro", "5.0")):
        if features[key]:
            continue
        text = (
            f"The kernel has no UDP {name} (Linux {since} and later have it), so every datagram "
            "costs a system call."
        )
        findings.append(Finding("warning", name, text))
    return findings or [Finding("ok", "GSO, GRO", "The kernel sends trains and merges them.")]


def _ecn(features: dict[str, Any], settings: Settings) -> Finding:
    if not settings.ecn:
        return Finding("ok", "ECN", "GRADWIRE_ECN switches ECN off.")
    if not features["ecn"]:
        text = "The kernel sets or reports no ECN field, so jobs go without ECN."
        return Finding("warning", "ECN", text)
    return Finding("ok", "ECN", "The kernel sets and reports the ECN field.")


def _cpus(host: Host) -> Finding:
    host.cpus = len(os.sched_getaffinity(0))
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(processes) if processes.isascii() and processes.isdigit() else 1
    text = f"{host.cpus} CPUs" if host.cpus != 1 else "1 CPU"
    if ranks > 1:
        text += f" for {ranks} ranks"
    if host.cpus < FEWEST_CPUS * ranks:
        text += ": the engine's thread of each rank shares one with training."
        return Finding("warning", "CPUs", text)
    return Finding("ok", "CPUs", f"{text}.")
