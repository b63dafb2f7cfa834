"""This process's place in a job, from the environment that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.core.errors import ConfigError
from gradwire.doctor.findings import Finding

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI's
    ("mpirun", "PMI_RANK", "PMI_SIZE"),  # MPICH's and its relatives'
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
)
"""Launchers that set no RANK and WORLD_SIZE, and the variables that they set instead.

An mpirun inside of a job of Slurm comes before Slurm, whose variables are then those of the
process that mpirun was started by."""


@dataclass(frozen=True)
class Place:
    """This process's place in a job, from the environment that launchers set.

    Attributes:
        hosted: Whether the launcher hosts the store; else rank 0 does.
    """

    rank: int
    world: int
    address: str
    port: int
    hosted: bool


def place_of_environment(environment: Mapping[str, str] | None = None) -> Place | None:
    """Returns this process's place in a job; None where it is alone."""
    given = {name: text for name, text in _variables(environment).items() if text}
    launched = _launched(given)
    # In a batch script, outside of srun, the others are not there.
    started = launched is not None and launched.launcher != "Slurm"
    names = {name: name for name in VARIABLES}  # of the variables that are read
    if launched is not None and started and any(given.get(name) for name in VARIABLES):
        for name, read in (("RANK", launched.rank), ("WORLD_SIZE", launched.world)):
            if not given.get(name):
                names[name], given[name] = read, given[read]
    if not given.get("RANK") and not given.get("WORLD_SIZE"):
        return None
    for name in VARIABLES:
        if not given.get(name):
            there = [each for each in VARIABLES if given.get(each)]
            raise ConfigError.about(
                f"{name} is not set, but {', '.join(names[each] for each in there)}",
                f"a job sets all of {', '.join(names.values())}; unset "
                f"{', '.join(each for each in there if names[each] == each)} to check this host "
                "alone",
                setting=name,
            )
    numbers: dict[str, int] = {}
    for name, most in (("WORLD_SIZE", 1 << 20), ("RANK", 1 << 20), ("MASTER_PORT", 65_535)):
        text = given[name]
        if not (text.isascii() and text.isdigit() and int(text) <= most):
            raise ConfigError.of(names[name], text, f"a whole number up to {most}")
        numbers[name] = int(text)
    if not numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise ConfigError.of(
            names["RANK"],
            given["RANK"],
            f"below {names['WORLD_SIZE']}",
            beside=f"of {numbers['WORLD_SIZE']}",
        )
    if numbers["WORLD_SIZE"] == 1:
        return None
    hosted = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = given["MASTER_ADDR"], numbers["MASTER_PORT"]
    return Place(numbers["RANK"], numbers["WORLD_SIZE"], address, port, hosted)


def beside_others() -> list[Finding]:
    """Returns a warning where a launcher started several processes, each of which is alone."""
    given = _variables(None)
    launched = _launched(given)
    if launched is None:
        return []
    first, slurm = "HOST", launched.launcher in ("srun", "Slurm")
    if slurm:
        first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    typed = f"export MASTER_ADDR={first} MASTER_PORT=29500   # the host of rank 0, a free port"
    if launched.launcher == "Slurm":
        typed += "\nsrun gradwire doctor"
    text = (
        f"{launched.launcher} has {given[launched.world]} tasks, and this process checks its own "
        "host alone: without a meeting point nothing is known of the other hosts and of the "
        "network."
    )
    return [Finding("warning", "job", text, typed)]


@dataclass(frozen=True)
class Launched:
    """What a launcher's own variables say.

    Attributes:
        rank: The variable with the rank of this process.
        world: The variable with the number of processes.
    """

    launcher: str
    rank: str
    world: str


def _launched(given: Mapping[str, str]) -> Launched | None:
    """Returns what a launcher of several processes has set; None where there is none."""
    if given.get("RANK") and given.get("WORLD_SIZE"):
        return None
    step = [given.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    for name, rank, world in LAUNCHERS:
        if given.get(rank) and given.get(world):
            if given[world] == "1":
                return None
            # srun sets PMI's variables as well, to the same numbers as its own.
            same = [given[rank], given[world]] == step
            return Launched("srun" if same else name, rank, world)
    return None


def _variables(environment: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environment is None else environment
