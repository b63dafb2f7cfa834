"""`gradwire bench` measures ratios to a physical limit, beside a peer in the same run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.bench.cases import Case, cases
from gradwire_lab.bench.encodings import NETWORKS as QUIET
from gradwire_lab.bench.encodings import run_encodings
from gradwire_lab.bench.fsdp import run_fsdp
from gradwire_lab.bench.host_ranks import run_host_ranks
from gradwire_lab.bench.idle_command import idle
from gradwire_lab.bench.kernel_command import kernel
from gradwire_lab.bench.net import run_case
from gradwire_lab.bench.networks_command import networks
from gradwire_lab.bench.options import AsJson, Standard, need_network
from gradwire_lab.bench.page_command import page
from gradwire_lab.bench.replicas import run_replicas
from gradwire_lab.bench.start import NETWORKS as STARTS
from gradwire_lab.bench.start import run_start
from gradwire_lab.bench.transport_command import transport
from gradwire_lab.bench.wires import wires
from gradwire_lab.contest.measure import CONVENTION
from gradwire_lab.faults.command import faults
from gradwire_lab.faults.soak import soak
from gradwire_lab.study.command import accuracy

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(accuracy)
app.command()(faults)
app.command()(idle)
app.command()(kernel)
app.command()(networks)
app.command()(page)
app.command()(soak)
app.command()(wires)
app.command()(transport)


@app.callback()
def _root() -> None:
    """Measure gradwire beside its peers."""


@app.command()
def net(
    network: Standard = "A",
    case: Annotated[str, typer.Option(help="exact, bursts, push, or all")] = "all",
    rounds: Annotated[int, typer.Option(help="rounds of each contestant (0: the case's own)")] = 0,
    rhythm: Annotated[
        tuple[float, float] | None,
        typer.Option(help="of the bursts: milliseconds of each, and from one to the next"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write all rounds as JSON there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Race gradwire against TCP on a network of namespaces; times are over the header ideal."""
    known = cases(network)
    if case != "all" and case not in known:
        raise typer.BadParameter(f"--case {case}: {', '.join(known)} or all")
    if rhythm is not None:
        if not 0 < rhythm[0] <= rhythm[1] < math.inf:
            why = f"{rhythm[0]:g} {rhythm[1]:g}: positive, and no longer than from one to the next"
            raise typer.BadParameter(why, param_hint="--rhythm")
        if case not in ("bursts", "all"):
            raise typer.BadParameter(f"--rhythm: case {case} has no bursts; --case bursts has")
        known = {name: row.with_rhythm(*rhythm) for name, row in known.items()}
    need_network()
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()
        except OSError as error:
            why = f"{out}: cannot be written: {error.strerror}"
            raise typer.BadParameter(why, param_hint="--out") from error
    results = []
    for row in known.values() if case == "all" else [known[case]]:
        console = Console(stderr=True)
        with console.status(f"{row.name} on network {network}") as status:

            def show(name: str, done: int, row: Case = row) -> None:
                status.update(f"{row.name} on network {network}: {name} {done} rounds")

            results.append(run_case(row, rounds or None, progress=show))
        if out is not None:
            out.write_text(json.dumps(results))
        if not as_json:
            _print(results[-1])
    if as_json:
        for result in results:
            for contestant in result["contestants"].values():
                del contestant["seconds"], contestant["starts"]
        print(json.dumps(results))


@app.command()
def hosts(
    network: Standard = "A",
    count: Annotated[int, typer.Option(help="hosts")] = 2,
    ranks: Annotated[int, typer.Option(help="ranks on each host")] = 4,
    size: Annotated[float, typer.Option(help="MiB of each rank's gradient")] = 16.0,
    rounds: Annotated[int, typer.Option(help="rounds of each contestant")] = 30,
    as_json: AsJson = False,
) -> None:
    """Sum over several ranks a host, with and without sums within the hosts, beside Gloo."""
    need_network()
    result = run_host_ranks(network, count, ranks, int(size * (1 << 18)) * 4, rounds)
    if as_json:
        print(json.dumps(result))
        return
    print(
        f"{count} hosts of {ranks} ranks, network {network}, {size:g} MiB, {rounds} rounds; "
        f"header ideal of {count} ranks {result['ideal_seconds'] * 1e3:.1f} ms"
    )
    for name, found in result["contestants"].items():
        print(
            f"{name}: median {found['median_seconds'] * 1e3:.1f} ms, "
            f"p90 {found['p90_seconds'] * 1e3:.1f} ms, "
            f"{found['port_bytes'] / 1e6:.2f} MB out of the busiest port a round"
        )


@app.command()
def replicas(
    network: Standard = "A",
    steps: Annotated[int, typer.Option(help="of training, with each pull mode")] = 500,
    as_json: AsJson = False,
) -> None:
    """Train through loss with both pull modes and compare all ranks' parameters bit by bit."""
    need_network()
    results = [run_replicas(network, steps, pull) for pull in ("exact", "committed")]
    if as_json:
        print(json.dumps(results))
    else:
        for result in results:
            first = result["ranks"][0]
            lossy = min(rank["lossy_steps"] for rank in result["ranks"])
            delivered = min(rank["delivered_mean"] for rank in result["ranks"])
            print(
                f"pull {result['pull']}: {first['steps']} steps, at least {lossy} of them lossy on "
                f"each rank, delivered {delivered:.4f} at least, "
                f"replicas {'identical' if result['identical'] else 'DIFFER'} "
                f"({first['hash'][:16]})"
            )
    if not all(result["identical"] for result in results):
        raise typer.Exit(1)


