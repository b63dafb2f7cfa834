"""Settings: keyword arguments first, then GRADWIRE_* variables, then the defaults.

Every value but the interface's is checked here, before a socket is opened or a peer is contacted.
An unknown name or an impossible value raises ConfigError naming the setting, the value and what is
allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from gradwire.core.checks import is_number, is_whole, plain
from gradwire.core.environment import (
    EXPORT,
    PORT,
    PREFIX,
    from_environment,
    naming_variables,
    ports_of,
    read_exports,
    read_ports,
)
from gradwire.core.errors import ConfigError, suggestion
from gradwire.core.keys import check_key, check_key_kept, fingerprint, read_key
from gradwire.core.plan import LARGEST_DATAGRAM, SMALLEST_DATAGRAM, check_choice

log = logging.getLogger("gradwire")


LARGEST_RISE = 1e6

LONGEST_S = 10 * 365 * 86_400.0
"""The longest time that a setting may name: ten years, which fit 64 bits of nanoseconds."""
SHORTEST_S = 0.01
"""The shortest time-out of a rendezvous or a transfer; no store and no path is faster."""
SMALLEST_MEMORY = 1 << 20
"""The least memory in bytes that an engine may hold for its peers: some peers' first packets."""
MOST_CORES = 64
"""The most threads of an engine; far fewer fill any port."""
SHORTEST_PEER_S = 1.0
"""The shortest `peer_timeout`: five pings fit into it, and a busy machine delays some of them."""

OF_ENGINES = (
    "route",
    "interface",
    "port",
    "datagram",
    "peer_timeout",
    "memory_limit",
    "dscp",
    "ecn",
    "auth",
    "cores",
)
"""The settings of an engine, on which two users of one engine must agree."""


