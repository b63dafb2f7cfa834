"""`gradwire sim fuzz`: whole jobs in virtual time, each drawn from a seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from gradwire.sim.fuzz.draw import draw
from gradwire.sim.fuzz.life import SIZES, Cut
from gradwire.sim.fuzz.runner import run, smallest, verdict_of

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _sim() -> None:
    """Search for faults of the engine by seeds: whole jobs in virtual time."""


@app.command()
def fuzz(
    seeds: Annotated[str, typer.Option(help="the seeds A..B, B included, or one seed")],
    jobs: Annotated[int, typer.Option(min=1, help="number of processes")] = 1,
    state: Annotated[Path | None, typer.Option(help="file of what has run, to go on later")] = None,
    keep: Annotated[str | None, typer.Option(help="faults of one seed that stay, by index")] = None,
    sizes: Annotated[str, typer.Option(help="sizes of one seed, as workers=2,steps=1")] = "",
    plain: Annotated[str, typer.Option(help="options of one seed that are left out")] = "",
) -> None:
    """Run whole jobs in virtual time, each drawn from a seed with its network and its faults.

    Each failing seed is shrunk, and a line says how to replay it. Status 0: none failed. 1: some
    did. 2: an impossible option.
    """
    first, last = _range(seeds)
    if keep is not None or sizes or plain:
        raise typer.Exit(_replay(first, _cut(keep, sizes, plain)))
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
            cut = "" if outcome == "ended" else f" {smallest(seed, outcome)}"
            typer.echo(f"  gradwire sim fuzz --seeds {seed}{cut}")
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
    first, _, last = seeds.partition("..")
    try:
        found = int(first), int(last or first)
    except ValueError:
        raise typer.BadParameter(f"{seeds!r}; allowed are A..B and one seed") from None
    if not 0 <= found[0] <= found[1]:
        raise typer.BadParameter(f"{seeds!r}; seeds begin at 0, and A is at most B")
    return found


def _cut(keep: str | None, sizes: str, plain: str) -> Cut:
    try:
        kept = (
            None
            if keep is None
            else tuple(int(each) for each in keep.split(",") if each not in ("", "none"))
        )
        pairs = [each.partition("=") for each in sizes.split(",") if each]
        chosen = tuple((name, int(value)) for name, _, value in pairs)
    except ValueError:
        raise typer.BadParameter("--keep takes indices, --sizes name=number") from None
    if unknown := {name for name, _ in chosen} - set(SIZES):
        raise typer.BadParameter(f"--sizes has {min(unknown)!r}; allowed are {', '.join(SIZES)}")
    return Cut(kept, chosen, tuple(each for each in plain.split(",") if each))
