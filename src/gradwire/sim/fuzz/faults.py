"""The kinds of fault: how each is drawn, what it does to a network, and what it may end in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from gradwire.sim.fabric import Fabric, Link
from gradwire.sim.fuzz.life import Fault, Life

ENDLESS = float("inf")
FLOOR = 256
"""Bytes of the shortest datagrams that a path must carry."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        draw: Draws one, by a random source and the life it is for.
        port: What it makes of a port's link while it lasts; None if it does something else.
        causes: The causes of errors that it may end in; none where the job has to go on.
        silent: Whether hosts hear less of each other while it lasts, so that several of its kind
            together may be a silence.
        shapes: The shapes of lives that it is for.
    """

    draw: Callable[[random.Random, Life], Fault]
    port: Callable[[Link, Fault], Link] | None = None
    causes: frozenset[str] = frozenset()
    silent: bool = False
    shapes: tuple[str, ...] = ("transfers", "training")


def span(life: Life) -> float:
    """About how many seconds the ops of a life take."""
    bits = 4.0 * life.elements * life.lanes * life.steps
    share = life.workers if life.servers else 1
    return (
        2 * bits * share / life.rate + life.steps * (8 * life.delay + life.apart + life.skew) + 2e-3
    )


def _moment(chance: random.Random, life: Life) -> float:
    """Within the life, from before its first packet to after its last."""
    return chance.uniform(0.0, 1.3) * span(life)


def _host(chance: random.Random, life: Life) -> int:
    return chance.randrange(life.hosts)


def _where(chance: random.Random, life: Life) -> dict[str, object]:
    """All ports for the whole life, or one for a while."""
    if chance.random() < 0.5:
        return {}
    when = {} if chance.random() < 0.4 else {"at": _moment(chance, life), "length": _while(chance)}
    return {"host": _host(chance, life), "direction": chance.choice(["up", "down"]), **when}


def _while(chance: random.Random) -> float:
    return 10 ** chance.uniform(-3.5, 0.5)


def _amounts(
    kind: str, *ranges: Callable[[random.Random], float]
) -> Callable[[random.Random, Life], Fault]:
    """Draws a fault of a port with these amounts."""

    def draw(chance: random.Random, life: Life) -> Fault:
        amount = tuple(each(chance) for each in ranges)
        return Fault(kind, amount=amount, **_where(chance, life))  # type: ignore[arg-type]

    return draw


def _log(low: float, high: float) -> Callable[[random.Random], float]:
    """Between two powers of ten."""
    return lambda chance: 10 ** chance.uniform(low, high)


def _one(*choices: float) -> Callable[[random.Random], float]:
    return lambda chance: chance.choice(choices)


def _everywhere(kind: str, *ranges: Callable[[random.Random], float]) -> Callable[..., Fault]:
    return lambda chance, _life: Fault(kind, amount=tuple(each(chance) for each in ranges))


def _transient(kind: str) -> Callable[[random.Random, Life], Fault]:
    """A host, or two, for less than half of the time-out."""

    def draw(chance: random.Random, life: Life) -> Fault:
        length = life.peer_timeout * 0.45 * chance.random() ** 2
        host = _host(chance, life)
        peer = (host + chance.randrange(1, life.hosts)) % life.hosts
        return Fault(kind, at=_moment(chance, life), length=length, host=host, peer=peer)

    return draw


def _lasting(kind: str) -> Callable[[random.Random, Life], Fault]:
    """A host, or two, for good or for more than the time-out."""

    def draw(chance: random.Random, life: Life) -> Fault:
        length = chance.choice([ENDLESS, life.peer_timeout * chance.uniform(1.6, 4.0)])
        host = _host(chance, life)
        peer = (host + chance.randrange(1, life.hosts)) % life.hosts
        return Fault(kind, at=_moment(chance, life), length=length, host=host, peer=peer)

    return draw


def _worker(kind: str, *ranges: Callable[[random.Random], float]) -> Callable[..., Fault]:
    def draw(chance: random.Random, life: Life) -> Fault:
        amount = tuple(each(chance) for each in ranges)
        return Fault(
            kind, at=_moment(chance, life), host=chance.randrange(life.workers), amount=amount
        )

    return draw


def _loss(link: Link, fault: Fault) -> Link:
    share = max(link.loss, fault.amount[0])
    runs = link.loss_burst if link.loss_burst == 1 else max(link.loss_burst, share / (1 - share))
    return replace(link, loss=share, loss_burst=runs)


def _burst(link: Link, fault: Fault) -> Link:
    share, length = max(link.loss, fault.amount[0]), fault.amount[1]
    return replace(link, loss=share, loss_burst=max(length, share / (1 - share)))


def _mtu(link: Link, fault: Fault) -> Link:
    return replace(link, longest=min(link.longest or 1 << 16, round(fault.amount[0])))


def _ecn(link: Link, fault: Fault) -> Link:
    way = round(fault.amount[0])
    return replace(link, ecn=round(fault.amount[1]), bleach=way == 1, drop_ect=way == 2)


SILENCE = frozenset({"silence"})
TRANSFERS = ("transfers",)
KINDS: dict[str, Kind] = {
    # ---- of ports
    "loss": Kind(_amounts("loss", _one(0.001, 0.01, 0.05, 0.2, 0.4)), _loss),
    "burst": Kind(
        _amounts("burst", _one(0.005, 0.03, 0.1, 0.25), _one(2.0, 5.0, 20.0, 60.0)), _burst
    ),
    "reorder": Kind(
        _amounts("reorder", _one(0.01, 0.1, 0.5), _log(-5.0, -2.0)),
        lambda link, fault: replace(link, reorder=fault.amount[0], reorder_delay=fault.amount[1]),
    ),
    "jitter": Kind(
        _amounts("jitter", _log(-5.0, -2.3)),
        lambda link, fault: replace(link, reorder=0.999, reorder_delay=fault.amount[0]),
    ),
    "duplicate": Kind(
        _amounts("duplicate", _one(0.01, 0.1, 0.5, 0.9)),
        lambda link, fault: replace(link, duplicate=fault.amount[0]),
    ),
    "garbage": Kind(
        _amounts("garbage", _one(0.02, 0.2)),
        lambda link, fault: replace(link, garbage=fault.amount[0]),
    ),
    "corrupt": Kind(
        _amounts("corrupt", _one(0.001, 0.02, 0.2)),
        lambda link, fault: replace(link, corrupt=fault.amount[0]),
    ),
    "delay": Kind(
        _amounts("delay", _log(-4.5, -1.3)),
        lambda link, fault: replace(link, delay=link.delay + fault.amount[0]),
    ),
    "slow": Kind(
        _amounts("slow", _one(2.0, 10.0, 50.0)),
        lambda link, fault: replace(link, rate=max(link.rate / fault.amount[0], 5e5)),
    ),
    "queue": Kind(
        lambda chance, life: Fault(
            "queue",
            amount=(max(chance.choice([2048, 4096, 9000, 20_000]), life.datagram + 300),),
            **_where(chance, life),  # type: ignore[arg-type]
        ),
        lambda link, fault: replace(link, queue=round(fault.amount[0])),
    ),
    "policer": Kind(
        lambda chance, life: Fault(
            "policer",
            amount=(
                chance.choice([0.1, 0.3, 0.8]),
                max(
                    chance.choice([16_000, 64_000, 256_000]),
                    4 * life.hosts * (life.datagram + 42),
                ),
            ),
            host=_host(chance, life),
            direction=chance.choice(["up", "down"]),
        ),
        lambda link, fault: replace(
            link,
            police_rate=max(link.rate * fault.amount[0], 5e5),
            police_burst=round(fault.amount[1]),
        ),
    ),
    "mtu": Kind(
        lambda chance, life: Fault(
            "mtu",
            at=_moment(chance, life),
            host=_host(chance, life),
            direction=chance.choice(["up", "down"]),
            amount=(max(FLOOR + 20, life.datagram * chance.uniform(0.3, 0.98)),),
        ),
        _mtu,
    ),
    "ecn": Kind(
        _amounts("ecn", _one(0, 1, 2), _one(3000, 30_000, 100_000)),
        _ecn,
    ),
    # ---- of the whole fabric
    "buffer": Kind(_everywhere("buffer", _one(16_384, 32_768, 65_536)), shapes=TRANSFERS),
    "memory": Kind(_everywhere("memory", _one(1.0, 1.3, 2.0)), shapes=TRANSFERS),
    "busy": Kind(
        _everywhere("busy", _log(-6.0, -3.5), _log(-6.0, -2.5), _one(0.0, 5e-6, 1e-4)),
        shapes=TRANSFERS,
    ),
    "flip": Kind(
        _everywhere("flip", _one(0.001, 0.02)),
        lambda link, fault: replace(link, flip=fault.amount[0]),
        causes=frozenset({"any"}),
        shapes=TRANSFERS,
    ),
    # ---- other traffic
    "cross": Kind(
        lambda chance, life: Fault(
            "cross",
            at=_moment(chance, life),
            length=_while(chance) * 0.1,
            host=_host(chance, life),
            direction=chance.choice(["up", "down"]),
            amount=(chance.choice([0.3, 0.9, 2.0]), chance.choice([1, 8, 40])),
        )
    ),
    "tcp": Kind(
        lambda chance, life: Fault(
            "tcp",
            at=_moment(chance, life),
            length=0.3 * chance.random(),
            host=_host(chance, life),
            amount=(10 ** chance.uniform(-4.0, -2.0),),
        )
    ),
    # ---- clocks
    "drift": Kind(
        lambda chance, life: Fault(
            "drift", host=_host(chance, life), amount=(chance.uniform(-500, 500),)
        )
    ),
    "jump": Kind(
        lambda chance, life: Fault(
            "jump",
            at=_moment(chance, life),
            host=_host(chance, life),
            amount=(life.peer_timeout * 10 ** chance.uniform(-3.0, 1.0),),
        ),
        silent=True,
    ),
    # ---- hosts that others do not hear for a while
    "freeze": Kind(_transient("freeze"), silent=True),
    "suspend": Kind(_transient("suspend"), silent=True),
    "partition": Kind(_transient("partition"), silent=True),
    "oneway": Kind(_transient("oneway"), silent=True),
    "isolate": Kind(_transient("isolate"), silent=True),
    "late": Kind(_worker("late", _log(-3.0, 0.5)), shapes=TRANSFERS),
    # ---- what a job ends by
    "kill": Kind(_lasting("kill"), causes=SILENCE, silent=True),
    "hang": Kind(_lasting("hang"), causes=SILENCE, silent=True),
    "sever": Kind(_lasting("sever"), causes=SILENCE, silent=True),
    "mute": Kind(_lasting("mute"), causes=SILENCE, silent=True),
    "outage": Kind(_lasting("outage"), causes=SILENCE, silent=True),
    "absent": Kind(_worker("absent"), causes=frozenset({"timeout"}), shapes=TRANSFERS),
    # … whose goodbye may be lost
    "quit": Kind(
        _worker("quit"), causes=frozenset({"left", "closed", "silence"}), shapes=TRANSFERS
    ),
    "differ": Kind(_worker("differ"), causes=frozenset({"plan"}), shapes=TRANSFERS),
}
DEADLY = frozenset(name for name, kind in KINDS.items() if kind.causes and name != "flip")
"""Kinds after which a job ends with errors."""
EVERYWHERE = frozenset({"flip"})
"""Kinds of a port that only a whole fabric has, from its start."""


class Ports:
    """The ports of a fabric, whose links are what the faults of the moment make of them.

    Args:
        fabric: The fabric.
        base: The link of all directions of all ports.
        faults: The faults that last from the start.
    """

    def __init__(self, fabric: Fabric, base: Link, faults: list[Fault]) -> None:
        self._fabric = fabric
        self._base = base
        self._hosts = fabric.workers + fabric.servers
        self._active = list(faults)
        self.refresh()

    def begin(self, fault: Fault) -> None:
        """Lets a fault begin."""
        self._active.append(fault)
        self.refresh()

    def end(self, fault: Fault) -> None:
        """Lets a fault end."""
        self._active.remove(fault)
        self.refresh()

    def refresh(self) -> None:
        """Gives each port its link."""
        wide = self._made(self._base, -1, "")
        for host in range(self._hosts):
            for direction in ("up", "down"):
                self._fabric.set_link(host, direction, self._made(wide, host, direction))

    def _made(self, link: Link, host: int, direction: str) -> Link:
        for fault in self._active:
            port = KINDS[fault.kind].port
            assert port is not None
            at = -1 if fault.host < 0 else fault.host % self._hosts
            if at == host and (host < 0 or fault.direction == direction):
                link = port(link, fault)
        return link
