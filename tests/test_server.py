"""Route "server": `gradwire server` processes sum for the workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._engine import PROTOCOL_VERSION
from gradwire.core.errors import ConfigError, GradwireError, RendezvousError
from gradwire.core.settings import Settings
from gradwire.server import open_store, serve
from gradwire.transport.addresses import LocalAddress, host_identity
from gradwire.transport.communicator import Communicator
from gradwire.transport.introductions import Introduction, introduce
from gradwire.transport.open_engine import meet_servers
from ranks import Ranks, free_port
from threads import at_once


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@contextlib.contextmanager
def server_processes(
    port: int, workers: int, servers: int, host: str = "127.0.0.1"
) -> Iterator[list[Any]]:
    command = [sys.executable, "-m", "gradwire.cli", "server", "--json", "--servers", str(servers)]
    command += ["--store", f"{host}:{port}", "--workers", str(workers), "--timeout", "120"]
    processes = [
        subprocess.Popen(
            [*command, "--index", str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(servers)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def trains(rank: int, world: int, servers: int, policy: str) -> tuple[bytes, float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 64))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.1)
    attachment = gradwire.attach(
        ddp, policy, route="server", servers=servers, rendezvous_timeout=120
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(25):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    delivered = attachment.report().delivered
    attachment.communicator.close()
    parameters = [p.detach().flatten() for p in net.parameters()]
    return torch.cat(parameters).numpy().tobytes(), delivered


@pytest.mark.parametrize(("servers", "policy"), [(1, "reliable"), (2, "dblp"), (1, "ltp")])
def test_servers_sum_for_the_workers_and_end_with_them(servers: int, policy: str) -> None:
    with (
        Ranks(2) as ranks,
        server_processes(ranks.port, 2, servers) as processes,
    ):
        (first, delivered), (second, _) = ranks.run(trains, servers=servers, policy=policy)
        assert first == second
        assert delivered == 1.0 if policy == "reliable" else delivered >= 0.592
        for process in processes:
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0, out
            last = json.loads(out.splitlines()[-1])
            assert last["event"] == "done"
            assert last["counters"]["packets_received"] > 0


def trains_together(rank: int, world: int) -> list[bytes]:
    """Two modules share each backward pass, and the guard sends every step again."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(64, n), nn.ReLU(), nn.Linear(n, 64)) for n in (600, 100)]
    ddps = [DistributedDataParallel(net, bucket_cap_mb=0.1) for net in nets]
    options = {"p": 0.4, "spend": "anything", "floor": 0.9, "rendezvous_timeout": 120}
    attachments = [gradwire.attach(ddp, "mlt", route="server", **options) for ddp in ddps]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.05)
    for step in range(10):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        torch.stack([ddp(x).square().mean() for ddp in ddps]).sum().backward()
        optimizer.step()
        assert [each.report().guard for each in attachments] == ["resent", "resent"]
    for each in attachments:
        each.communicator.close()
    return [p.detach().numpy().tobytes() for net in nets for p in net.parameters()]


def test_a_server_sums_for_modules_that_share_a_backward_pass() -> None:
    with Ranks(2) as ranks, server_processes(ranks.port, 2, 1) as processes:
        first, second = ranks.run(trains_together)
        assert first == second
        out, _ = processes[0].communicate(timeout=60)
        assert processes[0].returncode == 0, out


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
def test_a_server_joins_a_job_over_ipv6() -> None:
    with (
        Ranks(2, MASTER_ADDR="::1") as ranks,
        server_processes(ranks.port, 2, 1, host="[::1]") as (process,),
    ):
        (first, _), (second, _) = ranks.run(trains, servers=1, policy="reliable")
        assert first == second
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out


