"""Search by seeds: whole jobs drawn from one seed each, with faults, in virtual time.

`draw` makes a `Life` (a job and its faults) of a seed, `judge` runs it and says what is wrong with
it, `shrink` leaves out what a failure does not need, and `Runner` does so for ranges of seeds.
"""

from gradwire.sim.fuzz.draw import draw
from gradwire.sim.fuzz.judge import Verdict, judge
from gradwire.sim.fuzz.life import Cut, Fault, Life

__all__ = ["Cut", "Fault", "Life", "Verdict", "draw", "judge"]
