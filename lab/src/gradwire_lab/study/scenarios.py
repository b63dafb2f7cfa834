"""A scenario of the study says what the network loses, and in which rounds."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.sim.fabric import NETWORK_A, Link

__all__ = ["BURSTS", "BY_LEVEL", "QUIET", "SCENARIOS", "Scenario"]


@dataclass(frozen=True)
class Scenario:
    """A scenario is a network that loses.

    Attributes:
        name: its name on the command line.
        losses: share of all packets lost on the workers' ways to the switch in a round that loses
            any; of several each such round draws one.
        run: mean packets of a run of losses (Gilbert–Elliott; 1: independent).
        when: rounds that lose: "always", or those in which the phase is "critical" or "tolerant".
        share: the share of these rounds that lose, drawn by the seed.
        uneven: all of the loss falls on one worker.
        link: the link without its losses.
        compute_s: virtual seconds between two rounds.
    """

    name: str
    losses: tuple[float, ...] = ()
    run: float = 1.0
    when: str = "always"
    share: float = 1.0
    uneven: bool = False
    link: Link = NETWORK_A
    compute_s: float = 0.01


QUIET = "quiet"
SHARES = {"critical": 0.5, "tolerant": 0.1}
"""Share of the rounds of a phase, of which critical ones are few."""

LEVELS = (60, 70, 80, 90)
"""Per cent that is lost in a round which a burst meets."""

BURSTS = tuple(
    Scenario(
        f"bursts-{when}",
        tuple(percent / 100 for percent in LEVELS),
        when=when,
        share=SHARES[when],
    )
    for when in ("tolerant", "critical")
)
"""Each burst draws its level."""

BY_LEVEL = tuple(
    Scenario(f"burst-{percent}-{when}", (percent / 100,), when=when, share=SHARES[when])
    for when in ("tolerant", "critical")
    for percent in LEVELS
)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(QUIET),
        *BURSTS,
        *BY_LEVEL,
        Scenario("even-10", (0.1,)),
        Scenario("runs-10", (0.1,), run=8.0),
        Scenario("uneven-10", (0.1,), uneven=True),
        Scenario("even-40", (0.4,)),
        Scenario("congested", link=Link(rate=12.5e6, queue=64 << 10), compute_s=0.0),
    )
}
