"""Scenarios whose topology has servers: gradwire and plain TCP go over them, Gloo does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError, GradwireError
from gradwire.core.settings import Settings
from gradwire.training.configure import configure
from gradwire.transport.communicator import Communicator
from gradwire_calls import Lab
from gradwire_lab.contest import serving
from gradwire_lab.contest.serving import ServerThread, route_settings
from gradwire_lab.contest.tcp_servers import TcpOverServers
from gradwire_lab.network.addresses import ADDRESS_VARIABLE
from gradwire_lab.run.policy_all_reduce import PolicyAllReduce
from gradwire_lab.run.wires import wires_of
from gradwire_lab.scenario.load import load
from gradwire_lab.scenario.reader import ScenarioError

SERVED = """
name = "served"
title = "over servers"
[topology]
preset = "B"
rate = 50e6
workers = 3
servers = 2
[work]
kind = "all_reduce"
bytes = 200_000
rounds = 4
block = 4
warm_up = 1
[loss]
rate = 0.02
at = "{at}"
when = "{when}"
[[contestants]]
name = "reliable"
transport = "gradwire"
policy = "reliable"
[[contestants]]
name = "ltp"
transport = "gradwire"
policy = "ltp"
options = {{ every = 2 }}
[[contestants]]
name = "{tcp}"
transport = "{tcp}"
congestion_control = "cubic"
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "served.toml"
    file.write_text(text)
    return file


def ran(folder: Path, text: str) -> list[dict[str, Any]]:
    """The contestants of a scenario of one cell, run to its end, which leaves nothing."""
    out = folder / "out"
    lab = Lab(folder, "lab", "run", str(written(folder, text)), "--quick", "--out", str(out))
    assert lab.wait(200.0) == 0, lab.said()
    lab.check_that_nothing_is_left()
    document = json.loads((out / "results.json").read_text())
    assert document["errors"] == []
    (cell,) = document["cells"]
    contestants: list[dict[str, Any]] = cell["contestants"]
    return contestants


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("tcp", ["tcp", "gloo"])
def test_an_all_reduce_over_servers(tcp: str, tmp_path: Path) -> None:
    at = "server" if tcp == "tcp" else "everywhere"
    reliable, ltp, rival = ran(tmp_path, SERVED.format(at=at, when="rounds", tcp=tcp))
    assert reliable["delivered"] == 1.0
    assert ltp["delivered"] > 0.5  # its deadline takes whatever is there
    assert reliable["retransmitted"] > 0  # what was lost on the ways to the servers
    # Every worker's gradient crosses the switch to a server and back; a ring's goes 4/3 each way.
    whole = 3 * 200_000
    assert reliable["wire_bytes_per_round"] > 2 * whole
    assert reliable["bytes_per_round"] > whole
    if tcp == "tcp":
        assert rival["wire_bytes_per_round"] > 2 * whole
    else:
        assert 4 / 3 * whole < rival["wire_bytes_per_round"] < 2 * whole


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_training_over_servers(tmp_path: Path) -> None:
    text = SERVED.format(at="workers", when="always", tcp="gloo")
    text = text.replace('"all_reduce"\nbytes = 200_000', '"training"').replace(
        "rounds = 4", "rounds = 10"
    )
    model = "[model]\nwidth = 32\nlayers = 1\ncontext = 16\n"
    contestants = ran(tmp_path, text.replace("[loss]", model + "[loss]"))
    assert [each["replicas_identical"] for each in contestants] == [True] * 3
    reliable, _, gloo = contestants
    assert reliable["final_loss"] == pytest.approx(gloo["final_loss"], abs=1e-4)
    assert reliable["wire_bytes_per_round"] > 1.2 * gloo["wire_bytes_per_round"]
    assert reliable["delivered"] == 1.0


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_server_that_dies_is_named(tmp_path: Path) -> None:
    text = SERVED.format(at="workers", when="rounds", tcp="tcp")
    text = text[: text.index('[[contestants]]\nname = "ltp"')]  # the first alone
    fault = '[[faults]]\nkind = "kill"\nhost = 4\nat_s = 0.0\n'
    file = written(tmp_path, text.replace("rounds = 4", "rounds = 1000") + fault)
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(tmp_path / "out"))
    assert lab.wait(200.0) == 1, lab.said()
    (error,) = json.loads((tmp_path / "out" / "results.json").read_text())["errors"]
    assert "rank 4: ended with status -9" in error
    lab.check_that_nothing_is_left()