def without_server(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(gradwire.RendezvousError) as raised:
        gradwire.attach(ddp, route="server", servers=2, rendezvous_timeout=1.0)
    return str(raised.value)


def test_servers_that_are_missing_are_named() -> None:
    with Ranks(2) as ranks:
        for message in ranks.run(without_server):
            assert "servers 0, 1 did not join within 1 s" in message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_told_to_stop_stops_while_it_waits(number: signal.Signals) -> None:
    with Ranks(1) as ranks, server_processes(ranks.port, 1, 1) as (process,):
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [line["event"] for line in lines] == ["looking", "waiting"]
        assert f"127.0.0.1:{ranks.port}" in lines[0]["message"]
        assert "0 of 1 workers" in lines[1]["message"]
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert json.loads(out.splitlines()[-1])["event"] == "stopped"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "nonsense", "--workers", "2"], "store='nonsense': expected host:port"),
        (["--store", "[::1]", "--workers", "2"], "store='[::1]': expected host:port, [IPv6"),
        (["--store", "[host]:1", "--workers", "2"], "store='[host]:1': expected host:port"),
        (["--store", "a:b:1", "--workers", "2"], "store='a:b:1': expected host:port"),
        (["--store", "h:²", "--workers", "2"], "store='h:²': expected host:port"),
        (["--store", "file:///no/such/f", "--workers", "2"], "there is no folder '/no/such'"),
        (["--store", "file:///", "--workers", "2"], "expected the file of a FileStore"),
        (["--store", "h:1", "--workers", "-2"], "workers=-2: 1 or more"),
        (["--store", "h:1", "--workers", "0"], "workers=0: 1 or more"),
        (["--store", "", "--workers", "2"], "store='': expected host:port"),
        (["--store", "h:1", "--workers", "2", "--index", "1"], "index=1 with servers=1"),
        (["--store", "h:1", "--workers", "2", "--timeout", "nan"], "rendezvous_timeout=nan"),
        (["--store", "127.0.0.1:1", "--workers", "2", "--timeout", "0.5"], "no store answers"),
        (["--workers", "2"], "MASTER_ADDR and MASTER_PORT"),
        (["--store", "h:1", "--servers", "0"], "servers=0 with route='server'"),
        (["--store", "h:1", "--port", "99999"], "port=99999"),
        (["--store", "h:1", "--dscp", "64"], "dscp=64: a whole number from 0 to 63"),
        (["--store", "h:1"], "give --workers, or set WORLD_SIZE"),
        (["--workers", "-3"], "workers=-3"),  # and not only that a store is missing
    ],
)
def test_the_command_says_what_it_lacks(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from gradwire.cli import app

    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["server", "--json", *arguments])
    assert result.exit_code == (1 if message == "no store answers" else 2)
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["event"] == "failed"
    assert message in last["message"]


