"""Injected losses in runs, and the mean lengths that such runs can have.

The model is Gilbert's chain (Bell Syst. Tech. J. 39, 1960), whose good state loses no packet and
whose bad state loses all. At least one packet passes between two runs. Runs with a mean length
below loss / (1 - loss) would therefore lose less than asked, so everything that injects loss
refuses them (the engine's own check is `proto/base/loss_runs.h`).
"""

from __future__ import annotations

ROUNDING = 1e-9


def shortest_run(loss: float) -> float:
    """Returns the smallest mean length of a run, in packets."""
    return loss / (1.0 - loss)


def runs_possible(loss: float, run: float) -> bool:
    """Returns whether runs of `run` packets on average can make up a share `loss` in [0, 1)."""
    return run * (1.0 - loss) >= loss - ROUNDING
