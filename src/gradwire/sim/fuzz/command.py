"""`gradwire sim fuzz`: whole jobs in virtual time, each drawn from a seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from gradwire.sim.fuzz.draw import draw
from gradwire.sim.fuzz.life import SIZES, Cut, Life
from gradwire.sim.fuzz.runner import check_state, impossible, run, smallest, verdict_of
from gradwire.sim.fuzz.shrink import FLAGS, LEAST

SEEDS = 1 << 64
"""Number of seeds that there are: the fabric's own has 64 bits."""
MOST_SEEDS = 100_000_000
"""The most seeds of one run, which lists its batches; a core runs far fewer in a month."""

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _sim() -> None:
    """Search for faults of the engine by seeds: whole jobs in virtual time."""


@app.command()
def fuzz(
    seeds: Annotated[str, typer.Option(help="the seeds A..B, B included, or one seed")],
    jobs: Annotated[int, typer.Option(min=1, help="number of processes")] = 1,
    state: Annotated[Path | None, typer.Option(help="file of what has run, to go on later")] = None,
    keep: Annotated[
        str | None, typer.Option(help="faults of one seed that stay, by index, or none")
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="sizes of one seed that are made smaller, as workers=2,steps=1")
    ] = "",
    plain: Annotated[str, typer.Option(help="options of one seed that are left out")] = "",
) -> None:
    """Run whole jobs in virtual time, each drawn from a seed with its network and its faults.

    Each failing seed is shrunk, and a line says how to replay it. Status 0: none failed. 1: some
    did. 2: an impossible option.
    """
    first, last = _range(seeds)
    if keep is not None or sizes or plain:
        if first != last or state is not None:
            raise typer.BadParameter(
                "--keep, --sizes and --plain are for a single seed, of which no --state is kept"
            )
        life = draw(first)
        cut = Cut(_keep(keep, life), _sizes(sizes, life), _plain(plain, life))
        if why := impossible(cut.of(life)):
            raise typer.BadParameter(f"seed {first} cannot be cut so: {why}")
        raise typer.Exit(_replay(first, cut))
    try:
        check_state(state)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--state {state}: {error}") from None
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    failed = 0
    for batch in run(first, last, jobs, state):
        outcomes.update(batch["outcomes"])
        faults.update(batch["faults"])
        causes.update(batch["causes"])
        for seed, outcome, text in batch["failed"]:
            failed += 1
            typer.echo(f"seed {seed}: {outcome}: {text}")
            left = "" if outcome == "ended" else f" {smallest(seed, outcome)}"
            typer.echo(f"  gradwire sim fuzz --seeds {seed}{left}")
    total = sum(outcomes.values())
    for title, counts in (("outcomes", outcomes), ("seeds by fault", faults), ("causes", causes)):
        said = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        typer.echo(f"{title}: {said or 'none'}")
    typer.echo(f"{total} seeds, {failed} failed")
    if first == last and not failed:
        typer.echo(str(draw(first)))
    raise typer.Exit(1 if failed else 0)


def _replay(seed: int, cut: Cut) -> int:
    typer.echo(str(cut.of(draw(seed))))
    verdict = verdict_of(seed, cut)
    typer.echo(f"{verdict.outcome} after {verdict.seconds:.6f} s {verdict.text}")
    return 1 if verdict.wrong else 0


def _range(seeds: str) -> tuple[int, int]:
    first, dots, last = seeds.partition("..")
    texts = (first, last if dots else first)
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise typer.BadParameter(f"{seeds!r}; allowed are A..B and one seed")
    found = int(texts[0]), int(texts[1])
    if not found[0] <= found[1] < SEEDS:
        raise typer.BadParameter(f"{seeds!r}; seeds are below 2**64, and A is at most B")
    if found[1] - found[0] >= MOST_SEEDS:
        raise typer.BadParameter(f"{seeds!r}; a run has at most {MOST_SEEDS} seeds")
    return found


def _keep(keep: str | None, life: Life) -> tuple[int, ...] | None:
    if keep is None or keep == "none":
        return None if keep is None else ()
    allowed = "0" if len(life.faults) == 1 else f"0 to {len(life.faults) - 1}"
    allowed = f"indices from {allowed}, or none" if life.faults else "none, for it has no faults"
    found = []
    for text in keep.split(","):
        right = text.isascii() and text.isdigit() and int(text) < len(life.faults)
        if not right or int(text) in found:
            raise typer.BadParameter(f"--keep {keep!r} of seed {life.seed}; allowed are {allowed}")
        found.append(int(text))
    return tuple(found)


def _sizes(sizes: str, life: Life) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for each in sizes.split(",") if sizes else ():
        name, _, text = each.partition("=")
        if name not in SIZES or name in found:
            raise typer.BadParameter(f"--sizes has {each!r}; allowed are {', '.join(SIZES)}, once")
        least, most = LEAST[name], getattr(life, name)
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise typer.BadParameter(
                f"--sizes has {each!r}; allowed is a number from {least} to {most}, which is what "
                f"seed {life.seed} has"
            )
        found[name] = int(text)
    return tuple(found.items())


def _plain(plain: str, life: Life) -> tuple[str, ...]:
    known = [name for name in (*life.options, *FLAGS) if name != "policy"]
    names = tuple(plain.split(",")) if plain else ()
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"--plain has {name!r}; allowed for seed {life.seed} are {', '.join(known)}"
            )
    return names