@dataclass(frozen=True)
class Settings:
    """The settings common to all policies. Times are in seconds, sizes in bytes.

    Attributes:
        route: Where sums are made: "sharded", where every rank aggregates its share, or "server",
            where processes started with `gradwire server` aggregate. Allowed: "sharded", "server".
        servers: Number of `gradwire server` processes; None stands for 1 with route="server". Unit:
            processes. Allowed: [0, 1024] or None; 1 or more with route="server", 0 or None with
            route="sharded".
        hosts: Whether ranks of one host sum among themselves first, so that one rank speaks for the
            host: "auto", where there are several hosts and one of them has several ranks, on the
            route "sharded", and the kernels let ranks of a host share memory; True, where it is an
            error that they do not; or False. Every other rank of a host sends nothing over the
            network. Allowed: "auto", True or False; True with route="sharded" only.
        interface: The network interface by which gradwire's datagrams leave, by name or by its
            address (IPv4 or IPv6); None for the one that leads to the store's host. It is compared
            with the host's interfaces when the ranks meet. Allowed: one name or address of this
            host, or None.
        port: UDP port: 0 for any free one, a number, or a range, as "29600-29700" or a pair, of
            which each process takes the first free one, or with `cores` as many. Allowed:
            [0, 65535], or a range of ports above 0.
        datagram: Largest UDP payload, 0 for what the smallest MTU between the ranks allows. Unit:
            bytes. Allowed: 0 or [256, 8972].
        rendezvous_timeout: How long to wait for the peers to appear. Unit: seconds. Allowed: [0.01,
            315360000].
        peer_timeout: How long a peer's engine may be silent before it counts as dead, and how long
            another rank of this host may be stopped while this one waits for it. Unit: seconds.
            Allowed: [1, 315360000].
        timeout: How long one transfer may take, during which peers may still compute; None for the
            process group's time-out. Unit: seconds. Allowed: [0.01, 315360000] or None.
        memory_limit: Memory that this process's engine may hold for its peers, 0 for 2 GiB: sums,
            results and masks of the transfers that it aggregates, contributions that wait for their
            turn, packets and messages of transfers that have not started here. Transfers that do
            not fit together take turns; one that alone needs more than seven eighths of the limit
            is an error. A server's own limit is GRADWIRE_MEMORY_LIMIT where it runs. Unit: bytes.
            Allowed: 0 or [2**20, 2**62].
        error_feedback: Whether a later gradient includes what did not count. "auto" decides by the
            family of the optimizer given to attach, and is off without one. Allowed: "auto", True
            or False.
        max_age: How many steps in a row an element may go uncounted. Unit: steps. Allowed: [1,
            254].
        floor: Share of a step that every worker must deliver, below which the guard acts; None for
            the policy's own, 0 for never. Unit: share of the gradient. Allowed: [0, 1] or None.
        guard: What the guard does: "resend" the step exactly, "skip" it on all ranks (which needs
            attach(optimizer=…) and error feedback, which returns it) or "off". Allowed: "resend",
            "skip", "off".
        loss_rise: By how much the agreed loss may exceed its running mean (0.2: a fifth) before the
            next `strict_steps` steps are exact; None for never. Losses come from
            `attachment.loss(x)`; one that is not finite counts as a rise. Unit: share of the mean.
            Allowed: (0, 1000000] or None.
        strict_steps: Number of exact steps after a rise of the loss. Unit: steps. Allowed: [1,
            2**31].
        seed: Seed of the shuffled orders, alike on all ranks. Allowed: [0, 2**64).
        report: File for one JSON line per step, written by rank 0; with "{rank}" in the name every
            rank writes its own. Allowed: the name of a file, or None for no report.
        export: Where the figures of each step go beside the report, by rank 0; with "{rank}" in a
            target every rank has its own, as in "prometheus:9400+{rank}". Allowed:
            "prometheus:PORT", "prometheus:FILE.prom", "tensorboard:FOLDER", "wandb",
            "opentelemetry", several of them with commas or in a list, an object with write(record)
            and close(), or None.
        on_failure: What a failed transfer does where all ranks live: "raise" ends training with an
            error; "host" sends the step again over the host's network, by Gloo, and so all that
            follow, neither authenticated nor encrypted. It holds back each step's results until
            all ranks have them, and keeps a copy of what is sent. For modules under
            DistributedDataParallel; the backend "gradwire" raises in any case. Allowed: "raise",
            or "host" without a key.
        dscp: DSCP of gradwire's datagrams where the plan gives none (RFC 2474). Allowed: [0, 63].
        ecn: Whether acknowledged packets are sent as ECT(0) and marks are heeded (RFC 3168). A path
            that does not carry ECT is detected, and goes without in any case. Allowed: True or
            False.
        cores: How many threads of this process carry each transfer, each with a socket and a port
            of its own. More than one pay on networks faster than one core can serve. All processes
            of a job need the same number. Unit: threads. Allowed: [1, 64], no more than the cores
            that the process may use.
        auth: How datagrams are authenticated without a key of the user's: "session", by a key that
            the ranks make when they meet, all but the values of chunks; "whole", the values too;
            "none", not at all, for private networks; None for "session". Allowed: "none",
            "session", "whole" or None.
        key: The user's key, 32 random bytes, the same on all ranks and servers, by which datagrams
            are authenticated and encrypted. Allowed: 64 hexadecimal digits, as `openssl rand -hex
            32` prints them, or None.
        key_file: The file with that key, which belongs to the process's user or to root, and which
            nobody else may read. Allowed: the name of a file, or None.
        min_bytes: Size from which the backend "gradwire" hands a collective to the engine; for
            process groups of that backend alone. Unit: bytes. Allowed: [1, 2**62].

    Raises:
        ConfigError: A value is impossible; the error names the setting, the value and what is
            allowed.
    """

    route: str = "sharded"
    servers: int | None = None
    hosts: Literal["auto"] | bool = "auto"
    interface: str | None = None
    port: PORT = 0
    datagram: int = 0
    rendezvous_timeout: float = 60.0
    peer_timeout: float = 30.0
    timeout: float | None = None
    memory_limit: int = 0
    error_feedback: Literal["auto"] | bool = "auto"
    max_age: int = 4
    floor: float | None = None
    guard: str = "resend"
    loss_rise: float | None = None
    strict_steps: int = 10
    seed: int = 0
    report: str | os.PathLike[str] | None = None
    export: EXPORT = None
    on_failure: str = "raise"
    dscp: int = 0
    ecn: bool = True
    auth: str | None = None
    key: str | None = dataclasses.field(default=None, repr=False)
    key_file: str | os.PathLike[str] | None = None
    cores: int = 1
    min_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check_choice("route", self.route, ("sharded", "server"))
        if self.servers is not None:
            if not is_whole(self.servers):
                raise ConfigError.of(
                    "servers",
                    self.servers,
                    "the number of `gradwire server` processes, which join through the job's "
                    "store (addresses outside the store are not supported)",
                )
            _whole("servers", self.servers, 0, 1024)
            if self.route == "sharded" and self.servers > 0:
                raise ConfigError.about(
                    f"servers={self.servers} with route='sharded'",
                    "servers need route='server'",
                    setting="servers",
                    value=self.servers,
                )
            if self.route == "server" and self.servers == 0:
                raise ConfigError.about(
                    "servers=0 with route='server'", "1 or more", setting="servers", value=0
                )
        if not isinstance(self.hosts, str | bool) or self.hosts not in ("auto", True, False):
            raise ConfigError.of("hosts", self.hosts, "allowed are 'auto', True, False")
        if self.hosts is True and self.route == "server":
            raise ConfigError.of(
                "hosts",
                True,
                "every rank sends its own gradient to servers; use 'auto' or False",
                beside="with route='server'",
            )
        object.__setattr__(self, "port", read_ports(self.port))
        if not (is_whole(self.datagram) and self.datagram == 0):
            _whole("datagram", self.datagram, SMALLEST_DATAGRAM, LARGEST_DATAGRAM)
        _seconds("rendezvous_timeout", self.rendezvous_timeout, SHORTEST_S)
        _seconds("peer_timeout", self.peer_timeout, SHORTEST_PEER_S)
        if self.timeout is not None:
            _seconds("timeout", self.timeout, SHORTEST_S)
        if not (is_whole(self.memory_limit) and self.memory_limit == 0):
            limit = self.memory_limit
            if not is_whole(limit) or not SMALLEST_MEMORY <= limit <= 1 << 62:
                raise ConfigError.of(
                    "memory_limit",
                    limit,
                    f"bytes, a whole number from {SMALLEST_MEMORY} to {1 << 62}, or 0 for the "
                    "engine's default",
                )
        named = isinstance(self.error_feedback, str) and self.error_feedback == "auto"
        if not named and not isinstance(self.error_feedback, bool):
            raise ConfigError.of(
                "error_feedback", self.error_feedback, "allowed are 'auto', True, False"
            )
        _whole("max_age", self.max_age, 1, 254)
        if self.floor is not None and not (is_number(self.floor) and 0.0 <= self.floor <= 1.0):
            raise ConfigError.of("floor", self.floor, "a share of a step in [0, 1], or None")
        check_choice("guard", self.guard, ("resend", "skip", "off"))
        if self.loss_rise is not None:
            rise = self.loss_rise
            if not (is_number(rise) and 0.0 < rise <= LARGEST_RISE):
                raise ConfigError.of(
                    "loss_rise",
                    rise,
                    f"a share, a number above 0 and at most {LARGEST_RISE:g}, or None",
                )
        _whole("strict_steps", self.strict_steps, 1, 1 << 31)
        _whole("seed", self.seed, 0, (1 << 64) - 1)
        check_choice("on_failure", self.on_failure, ("raise", "host"))
        if isinstance(self.report, os.PathLike):
            object.__setattr__(self, "report", os.fspath(self.report))
        if self.report is not None and not (isinstance(self.report, str) and self.report):
            raise ConfigError.of("report", self.report, "the name of a file, or None")
        object.__setattr__(self, "export", read_exports(self.export))
        _whole("dscp", self.dscp, 0, 63)
        if not isinstance(self.ecn, bool):
            raise ConfigError.of("ecn", self.ecn, "allowed are True, False")
        if isinstance(self.key_file, os.PathLike):
            object.__setattr__(self, "key_file", os.fspath(self.key_file))
        check_key(self.auth, self.key, self.key_file)
        check_key_kept(self.authentication, self.on_failure)
        self.secret_key()
        _whole("cores", self.cores, 1, MOST_CORES)
        _whole("min_bytes", self.min_bytes, 1, 1 << 62)

    @property
    def ports(self) -> range:
        """The UDP ports to try, in order; 0 alone for any free one."""
        return ports_of(self.port)

    @property
    def server_count(self) -> int:
        """How many servers take part: 0 on the sharded route."""
        if self.route == "sharded":
            return 0
        return 1 if self.servers is None else self.servers

    @property
    def authentication(self) -> str:
        """How datagrams are authenticated: as `auth` says, or "key" where there is one."""
        if self.key is not None or self.key_file is not None:
            return "key"
        return self.auth or "session"

    def secret_key(self) -> bytes:
        """Returns the user's key; nothing where there is none. Its file is read but once."""
        return self._secret

    @functools.cached_property
    def _secret(self) -> bytes:
        return read_key(self.key, self.key_file)

    @property
    def feedback(self) -> bool:
        """Whether error feedback is on."""
        return self.error_feedback is True

    def origin(self, name: str) -> str:
        """Returns where the value of a setting came from, for errors."""
        variable = PREFIX + name.upper()
        try:
            read = from_environment({name: typing.get_type_hints(Settings)[name]})
        except ConfigError:
            read = {}
        if read.get(name) == getattr(self, name):
            return f"from {variable}"
        return "as given"

    def copied(self) -> Settings:
        """Returns the settings of a copy, which cannot share exporters given as objects."""
        named = tuple(each for each in self.export or () if isinstance(each, str))
        return dataclasses.replace(self, export=named or None)

    def agreed(self) -> dict[str, object]:
        """Returns the settings that must be the same on all ranks."""
        return {
            "route": self.route,
            "servers": self.server_count,
            "hosts": self.hosts,
            "auth": self.authentication,
            "key": fingerprint(self.secret_key()),
            "cores": self.cores,
            "error_feedback": self.feedback,
            "max_age": self.max_age,
            "floor": self.floor,
            "guard": self.guard,
            "on_failure": self.on_failure,
            "loss_rise": self.loss_rise,
            "strict_steps": self.strict_steps,
            "seed": self.seed,
        }

    def transport(self) -> dict[str, object]:
        """Returns the settings of an engine (OF_ENGINES), the number of servers, and which key."""
        own = {name: getattr(self, name) for name in OF_ENGINES}
        key = fingerprint(self.secret_key())
        return {"servers": self.server_count, **own, "auth": self.authentication, "key": key}

    @staticmethod
    def build(
        options: Mapping[str, object] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        also_known: Iterable[str] = (),
    ) -> Settings:
        """Makes settings from keyword options, then from the environment.

        Args:
            options: Values by setting.
            environment: Environment variables; None for os.environ.
            also_known: Further names to suggest for a misspelt one (the policy's options).

        Returns:
            The settings.

        Raises:
            ConfigError: A name is unknown or a value is impossible.
        """
        given = dict(options or {})
        known = setting_names()
        words = list(dict.fromkeys([*known, *also_known]))
        for name, value in given.items():
            if name not in known:
                allowed = f"known are {', '.join(words)}"
                raise ConfigError(
                    f"unknown setting {name}={value!r}{suggestion(name, words)}; {allowed}",
                    setting=name,
                    value=value,
                    allowed=allowed,
                )
        hints = typing.get_type_hints(Settings)
        read = from_environment(
            {name: hints[name] for name in known if name not in given}, environment
        )
        with naming_variables(read):
            return Settings(**{**read, **given})  # type: ignore[arg-type]


def setting_names() -> tuple[str, ...]:
    """Returns the names of the common settings."""
    return tuple(field.name for field in dataclasses.fields(Settings))


def _whole(name: str, value: object, low: int, high: int) -> None:
    if not is_whole(value) or not low <= value <= high:
        raise ConfigError.of(name, value, f"a whole number from {low} to {high}")


def _seconds(name: str, value: object, low: float) -> None:
    if not is_number(value) or not low <= value <= LONGEST_S:
        raise ConfigError.of(name, value, f"seconds, a number from {low:g} to {LONGEST_S:g}")
