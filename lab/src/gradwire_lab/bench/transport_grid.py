"""The cells of `gradwire bench transport`: networks, ranks, sizes, contestants and rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from gradwire_lab.bench.cases import gradwire_all_reduce
from gradwire_lab.contest.race import GLOO, Entry
from gradwire_lab.network.presets import ETHERNET_MTU, KIB, Preset

_CONTESTANTS = "gradwire_lab.contest"
_MIB = 1024 * KIB
_BUCKET_SECONDS = 0.3e-3  # what a late timer of a busy machine may miss
_UNSHAPED_BYTES_A_SECOND = 2e9  # of all ranks together on two cores, to choose the rounds
_ROUND_SECONDS = 0.005  # a short round, with what starts it
_TURN_SECONDS = 0.3
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 40
_ADAPTIVE_BYTES = _MIB

BFLOATS = ("gloo bf16", "bf16")
"""The contestants that take a buffer's memory as bfloat16, so that its bytes stay the same."""

SIZES = tuple(KIB * 4**power for power in range(9))
RANKS = (2, 4, 8)
OFFLOADS = {"on": (True, True), "off": (False, True), "tso": (True, False)}
"""Whether trains pass whole, and whether those of UDP do."""


LOOPBACK = "loopback"
"""The network of ranks that are all on one host."""
_LONG_MTU = 9000


def port(name: str, rate: int, queue: int, mtu: int = ETHERNET_MTU) -> Preset:
    """Return the preset of ports with a rate in bits per second and a queue in bytes."""
    bucket = max(round(rate * _BUCKET_SECONDS / 8), 72 * KIB)
    return Preset(name, rate, queue, bucket, offloads=True, mtu=mtu)


NETWORKS = {
    preset.name: preset
    for preset in (
        port("unshaped", 0, 16 * _MIB),
        port("unshaped-9000", 0, 16 * _MIB, _LONG_MTU),
        port(LOOPBACK, 0, 16 * _MIB, _LONG_MTU),
        port("10g", 10_000_000_000, 2 * _MIB),
        port("5g", 5_000_000_000, _MIB),
        port("1g", 1_000_000_000, 256 * KIB),
    )
}


@dataclass(frozen=True)
class Ground:
    """A ground is one network on which ranks sum buffers of several sizes.

    Attributes:
        network: the ports.
        ranks: their number.
        sizes: bytes of the buffers.
    """

    network: Preset
    ranks: int
    sizes: tuple[int, ...]

    def rounds(self, size: int) -> int:
        """Return the rounds of a turn: about as many as fill a third of a second."""
        moved = 2.0 * (self.ranks - 1) / self.ranks * size
        if self.network.rate:
            seconds = moved * 8 / self.network.rate
        else:
            seconds = moved * self.ranks / _UNSHAPED_BYTES_A_SECOND
        wanted = round(_TURN_SECONDS / (_ROUND_SECONDS + seconds))
        return min(max(wanted, _LEAST_ROUNDS), _MOST_ROUNDS)


def grounds(
    networks: Collection[str], ranks: Collection[int], sizes: Collection[int], offloads: str
) -> list[Ground]:
    """Return a ground for each network and number of ranks.

    Args:
        sizes: bytes of the buffers.
    """
    whole, udp = OFFLOADS[offloads]
    ordered = tuple(sorted(sizes))
    return [
        Ground(replace(NETWORKS[name], offloads=whole, udp_trains=udp), number, ordered)
        for name in networks
        for number in ranks
    ]


def quick_grounds(offloads: str) -> list[Ground]:
    """Return the grounds of the marks."""
    unshaped = {
        4: [4 * KIB, 64 * KIB, 256 * KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB],
        8: [64 * KIB, _MIB, 8 * _MIB, 32 * _MIB],
        2: [64 * KIB, _MIB, 16 * _MIB, 64 * _MIB],
    }
    shaped = [64 * KIB, 256 * KIB, _MIB, 4 * _MIB, 25 * _MIB]
    found = []
    for ranks, sizes in unshaped.items():
        found += grounds(["unshaped"], [ranks], sizes, offloads)
    found += grounds(["unshaped-9000"], [4], [_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB], offloads)
    found += grounds([LOOPBACK], [2], [_MIB, 16 * _MIB, 64 * _MIB], offloads)
    return found + grounds(["10g", "5g", "1g"], [4], shaped, offloads)


def contestants(
    network: Preset,
    names: Collection[str] = (),
    kinds: Mapping[str, Mapping[str, object]] | None = None,
) -> tuple[Entry, ...]:
    """Return the contestants, Gloo first.

    Args:
        names: those beside Gloo; all but `BFLOATS` if empty.
        kinds: settings with each of which the exact all-reduce takes part under a name, beside the
            floor alone.
    """
    if kinds:
        exact = [
            gradwire_all_reduce(name, settings=dict(settings), group=name.replace(" ", "-"))
            for name, settings in kinds.items()
        ]
        floor = [entry for entry in contestants(network) if entry.name == "floor"]
        return (GLOO, *exact, *floor)
    queue = network.queue if network.rate else 0
    every = (
        GLOO,
        Entry("gloo f16", f"{_CONTESTANTS}.gloo:GlooAllReduce", {"half": True}),
        gradwire_all_reduce("exact"),
        gradwire_all_reduce("f16", encoding="f16"),
        gradwire_all_reduce("int8", encoding="int8"),
        Entry("adaptive", f"{_CONTESTANTS}.gradwire_adaptive:GradwireAdaptive"),
        Entry("floor", f"{_CONTESTANTS}.floor:Floor", {"queue": queue, "mtu": network.mtu}),
        Entry("gloo bf16", f"{_CONTESTANTS}.gloo:GlooAllReduce", {"bfloats": True}),
        gradwire_all_reduce("bf16", bfloats=True),
    )
    if names:
        return tuple(entry for entry in every if entry is GLOO or entry.name in names)
    return tuple(entry for entry in every if entry.name not in BFLOATS)


def takes_part(name: str, size: int) -> bool:
    """Return whether a contestant sums buffers of this size; "adaptive" needs whole buckets."""
    return name != "adaptive" or size >= _ADAPTIVE_BYTES
