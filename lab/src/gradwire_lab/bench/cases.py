"""The rows of the benchmark table set what is moved over which network, and against whom."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire_lab.contest.race import GLOO, Entry, tcp_push
from gradwire_lab.network.presets import BURSTS, NETWORKS, Burst, Preset

_CONTESTANTS = "gradwire_lab.contest"
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Case:
    """A case is one row of the table.

    Attributes:
        name: its name on the command line.
        network: the standard network.
        hosts: the number of hosts that take part.
        size: bytes of each rank's buffer.
        entries: the contestants.
        push: only the way to one server is measured, not an all-reduce.
        bursts: cross traffic into one port, or None.
        rounds: the number of rounds of each contestant, when the command line names none.
    """

    name: str
    network: Preset
    hosts: int
    size: int
    entries: tuple[Entry, ...]
    push: bool = False
    bursts: Burst | None = None
    rounds: int = 100

    def with_rhythm(self, on: float, period: float) -> Case:
        """Return the case with bursts of another length and period, in milliseconds."""
        if self.bursts is None:
            return self
        return replace(self, bursts=replace(self.bursts, on=on / 1e3, period=period / 1e3))


def gradwire_all_reduce(name: str, **options: object) -> Entry:
    """Return an all-reduce entry with the options of `GradwireAllReduce`."""
    return Entry(name, f"{_CONTESTANTS}.gradwire_all_reduce:GradwireAllReduce", options)


def cases(network: str) -> dict[str, Case]:
    """Return the cases of a standard network, by name."""
    preset = NETWORKS[network]
    bound = {"A": 0.10, "B": 0.40}[network]
    exact = gradwire_all_reduce("gradwire reliable")
    rows = [
        Case(
            "exact",
            preset,
            4,
            {"A": 25, "B": 2}[network] * MEGABYTE,
            (GLOO, exact),
        ),
        Case(
            "bursts",
            preset,
            4,
            {"A": 10, "B": 2}[network] * MEGABYTE,
            (
                GLOO,
                exact,
                gradwire_all_reduce(f"gradwire lost {bound:.0%}", bound=bound, spend="lost"),
                gradwire_all_reduce(f"gradwire eager {bound:.0%}", bound=bound, spend="anything"),
            ),
            bursts=BURSTS[network],
            rounds=1000,
        ),
    ]
    if network == "A":
        rows.append(
            Case(
                "push",
                preset,
                9,
                4 * MEGABYTE,
                (
                    tcp_push("cubic"),
                    tcp_push("bbr"),
                    Entry("gradwire reliable", f"{_CONTESTANTS}.gradwire_push:GradwirePush"),
                ),
                push=True,
            )
        )
    return {row.name: row for row in rows}
