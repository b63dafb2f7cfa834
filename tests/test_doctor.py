"""`gradwire doctor` on this host, and what a probe's datagrams may do to who listens."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gradwire import _engine
from gradwire.cli import app
from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.doctor import host, job, measure, pairs
from gradwire.doctor.findings import Finding
from gradwire.doctor.greeting import HELLO, WELCOME, Greeted, Greeting, Listener, greet, parse
from gradwire.doctor.host import Host, check_host
from gradwire.doctor.place import Place, place_of_environment
from gradwire.transport.addresses import LocalAddress
from gradwire.transport.introductions import Introduction
from gradwire.transport.meeting import Meeting
from ranks import free_port
from threads import at_once

JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


OF_OTHERS = ("GRADWIRE_", "SLURM_", "OMPI_", "PMI_")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*JOB, *(name for name in os.environ if name.startswith(OF_OTHERS))]:
        monkeypatch.delenv(name, raising=False)


def call(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return {**json.loads(result.stdout or "{}"), "exit": result.exit_code}


def level(result: dict[str, Any], about: str) -> str:
    (found,) = [each["level"] for each in result["findings"] if each["about"] == about]
    return str(found)


# ---------------------------------------------------------------------------- this host


def test_the_doctor_reports_what_the_engine_would_use() -> None:
    result = call("doctor")
    assert result["exit"] == (1 if result["status"] == "problem" else 0)
    assert result["versions"]["protocol"] == str(_engine.PROTOCOL_VERSION)
    assert result["addresses"]
    assert result["features"]["rcvbuf"] > 0
    assert level(result, "versions") == "ok"


def test_the_doctor_explains_itself_without_json() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert "versions" in result.stdout
    assert "Linux" in result.stdout
    assert "{" not in result.stdout


def test_a_port_that_another_process_holds_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        port = free_port(socket.SOCK_DGRAM, following=20)
        holder.bind(("127.0.0.1", port))
        monkeypatch.setenv("GRADWIRE_PORT", str(port))
        monkeypatch.setenv("GRADWIRE_INTERFACE", "127.0.0.1")
        result = call("doctor")
        monkeypatch.setenv("GRADWIRE_PORT", f"{port}-{port + 20}")
        beside = call("doctor")
    assert result["exit"] == 1
    assert level(result, "port") == "problem"
    assert level(result, "address") == "warning"  # loopback
    assert level(beside, "port") == "ok"


@pytest.mark.parametrize(
    ("variable", "value", "about"),
    [
        ("GRADWIRE_INTERFACE", "no-such-interface", "address"),
        ("GRADWIRE_DATAGRAM", "8972", "MTU"),
        ("GRADWIRE_PORT", "much", "settings"),
        ("GRADWIRE_INTREFACE", "eth0", "settings"),
    ],
)
def test_impossible_settings_are_problems(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, about: str
) -> None:
    if variable == "GRADWIRE_DATAGRAM" and call("doctor")["addresses"][0]["mtu"] in (0, 9000):
        pytest.skip("this host carries such datagrams")
    monkeypatch.setenv(variable, value)
    result = call("doctor")
    assert result["exit"] == 1
    assert level(result, about) == "problem"


def test_no_wrong_setting_hides_another_or_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {each["about"] for each in call("doctor")["findings"]}
    wrong = {
        "GRADWIRE_PROT": "5",
        "GRADWIRE_PORT": "much",
        "GRADWIRE_PEER_TIMEOUT": "0.1",
        "GRADWIRE_P": "2",
        "GRADWIRE_POLICY": "mlt",
        "GRADWIRE_P_LOW": "0.1",  # another policy's
    }
    for variable, value in wrong.items():
        monkeypatch.setenv(variable, value)
    result = call("doctor")
    found = [each for each in result["findings"] if each["about"] == "settings"]
    levels = {each["command"].removeprefix("unset "): each["level"] for each in found}
    problems = ("GRADWIRE_PROT", "GRADWIRE_PORT", "GRADWIRE_PEER_TIMEOUT", "GRADWIRE_P")
    assert levels == {**dict.fromkeys(problems, "problem"), "GRADWIRE_P_LOW": "warning"}
    assert result["exit"] == 1
    monkeypatch.setenv("GRADWIRE_INTERFACE", "no-such-interface")
    result = call("doctor")
    assert usual <= {each["about"] for each in result["findings"]}


def test_two_settings_that_do_not_go_together_are_one_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither is judged beside the other's default, which nobody has set."""
    monkeypatch.setenv("GRADWIRE_P_LOW", "0.5")
    monkeypatch.setenv("GRADWIRE_P_HIGH", "0.1")
    (found,) = [each for each in call("doctor")["findings"] if each["about"] == "settings"]
    assert found["text"].startswith("p_high=0.1 is below p_low=0.5")