VARIABLES = {
    "GRADWIRE_PORT": "4999",
    "GRADWIRE_DSCP": "46",
    "GRADWIRE_RENDEZVOUS_TIMEOUT": "7.5",
    "GRADWIRE_SERVERS": "3",
    "GRADWIRE_ROUTE": "sharded",  # of other jobs of this environment
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (4999, 46, 7.5, 3)),
        (["--port", "0", "--dscp", "0", "--timeout", "2", "--servers", "1"], (0, 0, 2.0, 1)),
    ],
)
def test_the_environment_says_what_the_command_line_does_not(
    arguments: list[str], expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from gradwire import server
    from gradwire.cli import app

    waits: list[float] = []
    served: list[Settings] = []

    def serves(*_: object, settings: Settings, **__: object) -> dict[str, float]:
        served.append(settings)
        return {}

    monkeypatch.setattr(server, "open_store", lambda _, timeout_s: waits.append(timeout_s))
    monkeypatch.setattr(server, "serve", serves)
    command = ["server", "--store", "h:1", "--workers", "2", *arguments]
    result = CliRunner().invoke(app, command, env=VARIABLES)
    assert result.exit_code == 0, result.output
    (found,) = served
    assert found.route == "server"
    assert (found.port, found.dscp, waits[0], found.servers) == expected
    assert found.rendezvous_timeout == waits[0]


def test_a_misspelt_variable_is_refused_as_by_attach() -> None:
    from typer.testing import CliRunner

    from gradwire.cli import app

    command = ["server", "--store", "h:1", "--workers", "2", "--timeout", "0.1"]
    result = CliRunner().invoke(app, command, env={"GRADWIRE_PROT": "5"})
    assert result.exit_code == 2
    assert "GRADWIRE_PROT='5' names no setting (did you mean" in result.output


@pytest.mark.parametrize("first", ["server", "workers"])
@pytest.mark.parametrize("wrong", ["length", "mode", "variable"])
def test_workers_hear_why_a_server_cannot_take_part(first: str, wrong: str, tmp_path: Path) -> None:
    """Whoever comes first; else they would wait out their time-out for it, and never know."""
    (tmp_path / "key").write_text("0f" * 32)
    (tmp_path / "key").chmod(0o644)
    name, value, names = {
        "length": ("GRADWIRE_KEY", "0f" * 31, "key="),
        "mode": ("GRADWIRE_KEY_FILE", str(tmp_path / "key"), "chmod 600"),
        "variable": ("GRADWIRE_PROT", "5", "GRADWIRE_PROT"),
    }[wrong]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "gradwire.cli", "server", "--json", "--workers", "2"]
    command += ["--store", f"127.0.0.1:{store.port}", "--servers", "2", "--index", "1"]
    command += ["--timeout", "600"]
    options = {"route": "server", "servers": 2, "rendezvous_timeout": 600, "interface": "lo"}

    def join(rank: int) -> object:
        with pytest.raises(RendezvousError) as raised:
            Communicator(store, rank, 2, options)
        return str(raised.value)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, name: value}
    ) as process:
        assert process.stdout is not None
        if first == "server":
            said = [json.loads(process.stdout.readline()) for _ in range(2)]
            assert [each["event"] for each in said] == ["failed", "telling"]
            assert names in said[0]["message"]
            time.sleep(0.5)
        texts = at_once(2, join)  # within a minute
        process.wait(60)
    assert process.returncode == 2
    for text in texts:
        assert "server 1 failed" in text
        assert names in text


def test_an_index_beyond_the_servers_is_an_error() -> None:
    settings = Settings.build({"route": "server", "servers": 2}, environment={})
    with pytest.raises(ConfigError) as raised:
        serve(None, workers=2, index=2, settings=settings)
    assert (raised.value.setting, raised.value.value) == ("index", 2)
    with pytest.raises(ConfigError) as raised:
        serve(None, workers=0, index=0, settings=settings)
    assert (raised.value.setting, raised.value.value) == ("workers", 0)


def on_two_of_three(rank: int, world: int) -> str:
    pair = dist.new_group([0, 1])
    if rank == 2:
        return ""
    ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=pair)
    with pytest.raises(gradwire.ConfigError) as raised:
        gradwire.attach(ddp, "reliable", route="server")
    return str(raised.value)


def test_a_group_of_some_ranks_has_no_servers() -> None:
    with Ranks(3) as ranks:
        for message in ranks.run(on_two_of_three)[:2]:
            assert "route='server' with a process group of 2 of the job's ranks" in message


