"""`gradwire doctor`: checks this host, or under torchrun all hosts of the job and their network."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from typing import Annotated

import typer

from gradwire.core.errors import ConfigError
from gradwire.doctor.findings import as_json, exit_status, lines, refuse, summary, wrapped
from gradwire.doctor.host import check_host
from gradwire.doctor.job import examine
from gradwire.doctor.place import Place, beside_others, place_of_environment

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    in_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Check this host, or under torchrun all hosts of the job and the network between them.

    Settings come from GRADWIRE_* variables, as in a job. srun and mpirun do as well as torchrun,
    once MASTER_ADDR and MASTER_PORT are set. Under any of them each two hosts measure the
    path between them, in rounds of pairs, and rank 0 prints what is wrong. The exit status is 0
    where all is well or there are warnings, 1 where there is a problem (on all ranks), 2 for an
    impossible environment.
    """
    try:
        place = place_of_environment()
    except ConfigError as error:
        refuse("doctor", error, in_json=in_json)
    raise typer.Exit(_alone(in_json) if place is None else _job(place, in_json))


def _alone(in_json: bool) -> int:
    host = check_host()
    host.findings += beside_others()
    if in_json:
        more = {
            "host": socket.gethostname(),
            "versions": host.versions,
            "addresses": [asdict(each) for each in host.addresses],
            "features": host.features,
            "cpus": host.cpus,
        }
        typer.echo(json.dumps({**as_json(host.findings), **more}))
    else:
        typer.echo(f"gradwire doctor: {socket.gethostname()}\n")
        typer.echo("\n".join(lines(host.findings)))
        last = f"{summary(host.findings)} `gradwire probe --help` says how to test a path."
        typer.echo("\n".join(["", *wrapped(last)]))
    return exit_status(host.findings)


def _job(place: Place, in_json: bool) -> int:
    def say(text: str) -> None:
        if place.rank == 0:
            typer.echo(f"gradwire doctor: {text}", err=True)

    result = examine(place, say)
    if place.rank == 0 or not result.met:
        typer.echo(json.dumps(result.as_json()) if in_json else result.text())
    result.leave()
    return exit_status(result.findings)