@pytest.mark.parametrize(("name", "wrong"), [("magic", True), ("ltp", False), ("off", False)])
def test_a_policy_that_there_is_not_is_a_problem(
    name: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_POLICY", name)
    problems = [each for each in call("doctor")["findings"] if each["about"] == "settings"]
    assert [each["level"] for each in problems] == ["problem"] * wrong
    assert all("'off'" in each["text"] for each in problems)  # is allowed as well


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_lines_are_no_longer_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("GRADWIRE_PEER_TIMEOUT", "0.1")  # a problem, with something to type
    shown = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    said = [line for line in shown if not line.strip().startswith("type: ")]
    assert max(map(len, said)) <= columns
    assert len(said) < len(shown)  # what is typed is one line
    words = " ".join(" ".join(said).split())
    for each in call("doctor")["findings"]:
        assert f"{each['about']} {each['text']}" in words


def test_small_buffers_are_a_warning_that_names_the_sysctl() -> None:
    """A process of another user namespace gets no more than net.core.rmem_max."""
    limit = int(Path("/proc/sys/net/core/rmem_max").read_text())
    command = ["unshare", "-U", sys.executable, "-m", "gradwire.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        pytest.skip(f"no user namespaces: {done.stderr}")
    result = json.loads(done.stdout)
    (buffers,) = [each for each in result["findings"] if each["about"] == "buffers"]
    asked = result["features"]["rcvbuf_asked"]
    assert (buffers["level"] == "warning") == (limit < asked)
    assert (f"net.core.rmem_max={asked}" in buffers["command"]) == (limit < asked)


def test_nothing_needs_torch_in_two_shells() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; "
        "sys.argv[1:] = ['probe', '127.0.0.1:4', '--timeout', '0.2']; "
        "import gradwire.doctor.command; from gradwire.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "gradwire probe --listen 4 " in done.stdout


# ---------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "arguments",
    [
        ["probe"],
        ["probe", "host:0"],
        ["probe", "host:much"],
        ["probe", "no such host"],
        ["probe", "127.0.0.1", "--timeout", "nan"],
        ["probe", "127.0.0.1", "--timeout", "-1"],
        ["probe", "--listen", "70000"],
    ],
)
def test_impossible_options_of_a_probe_are_errors(arguments: list[str]) -> None:
    result = call(*arguments)
    assert (result["exit"], result["status"]) == (2, "error")
    assert result["setting"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MASTER_PORT", ""), ("RANK", "2"), ("WORLD_SIZE", "two"), ("MASTER_PORT", "70000")],
)
def test_half_of_a_jobs_environment_is_an_error(variable: str, value: str) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", variable: value}
    with pytest.raises(ConfigError) as caught:
        place_of_environment(job)
    assert caught.value.setting == variable


def test_half_of_a_jobs_environment_ends_with_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    result = call("doctor")
    assert (result["exit"], result["status"], result["setting"]) == (2, "error", "WORLD_SIZE")


def test_one_rank_is_no_job() -> None:
    assert place_of_environment({"MASTER_ADDR": "h"}) is None
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert place_of_environment(job) is None


OTHER_LAUNCHERS = [
    {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"},
    {"PMI_RANK": "1", "PMI_SIZE": "3"},
    # mpirun in a job of Slurm: its daemon is Slurm's task
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "SLURM_PROCID": "0"}
    | {"SLURM_STEP_NUM_TASKS": "2"},
]


@pytest.mark.parametrize("launched", OTHER_LAUNCHERS)
def test_a_job_of_srun_or_mpirun_is_read(
    launched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting_point = {"MASTER_ADDR": "h", "MASTER_PORT": "7"}
    place = place_of_environment({**launched, **meeting_point})
    assert place is not None
    assert (place.rank, place.world, place.address, place.port) == (1, 3, "h", 7)
    other = {"RANK": "0", "WORLD_SIZE": "2", **meeting_point}  # torchrun in a task
    place = place_of_environment({**launched, **other})
    assert place is not None
    assert (place.rank, place.world) == (0, 2)
    with pytest.raises(ConfigError) as caught:
        place_of_environment({**launched, "MASTER_ADDR": "h"})
    assert caught.value.setting == "MASTER_PORT"
    own = next(iter(launched))  # the rank's variable, which alone the user knows of
    assert own in str(caught.value)
    assert "RANK" not in re.findall(r"\w+", str(caught.value))
    with pytest.raises(ConfigError) as caught:
        place_of_environment({**launched, own: "3", **meeting_point})
    assert (caught.value.setting, caught.value.value) == (own, "3")
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    result = call("doctor")  # without a meeting point
    assert level(result, "job") == "warning"


@pytest.mark.parametrize(("size", "launcher"), [("3", "srun"), ("2", "mpirun")])
def test_srun_and_mpirun_are_told_apart_where_both_set_variables(
    size: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun sets PMI's variables, too; under mpirun in a job of Slurm its own ones differ."""
    both = {"PMI_RANK": "1", "PMI_SIZE": "3", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": size}
    for name, value in both.items():
        monkeypatch.setenv(name, value)
    (warning,) = [each for each in call("doctor")["findings"] if each["about"] == "job"]
    assert warning["text"].startswith(f"{launcher} has 3 tasks")


def test_a_batch_script_of_slurm_is_no_task_and_one_task_is_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert place_of_environment({**batch, "MASTER_ADDR": "h", "MASTER_PORT": "7"}) is None
    for name, value in batch.items():
        monkeypatch.setenv(name, value)
    assert level(call("doctor"), "job") == "warning"
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert all(each["about"] != "job" for each in call("doctor")["findings"])


def test_the_doctor_of_a_job_names_the_rank_that_hosts_an_absent_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in zip(JOB, ("1", "2", "127.0.0.1", str(free_port())), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GRADWIRE_RENDEZVOUS_TIMEOUT", "0.1")
    result = call("doctor")
    assert result["exit"] == 1
    assert "rank 0 hosts it" in result["findings"][0]["text"]


def test_a_port_that_is_taken_for_one_version_of_ip_is_not_listened_on_by_half() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("0.0.0.0", 0))
        result = call("probe", "--listen", str(holder.getsockname()[1]))
    assert (result["exit"], result["setting"]) == (2, "port")


# ---------------------------------------------------------------------------- greetings

numbers = st.integers(0, (1 << 64) - 1)


@given(st.sampled_from([HELLO, WELCOME]), numbers, numbers, st.integers(0, (1 << 32) - 1))
def test_a_greeting_is_read_as_it_was_written(
    kind: int, token: int, cookie: int, datagram: int
) -> None:
    greeting = Greeting(kind, token, cookie, datagram)
    assert parse(greeting.pack()) == greeting


@given(st.binary(max_size=200))
def test_anything_else_is_dropped(data: bytes) -> None:
    assert parse(data) is None
    hello = Greeting(HELLO, 1).pack()
    assert parse(hello[: min(len(data), len(hello) - 1)]) is None
    assert parse(hello + b"x") is None


class Listening:
    """A listener on loopback, in a thread, until somebody begins a measurement or it was idle."""

    def __init__(self, idle_s: float) -> None:
        self.port = free_port()
        self.deaf: list[str] = []
        self.listener = Listener(
            ["127.0.0.1"],
            self.port,
            lambda own, to: 1400,
            lambda peer, _: self.deaf.append(peer[0]),
        )
        self.found: list[Greeted | None] = []
        self.thread = threading.Thread(target=lambda: self.found.append(self.listener.wait(idle_s)))
        self.thread.start()
        self.peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.peer.settimeout(5.0)

    def send(self, data: bytes, by: socket.socket | None = None) -> None:
        (by or self.peer).sendto(data, ("127.0.0.1", self.port))

    def welcomed(self) -> int:
        """Says HELLO; returns the cookie."""
        self.send(Greeting(HELLO, 7, 0, 9000).pack())
        answer = parse(self.peer.recv(1 << 11))
        assert answer is not None
        assert (answer.kind, answer.token, answer.datagram) == (WELCOME, 7, 1400)
        return answer.cookie

    def close(self) -> None:
        self.thread.join(20)
        self.listener.close()
        self.peer.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    found = Listening(0.4)
    yield found
    found.close()


def test_who_has_not_proven_its_address_gets_no_more_than_it_sends(listening: Listening) -> None:
    source = random.Random(1)
    sent = 0
    for _ in range(300):
        cookie = source.choice((0, 1, source.getrandbits(64)))
        data = Greeting(source.choice((HELLO, WELCOME)), source.getrandbits(8), cookie, 1472).pack()
        data = source.choice((data, data[: source.randrange(30)], source.randbytes(90)))
        listening.send(data)
        sent += len(data)
    listening.thread.join(10)  # ends although there was traffic, none of which has a proof
    assert listening.found == [None]
    assert listening.deaf == ["127.0.0.1"]
    listening.peer.setblocking(False)
    received = 0
    try:
        while True:
            received += len(listening.peer.recv(1 << 16))
    except BlockingIOError:
        pass
    assert 0 < received <= sent


def test_a_cookie_is_of_no_use_to_another_address(listening: Listening) -> None:
    cookie = listening.welcomed()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        listening.send(Greeting(HELLO, 7, cookie, 1400).pack(), other)
        listening.thread.join(10)
    assert listening.found == [None]


def test_who_has_the_cookie_begins_a_measurement(listening: Listening) -> None:
    listening.send(Greeting(HELLO, 7, listening.welcomed(), 1300).pack())
    listening.thread.join(10)
    (found,) = listening.found
    assert found is not None
    assert (found.token, found.datagram) == (7, 1300)
    assert found.local == ("127.0.0.1", listening.port)


def test_two_hosts_measure_and_tell_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MEASURE_S", 0.1)
    settings = Settings.build({}, environment={})
    listening = Listening(20.0)

    def join(end: int) -> tuple[measure.End, measure.End | None]:
        greeted: Greeted | None
        if end == 1:
            listening.close()
            (greeted,) = listening.found
            assert greeted is not None
        else:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
                opened.bind(("127.0.0.1", 0))
                greeted = greet(opened, ("127.0.0.1", listening.port), 9000, 10.0)
        places = [greeted.local, greeted.peer] if end == 0 else [greeted.peer, greeted.local]
        engine = measure.open_engine(
            end, greeted.token, "127.0.0.1", greeted.local[1], greeted.datagram, settings
        )
        engine.connect(places)
        own = measure.measure(engine, 10.0)
        other = measure.exchange(engine, own)
        engine.close()
        return own, other

    (first, of_second), (second, of_first) = at_once(2, join)
    assert (of_first, of_second) == (first, second)
    found = measure.joined(first, second, 1400, 28)
    assert found.complete
    for way in (found.there, found.back):
        assert (way.datagram, way.trains) == (1400, "pass")
        assert way.rate > 0
        assert way.packets > 0


# ---------------------------------------------------------------------------- jobs


def examined(*settings: dict[str, str]) -> list[Finding]:
    """The findings that are no "ok" of a job whose ranks have these settings, the same on all."""
    port = free_port()
    mutex = threading.Lock()
    checked = threading.local()

    def check(towards: str | None) -> Host:
        with mutex, pytest.MonkeyPatch.context() as patch:
            for variable, value in settings[checked.rank].items():
                patch.setenv(variable, value)
            return check_host(towards)

    def join(rank: int) -> list[Finding]:
        checked.rank = rank
        result = job.examine(Place(rank, len(settings), "127.0.0.1", port, hosted=False))
        result.leave()
        return [each for each in result.findings if each.level != "ok"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "check_host", check)
        first, *others = at_once(len(settings), join)
    assert all(other == first for other in others)
    assert isinstance(first, list), first
    return first


def test_settings_that_attach_would_find_different_are_a_problem_that_names_the_ranks() -> None:
    mlt = {"GRADWIRE_POLICY": "mlt", "GRADWIRE_P": "0.2"}
    found = examined(
        {"GRADWIRE_POLICY": "reliable"},
        {**mlt, "GRADWIRE_SEED": "7", "GRADWIRE_PEER_TIMEOUT": "9"},  # a rank's own
        {**mlt, "GRADWIRE_P": "0.3"},
    )
    (problem,) = [each for each in found if each.level == "problem"]
    assert problem.about == "settings"
    assert "policy is 'reliable' (rank 0), 'mlt' (ranks 1–2)" in problem.text
    assert "mlt.p is 0.2 (rank 1), 0.3 (rank 2)" in problem.text
    assert "seed is 0 (ranks 0, 2), 7 (rank 1)" in problem.text
    assert problem.text.count(" is ") == 3


def test_a_wrong_setting_of_one_rank_is_named_once_in_a_job() -> None:
    found = examined({"GRADWIRE_POLICY": "mlt"}, {"GRADWIRE_POLICY": "magic"})
    problems = [each for each in found if each.level == "problem"]
    assert len(problems) == 1
    assert "rank 1" in problems[0].text


def test_what_another_rank_of_a_host_has_found_alone_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of one host may have other settings, here the ranks 1 and 2."""
    addresses = {0: "127.0.0.1", 1: "localhost", 2: "localhost"}  # of the store

    def checked(towards: str | None) -> Host:
        host = check_host("127.0.0.1")
        if towards == "localhost":
            host.findings.append(Finding("problem", "settings", "GRADWIRE_PORT is much.", "unset"))
        return host

    monkeypatch.setattr(job, "check_host", checked)
    port = free_port()

    def join(rank: int) -> list[Finding]:
        result = job.examine(Place(rank, 3, addresses[rank], port, hosted=False))
        result.leave()
        return result.findings

    findings = at_once(3, join)
    assert findings[0] == findings[1] == findings[2]
    (problem,) = [each for each in findings[0] if each.level == "problem"]
    name = socket.gethostname()
    assert problem.text == f"{name}, ranks 1–2: GRADWIRE_PORT is much."
    assert problem.command == f"unset   # on {name}, ranks 1–2"
    assert sum(each.about == "address" for each in findings[0]) == 1  # all ranks have found it


def test_hosts_of_one_name_have_their_addresses_beside_it() -> None:
    def introduction(rank: int, host: str, address: str) -> Introduction:
        places = (LocalAddress(address, "eth0", 1500),)
        return Introduction(rank, 8, places, 0, 1472, host=host)

    hosts = [introduction(0, "vm", "10.0.0.1"), introduction(2, "vm", "10.0.0.2")]
    assert job.host_names(hosts) == {0: "vm (10.0.0.1)", 2: "vm (10.0.0.2)"}
    assert job.host_names([*hosts, introduction(4, "a", "10.0.0.3")])[4] == "a"
    same = [introduction(0, "vm", "10.0.0.1"), introduction(2, "vm", "10.0.0.1")]
    assert job.host_names(same) == {0: "vm (rank 0)", 2: "vm (rank 2)"}


def test_a_host_without_a_default_route_is_no_warning_before_there_is_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a namespace, whose only other interface leads to the job's other hosts."""
    lo = LocalAddress("127.0.0.1", "lo", 65_536)
    monkeypatch.setattr(host, "local_addresses", lambda *_: (lo,))
    monkeypatch.setattr(host, "reachable_interfaces", lambda: {"va": ("10.0.0.1",)})

    def address(towards: str | None) -> Finding:
        (found,) = (each for each in check_host(towards).findings if each.about == "address")
        return found

    alone, within = address(None), address("10.0.0.2")
    assert (alone.level, alone.command) == ("ok", "")
    assert "va" in alone.text
    assert "a job" in alone.text.lower()
    assert within.level == "warning"


@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_every_two_hosts_measure_once_and_none_twice_at_a_time(count: int) -> None:
    hosts = [8 * host for host in range(count)]  # the rank that measures for each
    planned = pairs.rounds(hosts)
    assert sorted(itertools.chain(*planned)) == list(itertools.combinations(hosts, 2))
    for busy in planned:
        assert len(set(itertools.chain(*busy))) == 2 * len(busy)
    assert len(planned) == count - 1 + count % 2


def test_hosts_measure_in_rounds_of_which_they_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MEASURE_S", 0.05)
    store = dist.HashStore()
    addresses = {host: LocalAddress(f"127.0.0.{host + 1}", "lo", 65_536) for host in range(4)}
    settings = Settings.build({}, environment={})
    told: list[str] = []

    def join(host: int) -> list[pairs.Pair]:
        meeting = Meeting(store, "t", endpoint=host, workers=4, servers=0, timeout_s=20.0)
        say = told.append if host == 0 else (lambda text: None)
        return pairs.measure_all(meeting, addresses[host], addresses, 1472, settings, say)

    first, *others = at_once(4, join)
    assert isinstance(first, list), first
    assert all(other == first for other in others)
    assert [(each.prober, each.responder) for each in first] == list(
        itertools.combinations(range(4), 2)
    )
    assert all(each.found.answered for each in first)
    assert [text.partition(":")[0] for text in told] == [f"round {n} of 3" for n in (1, 2, 3)]
