"""Losses in runs: which mean length a run can have.

Gilbert's chain (Bell Syst. Tech. J. 39, 1960), its good state losing nothing and its bad one all,
needs a packet that passes between two runs. Runs shorter than loss / (1 - loss) would therefore
lose less than asked; everything here that injects loss refuses them (the engine's own check is
`proto/loss_runs.h`).
"""

from __future__ import annotations

__all__ = ["runs_possible", "shortest_run"]

ROUNDING = 1e-9


def shortest_run(loss: float) -> float:
    """The shortest mean run, in packets, that makes up a share `loss` in [0, 1) of all packets."""
    return loss / (1.0 - loss)


def runs_possible(loss: float, run: float) -> bool:
    """Whether runs of `run` packets on average can make up a share `loss` in [0, 1)."""
    return run * (1.0 - loss) >= loss - ROUNDING
