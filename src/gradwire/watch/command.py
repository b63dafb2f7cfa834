"""`gradwire top`: shows what a running job does, from any of its hosts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from gradwire.core.errors import GradwireError
from gradwire.watch.figures import SHOWN_STEPS, picture
from gradwire.watch.source import Watched, find_job
from gradwire.watch.table import draw

app = typer.Typer(add_completion=False)

PAGE_STEPS = 400
"""How many steps the page shows."""


@app.command()
def top(
    job: Annotated[
        str | None,
        typer.Argument(
            help="a job's first digits, or its script's name; the newest of this user if absent"
        ),
    ] = None,
    once: Annotated[bool, typer.Option("-1", "--once", help="print once and leave")] = False,
    in_json: Annotated[bool, typer.Option("--json", help="print a line of JSON each time")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=60.0, help="seconds between two looks")
    ] = 1.0,
    web: Annotated[
        bool, typer.Option("--web", help="show it as a page of this host, for a browser")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of that page; 0 for any free one")
    ] = 0,
) -> None:
    """Show what a running job does: rates, losses, waits and steps, from any of its hosts.

    The job needs no preparation: its processes on this host are asked, and no others. Rates are
    those since the look before; the first has means since the job began. Ctrl-C leaves. The exit
    status is 0, 1 where the job has failed, and 2 where there is no job to show.
    """
    try:
        meant, others = find_job(job)
        watched = Watched(meant, PAGE_STEPS if web else SHOWN_STEPS, others)
    except GradwireError as error:
        if in_json:
            typer.echo(json.dumps({"error": str(error)}))
        else:
            typer.echo(f"gradwire top: {error}", err=True)
        raise typer.Exit(2) from error
    if web:
        _serve(watched, interval, port)
        return
    try:
        state = _follow(watched, once, in_json, interval)
    except BrokenPipeError:  # as of `gradwire top | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        state = ""
    raise typer.Exit(1 if state == "failed" else 0)


def _serve(watched: Watched, interval: float, port: int) -> None:
    from gradwire.watch.web import PageServer

    try:
        server = PageServer(watched, interval, port)
    except OSError as error:
        typer.echo(f"gradwire top: --port {port}: {error.strerror}; choose another", err=True)
        raise typer.Exit(2) from error
    taken = server.server_address[1]
    print(server.url, flush=True)
    there = f"ssh -L {taken}:127.0.0.1:{taken} {socket.gethostname()}"
    typer.echo(f"From another machine, first: {there}. Ctrl-C ends it.", err=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def _follow(watched: Watched, once: bool, in_json: bool, interval: float) -> str:
    console = Console(highlight=False, soft_wrap=True)
    utf = "utf" in console.encoding.lower()
    full = console.is_interactive and not (once or in_json)
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        live = Live(console=console, screen=True, auto_refresh=False)
        if full:
            stack.enter_context(live)
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        while True:
            began = time.monotonic()
            watched.look()
            figures = picture(watched)
            if in_json:
                print(json.dumps(figures), flush=True)
            elif full:
                live.update(draw(figures, *console.size, utf), refresh=True)
            elif console.is_terminal:
                console.print(draw(figures, console.width, None, utf))
            else:
                print(draw(figures, console.width, None, utf).plain, flush=True)
            if once or figures["state"] == "ended":
                break
            if not (full or in_json):
                print()
            time.sleep(max(0.0, watched.pause(interval) - (time.monotonic() - began)))
    if full and figures:  # the last figures stay on the terminal
        console.print(draw(figures, console.width, None, utf))
    return str(figures.get("state", ""))