@app.command()
def fsdp(
    network: Standard = "A",
    steps: Annotated[int, typer.Option(min=1, help="of training, by each policy and layout")] = 60,
    as_json: AsJson = False,
) -> None:
    """Train a sharded model (FSDP2) under bursts, without and with replicas, beside Gloo."""
    need_network()
    results = [run_fsdp(network, steps, replicas) for replicas in (1, 2)]
    if as_json:
        print(json.dumps(results))
    else:
        for result in results:
            _print_fsdp(result)
    every = [found for result in results for found in result["contestants"].values()]
    if not all(f["identical"] and f["agreed"] and not f["beyond_bound"] for f in every):
        raise typer.Exit(1)


def _print_fsdp(result: dict[str, Any]) -> None:
    shards = result["hosts"] // result["replicas"]
    print(
        f"{result['replicas']} replicas of {shards} shards, network {result['network']}, bursts, "
        f"{result['parameters'] / 1e6:.2f} million parameters"
    )
    for name, found in result["contestants"].items():
        print(
            f"{name}: {found['steps']} steps, median {found['median_seconds'] * 1e3:.0f} ms, "
            f"p90 {found['p90_seconds'] * 1e3:.0f} ms, max {found['max_seconds'] * 1e3:.0f} ms, "
            f"delivered {found['delivered_mean']:.4f}, least {found['delivered_least']:.4f}, "
            f"{found['exceeded_steps']} steps reported beyond a bound and "
            f"{found['beyond_bound']} regions unreported, "
            f"replicas {'identical' if found['identical'] else 'DIFFER'}"
        )


@app.command()
def start(
    network: Annotated[str, typer.Option(help=", ".join(STARTS))] = "A",
    ranks: Annotated[int, typer.Option(min=2, max=64, help="number of ranks")] = 4,
    size: Annotated[float, typer.Option(help="KiB of each rank's buffer")] = 8192.0,
    jobs: Annotated[int, typer.Option(min=1, help="jobs that start")] = 5,
    as_json: AsJson = False,
) -> None:
    """Start jobs, and compare the third sum of each with its late ones."""
    if network not in STARTS:
        raise typer.BadParameter(f"--network {network}: {', '.join(STARTS)}")
    if not math.isfinite(size) or (elements := int(size * 256)) < 1:
        raise typer.BadParameter(f"--size {size:g}: at least one float32 element")
    need_network()
    with Console(stderr=True).status(network) as status:
        result = run_start(network, ranks, elements * 4, jobs, progress=status.update)
    if as_json:
        print(json.dumps(result))
        return
    for job in result["jobs"]:
        print(
            f"first {job['first'] * 1e3:.1f} ms, third {job['third'] * 1e3:.1f} ms, "
            f"30th to 40th {job['late'] * 1e3:.1f} ms, third over these "
            f"{job['third_over_late']:.2f}, {job['packets_lost_at_ports']} packets lost"
        )
    print(f"third over late, median of {jobs} jobs: {result['third_over_late']:.2f}")


@app.command()
def encodings(
    network: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(QUIET)}; may be given again")
    ] = None,
    before: Annotated[int, typer.Option(min=1, help='steps of "adaptive" that come before')] = 100,
    steps: Annotated[int, typer.Option(min=1, help="timed steps of each contestant")] = 60,
    as_json: AsJson = False,
) -> None:
    """Train on quiet networks by policy "adaptive", beside fixed encodings and Gloo."""
    for name in network or ():
        if name not in QUIET:
            raise typer.BadParameter(f"--network {name}: {', '.join(QUIET)}")
    need_network()
    results = []
    for name in network or QUIET:
        with Console(stderr=True).status(name) as status:
            results.append(run_encodings(name, before, steps, progress=status.update))
        if not as_json:
            _print_encodings(results[-1])
    if as_json:
        print(json.dumps(results))


def _print_encodings(result: dict[str, Any]) -> None:
    before = result["before"]
    print(
        f"{result['network']['name']}, {result['parameters'] / 1e6:.2f} million parameters: "
        f"adaptive takes {result['over_best']:.3f} of {result['best']}, the best fixed encoding, "
        f"after {before['steps']} steps, which had a median of {before['median'] * 1e3:.0f} ms"
    )
    for name, found in result["contestants"].items():
        shares = ", ".join(f"{share} in {steps}" for share, steps in found["encoded"].items())
        print(
            f"{name}: {found['steps']} steps, median {found['median'] * 1e3:.1f} ms, "
            f"p90 {found['p90'] * 1e3:.1f} ms, share of the bytes {shares}"
        )


def _print(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['case']}, network {result['network']['name']}, {result['hosts']} hosts, "
        f"{result['bytes'] / 1e6:g} MB, header ideal {result['ideal_seconds'] * 1e3:.1f} ms",
        caption=f"times over the header ideal; packets lost at the ports in all: "
        f"{result['packets_lost_at_ports']}\n{CONVENTION}\n{result['environment']}",
    )
    for column in ("contestant", "rounds", "median", "p90", "p99", "max", "sent again"):
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for name, summary in result["contestants"].items():
        sent = sum(report.get("packets_sent", 0) for report in summary["reports"])
        again = sum(report.get("retransmissions", 0) for report in summary["reports"])
        times = (summary[key] for key in ("median", "p90", "p99", "max"))
        table.add_row(
            name,
            str(summary["rounds"]),
            *("–" if each is None else f"{each:.3f}" for each in times),
            f"{again / sent:.3%}" if sent else "–",
        )
    Console().print(table)