def test_tcp_goes_over_servers_only_where_there_are_some(tmp_path: Path) -> None:
    text = SERVED.format(at="workers", when="always", tcp="tcp")
    load(written(tmp_path, text))
    for bare, servers in (
        (text.replace("servers = 2\n", ""), 0),
        (text.replace('"all_reduce"\nbytes = 200_000', '"training"'), 2),
    ):
        with pytest.raises(
            ScenarioError, match=f"transport='tcp': .* topology.servers={servers} allowed"
        ):
            load(written(tmp_path, bare))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('at = "workers"', 'at = "server"', "loss.at='server' with contestant 'gloo'"),
        (
            "options = { every = 2 }",
            "options = { every = 2, dscp = 8 }",
            "contestants: ltp: options: dscp=8, but reliable has dscp=0: in training",
        ),
        ("servers = 2", "servers = 201", "topology.servers=201: must be"),
        ("servers = 2", "servers = 198", "201 hosts"),
    ],
)
def test_what_cannot_be_with_servers_is_named(
    old: str, new: str, complaint: str, tmp_path: Path
) -> None:
    text = SERVED.format(at="workers", when="always", tcp="gloo")
    text = text.replace('"all_reduce"\nbytes = 200_000', '"training"')
    load(written(tmp_path, text))
    assert old in text
    with pytest.raises(ScenarioError, match=complaint):
        load(written(tmp_path, text.replace(old, new)))


def test_the_topology_decides_the_route_and_not_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADWIRE_ROUTE", "server")
    for servers, route in ((0, "sharded"), (2, "server")):
        settings = configure("reliable", route_settings(servers))[1]
        assert (settings.route, settings.server_count) == (route, servers)


def test_with_servers_every_host_has_its_share_of_the_delay(tmp_path: Path) -> None:
    text = SERVED.format(at="workers", when="always", tcp="gloo").replace(
        "rate = 0.02", "rate = 0.0"
    )
    text = text.replace("servers = 2", "servers = 2\nrtt_s = 0.04")
    cell = load(written(tmp_path, text)).cells[0]
    wires = wires_of(cell.scenario)
    assert {host: wire.delay_s for host, wire in wires.items()} == dict.fromkeys(range(5), 0.01)


def test_a_server_that_cannot_serve_says_so() -> None:
    store = dist.HashStore()
    settings = Settings.build({"route": "server", "servers": 1}, environment={})
    server = ServerThread(store, workers=2, index=3, settings=settings)
    server.close()
    with pytest.raises(ConfigError, match="index=3"):
        server.check()


def test_a_server_that_ends_too_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "serve", lambda *_, **__: {})
    settings = Settings.build({"route": "server", "servers": 1}, environment={})
    server = ServerThread(dist.HashStore(), workers=2, index=0, settings=settings)
    for thread in threading.enumerate():
        if thread.name == "gradwire-server-0":
            thread.join(10)
    with pytest.raises(GradwireError, match="server 0 has ended"):
        server.check()
    server.close()
    server.check()


@pytest.mark.parametrize(
    ("workers", "servers", "elements"), [(1, 1, 7), (3, 2, 200_003), (2, 4, 3)]
)
def test_tcp_servers_sum_and_send_back(
    workers: int, servers: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    store = dist.HashStore()
    buffers = [torch.zeros(elements) for _ in range(workers + servers)]
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            one = TcpOverServers("cubic", workers, elements)
            one.setup(number, workers + servers, store)
            for turn in (1, 2):
                buffers[number].copy_(torch.arange(elements) + number * turn)
                one.run_round(buffers[number])
                if number < workers:
                    wanted = torch.arange(elements) * workers + turn * sum(range(workers))
                    assert torch.equal(buffers[number], wanted.float())
            one.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(len(buffers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def test_a_policy_s_pipeline_is_open_before_its_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also without warm-up no round pays for ranks that meet."""
    store, options = dist.HashStore(), {"peer_timeout": 10, "rendezvous_timeout": 20}
    ranks = [PolicyAllReduce("reliable", options, 1000, 2, "all") for _ in range(2)]

    def on_both(call: Callable[[int], object]) -> None:
        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    buffers = [torch.full((1000,), float(rank + 1)) for rank in range(2)]
    try:
        on_both(lambda rank: ranks[rank].setup(rank, 2, store))
        with monkeypatch.context() as patch:
            patch.setattr(Communicator, "meeting", None)
            on_both(lambda rank: ranks[rank].run_round(buffers[rank]))
        for rank, buffer in zip(ranks, buffers, strict=True):
            rank.verify(buffer, {0: 1.0, 1: 2.0})
    finally:
        for rank in ranks:
            rank.close()