def test_a_server_that_gave_up_can_be_started_again() -> None:
    """As often as it takes: before the workers come, and where it once went in the middle."""
    store = dist.HashStore()
    short = Settings.build({"route": "server", "rendezvous_timeout": 0.2}, environment={})
    for _ in range(2):
        with pytest.raises(RendezvousError, match=r"server 0: no workers came within 0.2 s"):
            serve(store, workers=1, index=0, settings=short)
    options = {"route": "server", "rendezvous_timeout": 0.5}
    with pytest.raises(RendezvousError, match="server 0 did not join"):
        Communicator(store, 0, 1, options)
    found: list[object] = []

    def run() -> None:
        settings = Settings.build({"route": "server", "rendezvous_timeout": 20}, environment={})
        found.append(serve(store, workers=1, index=0, settings=settings))

    for _ in range(2):  # a job may open its engine again; each server process serves one
        server = threading.Thread(target=run)
        server.start()
        time.sleep(0.2)  # the meeting that failed is not taken for the next one
        worker = Communicator(store, 0, 1, {**options, "rendezvous_timeout": 20})
        array = np.ones(1000, np.float32)
        worker.all_reduce(array).wait(10)
        worker.close()
        server.join(20)
    assert len(found) == 2


held: list[Communicator] = []
"""The communicator of a worker's process, from one call of the test to the next."""


def begins(rank: int, world: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    held.append(Communicator(store, rank, world, {"route": "server", "rendezvous_timeout": 120}))


def adds(rank: int, world: int) -> float:
    array = np.full(1000, rank + 1.0, np.float32)
    held[0].all_reduce(array).wait(30)
    return float(array[0])


def ends(rank: int, world: int) -> None:
    held.pop().close()


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def distant_store() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A store in a process of its own, as under torchrun, and its port."""
    arguments = [sys.executable, "-c", STORE]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True) as host:
        assert host.stdout is not None
        yield host, int(host.stdout.readline())
        host.kill()


def test_a_server_needs_no_store_once_all_have_met(
    distant_store: tuple[subprocess.Popen[str], int],
) -> None:
    host, port = distant_store
    with Ranks(2, group=False) as ranks, server_processes(port, 2, 1) as (process,):
        ranks.run(begins, port=port)
        assert ranks.run(adds) == [3.0, 3.0]
        assert any(json.loads(line)["event"] == "serving" for line in process.stdout)
        host.kill()
        host.wait()
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, _ = process.communicate(timeout=1.0)
            raise AssertionError(f"the server has ended: {out}")
        assert ranks.run(adds) == [3.0, 3.0]
        ranks.run(ends)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["done"]  # and no trace


@pytest.mark.parametrize("killed", [(0, 1), (1,)])
def test_a_server_whose_workers_were_killed_has_failed(
    killed: tuple[int, ...],
    distant_store: tuple[subprocess.Popen[str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With their store, as where rank 0 hosts it, or beside another one that says goodbye."""
    monkeypatch.setenv("GRADWIRE_PEER_TIMEOUT", "2")
    host, port = distant_store
    with Ranks(2, group=False) as ranks, server_processes(port, 2, 1) as (process,):
        ranks.run(begins, port=port)
        ranks.run(adds)
        assert any(json.loads(line)["event"] == "serving" for line in process.stdout)
        for rank in killed:
            ranks.kill(rank)
        if killed == (0, 1):
            host.kill()
        else:
            ranks.start(ends)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    lines = [json.loads(line) for line in out.splitlines()]  # and no trace of a lost store
    assert lines[-1]["event"] == "failed"
    assert "server 0" in lines[-1]["message"]


def test_a_store_that_does_not_answer_is_an_error_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(GradwireError, match=r"at 127.0.0.1:1 within 0.5 s: .*refused"):
        open_store("127.0.0.1:1", 0.5)
    assert time.monotonic() - started < 20  # torch itself would try for minutes


def test_a_listener_that_is_no_store_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        command = [sys.executable, "-m", "gradwire.cli", "server", "--workers", "2", "--timeout"]
        store = f"127.0.0.1:{mute.getsockname()[1]}"
        done = subprocess.run(
            [*command, "1", "--store", store], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert f"no store answers at {store} within 1 s, though somebody listens" in done.stderr


def test_an_attempt_that_stands_still_is_followed_by_another() -> None:
    """The first connection to the store gets no answer, as one whose first packets were lost."""
    here = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as between, contextlib.ExitStack() as ends:

        def forward(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(data)

        def relay() -> None:
            for number in range(3):  # the look whether somebody listens, and two attempts
                near = ends.enter_context(between.accept()[0])
                if number == 2:
                    far = ends.enter_context(socket.create_connection(("127.0.0.1", here.port)))
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=forward, args=pair, daemon=True).start()

        threading.Thread(target=relay, daemon=True).start()
        store = open_store(f"127.0.0.1:{between.getsockname()[1]}", 60.0)
        assert store.add("a", 1) == 1
    assert here.add("a", 1) == 2


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
@pytest.mark.parametrize("host", ["[::1]", "::1"])
def test_a_store_of_an_ipv6_address_is_found(host: str) -> None:
    here = dist.TCPStore("::1", 0, is_master=True, wait_for_workers=False)
    store = open_store(f"{host}:{here.port}", 10.0)
    store.set("a", "b")
    assert here.get("a") == b"b"


def test_a_store_that_comes_late_is_found() -> None:
    port = free_port()
    opened: list[object] = []
    late = threading.Timer(
        0.5,
        lambda: opened.append(
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        ),
    )
    late.start()
    store = open_store(f"127.0.0.1:{port}", 10.0)
    late.join()
    store.set("a", "b")
    assert opened[0].get("a") == b"b"  # type: ignore[attr-defined]


def test_a_file_store_that_may_be_written_is_opened(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store", 1.0)
    store.set("a", "b")
    assert open_store(f"file://{tmp_path}/store", 1.0).get("a") == b"b"


def test_a_server_that_met_workers_which_died_meets_those_that_are_started_again() -> None:
    """They met, and the worker was gone before the engines were open."""
    store = dist.HashStore()
    options = {"route": "server", "rendezvous_timeout": 20, "auth": "none"}
    settings = Settings.build(options, environment={})
    found: list[object] = []
    server = threading.Thread(
        target=lambda: found.append(serve(store, workers=1, index=0, settings=settings))
    )
    server.start()
    died = meet_servers(store, "world", settings, endpoint=0, workers=1)
    introduce(
        died,
        Introduction(
            0,
            PROTOCOL_VERSION,
            (LocalAddress("127.0.0.1"),),
            identity=host_identity(),
            configuration={
                "route": "server",
                "servers": 1,
                "workers": 1,
                "auth": "none",
                "cores": 1,
            },
            session=1,
        ),
    )
    worker = Communicator(store, 0, 1, settings)
    array = np.ones(1000, np.float32)
    worker.all_reduce(array).wait(10)
    worker.close()
    server.join(20)
    assert len(found) == 1


def comes(rank: int, world: int, port: int, wait_s: float, patience_s: float) -> str:
    """One life of a rank, in a store that outlives it."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    time.sleep(wait_s)
    try:
        member = Communicator(store, rank, 2, {"rendezvous_timeout": patience_s, "interface": "lo"})
    except RendezvousError as error:
        return f"ranks {error.ranks}"
    array = np.full(1000, rank + 1.0, np.float32)
    member.all_reduce(array).wait(10)
    return str(array[0])


def test_a_new_life_meets_in_a_store_that_outlives_the_processes() -> None:
    """In the first life a rank is killed before it comes, in the second while the other waits."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for killed in (1, 0):
        with Ranks(2, group=False) as ranks:
            waits = [{"wait_s": 60.0 if rank == killed else 0.0} for rank in range(2)]
            ranks.start(comes, port=host.port, patience_s=3.0, per_rank=waits)
            ranks.kill(killed)
            (outcome,) = ranks.collect(ranks=[1 - killed])
        assert outcome == f"ranks ({killed},)"
    with Ranks(2, group=False) as ranks:
        waits = [{"wait_s": 0.0}, {"wait_s": 1.0}]
        found = ranks.run(comes, port=host.port, patience_s=20.0, per_rank=waits)
        assert found == ["3.0", "3.0"]
