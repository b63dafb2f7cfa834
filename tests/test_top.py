"""`gradwire top`: the state that a job's processes offer, what is read of it, how it is shown."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pty
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
import seccomp
from gradwire.core.errors import GradwireError
from gradwire.live.address import FORMAT, Address, addresses
from gradwire.live.publisher import STEP_KEYS, Steps, publish
from gradwire.watch.figures import picture
from gradwire.watch.source import LONGEST_S, Process, Watched, find_job, states
from gradwire.watch.table import draw
from ranks import Ranks
from test_exports import steps as made
from test_server import server_processes

TOP = [sys.executable, "-m", "gradwire.cli", "top"]
JOB = secrets.token_hex(6)
"""What the names of the jobs begin with that are none, as no other job's of this machine does."""
STEPS = 12


def model(width: int = 64) -> torch.nn.parallel.DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))


def train(
    rank: int, world: int, folder: str, steps: int = STEPS, drop: float = 0.0, **options: Any
) -> None:
    """Trains some steps, or until there is a file "end"; then waits for that. With "idle" comes
    another step, for which rank 1 waits."""
    ddp = model(options.pop("width", 64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    end, idle = Path(folder, "end"), options.pop("idle", False)
    attachment = gradwire.attach(
        ddp, "mlt", optimizer=optimizer, report=f"{folder}/steps-{{rank}}.jsonl", **options
    )
    attachment.communicator.set_drop(drop, seed=rank)
    done = 0

    def step() -> None:
        optimizer.zero_grad()
        loss = ddp(torch.randn(16, ddp.module[0].in_features)).square().mean()
        loss.backward()
        optimizer.step()
        attachment.loss(loss)

    def goes_on() -> bool:
        if steps:
            return done < steps
        going = torch.tensor(not end.exists(), dtype=torch.int32)
        dist.all_reduce(going, dist.ReduceOp.MIN)  # the ranks look at different times
        return bool(going)

    while goes_on():
        step()
        done += 1
    if idle and rank == 1:
        wait_for(end.exists)
    if idle:
        step()
    wait_for(end.exists)
    attachment.detach()


def wait_for(ready: Callable[[], object], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def job_of(ranks: Ranks) -> str:
    """The job of these processes, once all of them offer their state."""
    numbers = {f"{process.pid:x}" for process in ranks.processes}

    def found() -> set[str]:
        here = [each for each in addresses() if each.own.partition("-")[0] in numbers]
        return {each.job for each in here} if len(here) == len(numbers) else set()

    (job,) = wait_for(found)
    return job


@contextlib.contextmanager
def training(ranks: Ranks, folder: Path, **options: Any) -> Iterator[Watched]:
    ranks.start(train, folder=str(folder), **options)
    try:
        yield Watched(job_of(ranks), 40)
    finally:
        (folder / "end").touch()
        ranks.collect()


def look_until(watched: Watched, ready: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    def seen() -> dict[str, Any] | None:
        watched.look()
        figures = picture(watched)
        return figures if ready(figures) else None

    figures: dict[str, Any] = wait_for(seen)
    return figures


def all_steps(figures: dict[str, Any]) -> bool:
    return [each["step"] for each in figures["workers"]] == [STEPS - 1, STEPS - 1]


def reports(folder: Path, rank: int) -> list[dict[str, Any]]:
    lines = (folder / f"steps-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# ---------------------------------------------------------------------------- what is read


def test_the_figures_are_those_of_the_report_files(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path, drop=0.05, p=0.2) as watched:
        figures = look_until(watched, all_steps)
        shown = subprocess.run([*TOP, "-1", "--json", watched.job], capture_output=True, check=True)
    own, other = reports(tmp_path, 0), reports(tmp_path, 1)
    assert [each["step"] for each in figures["steps"]] == list(range(STEPS))
    for row, line, theirs in zip(figures["steps"], own, other, strict=True):
        for key in ("phase", "encoding", "exposed_s", "push_s", "pull_s", "comm_s", "bound"):
            assert row[key] == line[key]
        assert row["delivered"] == min(line["delivered"], theirs["delivered"])
        again = line["retransmissions"] + theirs["retransmissions"]
        assert row["again"] == again / (line["packets"] + theirs["packets"])
        assert row["loss"] == line["agreed"]["loss"]
        lost = {
            each["name"]: 1.0 - min(each["delivered"], that["delivered"])
            for each, that in zip(line["regions"], theirs["regions"], strict=True)
        }
        lost = {name: share for name, share in lost.items() if share > 0}
        assert row["lost"] == pytest.approx(lost, abs=1e-5)
    for row, following in zip(figures["steps"], own[1:], strict=False):
        assert row["step_s"] == following["period_s"]
        assert row["compute_s"] + row["exposed_s"] == pytest.approx(row["step_s"])
    assert any(row["lost"] for row in figures["steps"])
    once = json.loads(shown.stdout)
    assert once["job"] == watched.job
    assert [each["step"] for each in once["steps"]] == list(range(STEPS))


def test_rates_are_those_of_the_counters(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path) as watched:
        look_until(watched, all_steps)
        watched = Watched(watched.job, 40)
        figures = look_until(watched, lambda _: True)
        later = look_until(watched, lambda _: True)
    assert [each["name"] for each in figures["workers"]] == ["rank 0", "rank 1"]
    for rank, figure in enumerate(figures["workers"]):
        (path,) = (each for each in figures["paths"] if each["from"] == figure["name"])
        assert path["sent"] == pytest.approx(figure["sent"], rel=0.1)  # a ping may come between
        assert 0 < path["rtprop_s"] <= path["round_s"]
        assert later["workers"][rank]["sent"] < figure["sent"]  # nothing but pings since
    sent = figures["workers"][0]["sent"] * figures["over_s"]
    chunks = sum(each["bytes"] for each in reports(tmp_path, 0))
    # A report may be made before the last results have gone to others; packets go again, too.
    assert chunks * (1 - 1e-9) <= sent < 2.5 * chunks


def test_a_rank_that_others_wait_for_is_named(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path, idle=True) as watched:
        figures = look_until(watched, lambda figures: "has waited" in str(figures["messages"]))
    (message,) = (each for each in figures["messages"] if "has waited" in each)
    assert message.startswith("rank 0")
    assert message.endswith("rank 1")


def test_a_stopped_process_is_named_and_does_not_hold_up_the_others(
    two: Ranks, tmp_path: Path
) -> None:
    with training(two, tmp_path) as watched:
        look_until(watched, all_steps)
        stopped = two.processes[1].pid

        def told(figures: dict[str, Any]) -> list[str]:
            return [each for each in figures["messages"] if str(stopped) in each]

        os.kill(stopped, signal.SIGSTOP)
        try:
            shown = subprocess.run([*TOP, "-1", watched.job], capture_output=True, text=True)
            known = look_until(watched, told)
        finally:
            os.kill(stopped, signal.SIGCONT)
        figures = look_until(watched, lambda figures: not told(figures))
    assert shown.returncode == 0
    assert str(stopped) in shown.stdout
    assert "rank 1" in told(known)[0]  # it was heard before
    assert [each["name"] for each in figures["workers"]] == ["rank 0", "rank 1"]


def fail_in_mid_job(rank: int, world: int, folder: str) -> None:
    attachment = gradwire.attach(model())
    wait_for(Path(folder, "fail").exists)
    attachment.communicator.fail("the cooling failed")
    wait_for(Path(folder, "end").exists)
    attachment.detach()


def test_a_failure_is_shown_and_is_the_exit_status(two: Ranks, tmp_path: Path) -> None:
    two.start(fail_in_mid_job, folder=str(tmp_path))
    try:
        watched = Watched(job_of(two), 40)
        (tmp_path / "fail").touch()
        look_until(watched, lambda figures: figures["state"] == "failed")
        shown = subprocess.run([*TOP, "-1", watched.job], capture_output=True, text=True)
    finally:
        (tmp_path / "end").touch()
        two.collect()
    assert shown.returncode == 1
    assert "the cooling failed" in shown.stdout


def fork_and_detach(rank: int, world: int, folder: str) -> None:
    attachment = gradwire.attach(model())
    child = os.fork()
    if child == 0:
        wait_for(Path(folder, "end").exists)
        os._exit(0)
    attachment.detach()
    Path(folder, f"left-{rank}").touch()
    os.waitpid(child, 0)


def test_a_forked_child_keeps_no_socket(two: Ranks, tmp_path: Path) -> None:
    two.start(fork_and_detach, folder=str(tmp_path))
    numbers = {f"{process.pid:x}" for process in two.processes}
    wait_for(lambda: len(list(tmp_path.glob("left-*"))) == 2)
    left = [each for each in addresses() if each.own.partition("-")[0] in numbers]
    (tmp_path / "end").touch()
    assert two.collect() == [None, None]
    assert left == []


def test_a_server_is_shown_beside_its_workers(tmp_path: Path) -> None:
    with (
        Ranks(2) as ranks,
        server_processes(ranks.port, 2, 1),
        training(ranks, tmp_path, route="server", servers=1) as watched,
    ):
        figures = look_until(watched, lambda figures: len(figures["workers"]) == 3)
    assert [each["name"] for each in figures["workers"]] == ["rank 0", "rank 1", "server 0"]
    ways = {(each["from"], each["to"]) for each in figures["paths"]}
    workers = ("rank 0", "rank 1")
    assert ways == {(one, "server 0") for one in workers} | {("server 0", one) for one in workers}


# ---------------------------------------------------------------------------- what it costs


def test_it_costs_the_job_next_to_nothing_whether_anybody_looks_or_not(
    two: Ranks, tmp_path: Path
) -> None:
    def costs(
        looks: int, pause: Callable[[], float], least_s: float = 0.0
    ) -> tuple[float, float, float]:
        """The processor time that keeping steps and answering looks takes, and the job's own,
        which is so much at least."""
        begun = ended = picture(watched)
        while looks > 0 or ended["processor_s"] - begun["processor_s"] < least_s:
            looks -= 1
            time.sleep(pause())
            watched.look()
            ended = picture(watched)
        keeping, answering, used = (
            ended[key] - begun[key] for key in ("keeping_s", "answering_s", "processor_s")
        )
        assert answering > 0
        return keeping, answering, used

    with training(two, tmp_path, steps=0, width=1024) as watched:
        look_until(watched, lambda figures: figures["keeping_s"] > 0)  # one step in 16 is timed
        keeping, _, used = costs(1, lambda: 0.5, 2.0)  # a few steps are no measure
        assert keeping < 0.0005 * used
        keeping, answering, used = costs(2, lambda: watched.pause(0.1))
        # An answer takes about a millisecond of a processor, more of a busy one.
        assert answering / (2 * len(watched.processes)) < 0.02
        if watched.pause(0.1) < LONGEST_S:  # a job that gets so little time is not looked at less
            assert keeping + answering < 0.002 * used


@pytest.mark.parametrize(
    ("keeping", "answering", "pause"),
    [(0.0, 0.0001, 1.0), (0.0004, 0.001, 2.0), (0.0008, 0.001, 10.0), (0.002, 0.001, 10.0)],
)
def test_looks_take_what_keeping_the_steps_leaves_of_a_thousandth(
    keeping: float, answering: float, pause: float
) -> None:
    """Of a job that takes a second of a processor in each second."""
    watched = Watched("d00d0008", 40)
    process = Process(Address("d00d0008", "1-1", os.geteuid()), 40)
    watched.processes[process.address] = process
    for second in (0, 1):
        costs = {"keeping_s": keeping * second, "answering_s": answering * second}
        process.take(answer(clock=second, processor_s=second, **costs))
    assert watched.pause(1.0) == pytest.approx(pause)


@contextlib.contextmanager
def publishing(job: str) -> Iterator[Address]:
    """This process offers the state of an engine that is none."""
    end = publish(job, dict)
    try:
        (address,) = (each for each in addresses() if each.job == job)
        yield address
    finally:
        end()


def test_a_reader_gets_each_step_once_at_whatever_moment_it_comes() -> None:
    """Between any two things that the training thread does."""
    with publishing(f"{JOB}7"):
        steps = Steps("mlt", [0], 0)
        reports = [replace(record, step=step) for record in made(1) for step in range(20_000)]
        stop = threading.Event()
        writer = threading.Thread(
            target=lambda: [steps.note(each) for each in reports] and stop.set()
        )
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        known, last = 0, False
        try:
            writer.start()
            while not last:
                last = stop.is_set()
                state = steps.state(known, 20)
                rows = [row[STEP_KEYS.index("step")] for row in state["steps"]]
                assert rows == list(range(state["noted"] - len(rows), state["noted"]))
                assert len(rows) == min(20, state["noted"] - known)
                known = state["noted"]
        finally:
            sys.setswitchinterval(interval)
            writer.join()
            steps.end()
        assert known == len(reports)


def test_an_attachment_that_has_gone_is_shown_no_more() -> None:
    with publishing(f"{JOB}8") as address:

        def shown() -> set[str]:
            return {each["id"] for each in states({address: {}}, 1)[address]["attachments"]}

        others = shown()  # of this process's tests before
        first, second = Steps("mlt", [0], 0), Steps("dblp", [0], 1)
        assert shown() == others | {first.id, second.id}
        first.end()
        assert shown() == others | {second.id}
        second.end()
        assert shown() == others


def test_it_starts_at_once_and_takes_little_itself(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path, steps=0) as watched:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*TOP, "-1", watched.job], check=True, stdout=subprocess.DEVNULL)
        started = _processor_since(before)
        assert started < 1.0
        follows = subprocess.Popen([*TOP, watched.job], stdout=subprocess.PIPE)
        assert follows.stdout is not None
        follows.stdout.readline()  # it has shown the figures once
        began, taken = time.monotonic(), _processor(follows.pid)
        time.sleep(3.0)
        taken = _processor(follows.pid) - taken
        assert taken < 0.05 * (time.monotonic() - began)
        follows.send_signal(signal.SIGINT)
        follows.stdout.read()
        assert follows.wait(60) == 0


def _processor_since(before: resource.struct_rusage) -> float:
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


def _processor(pid: int) -> float:
    """The processor time that a process has taken, in seconds."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------- how it is shown


@pytest.mark.parametrize("columns", [30, 40, 80, 120])
def test_a_narrow_terminal_drops_columns(two: Ranks, tmp_path: Path, columns: int) -> None:
    with training(two, tmp_path, drop=0.05) as watched:
        figures = look_until(watched, all_steps)
        shown = subprocess.run(
            [*TOP, "-1", watched.job],
            env={**os.environ, "COLUMNS": str(columns), "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            check=True,
        )
    lines = shown.stdout.decode("ascii").splitlines()  # no bars that the terminal cannot show
    assert max(map(len, lines)) <= columns
    assert b"\x1b" not in shown.stdout  # it is piped
    heads = [line.split() for line in lines if line.startswith("worker")]
    assert len(heads) == 1
    assert ("process" in heads[0]) == (columns == 120)
    fitted = draw(figures, columns, 20, True).plain.splitlines()
    assert len(fitted) <= 20
    assert max(map(len, fitted)) <= columns


def test_colour_is_never_the_only_sign(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path, drop=0.2, p=0.2) as watched:
        figures = look_until(watched, all_steps)
    text = draw(figures, 120, None, True)
    assert text.spans
    marked = [
        line for line in text.split("\n") if any(span.style == "yellow" for span in line.spans)
    ]
    assert marked
    assert all("! " in line.plain for line in marked)


def test_a_terminal_is_left_as_it_was(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path) as watched:
        number, terminal = pty.fork()
        if number == 0:
            os.environ["TERM"] = "xterm"
            os.execv(TOP[0], [*TOP, watched.job])
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        shown = _read_until(terminal, b"rank 1")
        os.kill(number, signal.SIGINT)
        shown += _read_until(terminal, b"\x1b[?1049l")
        shown += _read_until(terminal, None)
        _, status = os.waitpid(number, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    screen, _, after = shown.partition(b"\x1b[?1049l")
    assert b"\x1b[?1049h" in screen
    assert b"rank 1" in after  # the last figures stay
    assert b"Traceback" not in shown


def test_a_terminal_that_draws_nothing_anew_shows_one_picture_after_the_other(
    two: Ranks, tmp_path: Path
) -> None:
    with training(two, tmp_path) as watched:
        number, terminal = pty.fork()
        if number == 0:
            os.environ["TERM"] = "dumb"
            os.execv(TOP[0], [*TOP, watched.job])
        shown = _read_until(terminal, b"rank 1")
        os.kill(number, signal.SIGINT)
        shown += _read_until(terminal, None)
        _, status = os.waitpid(number, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"rank 1" in shown
    assert b"\x1b[?1049h" not in shown


def _read_until(terminal: int, wanted: bytes | None) -> bytes:
    read = b""
    deadline = time.monotonic() + 60
    while wanted is None or wanted not in read:
        assert time.monotonic() < deadline, read
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                part = b""
            if not part:
                break
            read += part
    return read


def test_it_ends_with_the_job(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path) as watched:
        follows = subprocess.Popen(
            [*TOP, watched.job, "--json", "--interval", "0.1"], stdout=subprocess.PIPE, text=True
        )
        assert follows.stdout is not None
        assert json.loads(follows.stdout.readline())["state"] == "running"
    rest = follows.stdout.read().splitlines()
    assert follows.wait(60) == 0
    assert json.loads(rest[-1])["state"] == "ended"


def test_a_reader_that_leaves_is_no_error(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path) as watched:
        follows = subprocess.Popen(
            [*TOP, watched.job, "--interval", "0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert follows.stdout is not None
        assert follows.stderr is not None
        follows.stdout.readline()
        follows.stdout.close()
        assert follows.wait(60) == 0
        assert follows.stderr.read() == b""


# ---------------------------------------------------------------------------- which job


FAKE = """
import sys
from gradwire.live.publisher import publish
job, sys.argv[0] = sys.argv[1], sys.argv[2]
counters = dict.fromkeys(
    "packets_sent bytes_sent bytes_received retransmissions declared_lost rtprop_ns "
    "queue_delay_ns btlbw send_window receive_window".split(), 0)
publish(job, lambda: {"name": "rank 0", "group": "world", "workers": 1, "failure": None,
        "waits": None, "counters": counters, "paths": []})
print("here", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def offering(job: str, script: str = "train.py") -> Iterator[subprocess.Popen[str]]:
    """A process that offers the state of an engine."""
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE, job, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.communicate("")


@contextlib.contextmanager
def name_taken(address: Address) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(address.name)
        taken.listen()
        yield


@pytest.fixture
def no_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the jobs of other tests, which come and go."""

    def ours() -> list[Address]:
        return [each for each in addresses() if each.job.startswith(JOB)]

    monkeypatch.setattr("gradwire.watch.source.addresses", ours)


@pytest.mark.usefixtures("no_other_jobs")
def test_the_newest_of_several_jobs_is_meant() -> None:
    first, second = f"{JOB}2", f"{JOB}1"
    with offering(first), offering(second):
        meant, others = find_job(None)
        assert (meant, [each.number for each in others]) == (second, [first])
        assert find_job(first) == (first, [])
        with pytest.raises(GradwireError, match=f"{second}, {first}"):
            find_job(JOB)
    with pytest.raises(GradwireError, match=f"no job '{JOB}' runs here"):
        find_job(JOB)


@pytest.mark.usefixtures("no_other_jobs")
def test_a_job_is_found_by_its_script_and_the_others_are_named() -> None:
    with offering(f"{JOB}a", "/here/long.py"), offering(f"{JOB}b", "long.py"):
        with offering(f"{JOB}c", "short.py"):
            assert find_job("short.py")[0] == f"{JOB}c"
            meant, others = find_job("long.py")
            shown = draw(picture(Watched(meant, 40, others)), 200, None, True).plain
        assert meant == f"{JOB}b"
        assert "2 other jobs here" in shown
        assert "(short.py)" in shown
        assert "(long.py)" in shown
        with pytest.raises(GradwireError, match=r"no job 'short.py' runs here"):
            find_job("short.py")


def answer(**changes: Any) -> dict[str, Any]:
    """The answer of a process that has no engine yet."""
    numbers = ("pid", "started", "at", "clock", "processor_s", "keeping_s", "answering_s")
    known: dict[str, Any] = dict.fromkeys(("job", "host", "script"), "")
    return {**known, **dict.fromkeys(numbers, 0.0), "engines": [], "attachments": [], **changes}


def answers() -> Iterator[object]:
    """What another program, or another gradwire, may answer."""
    yield from (None, [], 3, "text", {}, {"error": "x"}, {"engines": [{}], "attachments": [{}]})
    for odd in (None, [], {}, "", math.inf, [None], [{}], [[]], -1):
        yield from (answer(**{key: odd}) for key in answer())
        steps = {
            "id": "0",
            "noted": 1,
            "policy": "mlt",
            "number": 0,
            "ranks": [0],
            "keys": ["step"],
        }
        yield answer(attachments=[{**steps, "steps": odd}])
        yield answer(attachments=[{**steps, "steps": [odd]}])
        yield answer(attachments=[{**steps, "steps": [[odd]]}])


@contextlib.contextmanager
def answering(job: str, what: list[object]) -> Iterator[None]:
    """Another program of this user, which gives these answers one after another."""
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(Address(job, "-", os.geteuid()).name)
        taken.listen()

        def run() -> None:
            for each in what:
                connection, _ = taken.accept()
                with connection:
                    connection.recv(1 << 12)
                    connection.sendall(json.dumps(each).encode())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield
        thread.join(30)
        assert not thread.is_alive()


def test_whatever_a_process_answers_is_shown_or_left_out() -> None:
    told = list(answers())
    with offering(f"{JOB}d"), answering(f"{JOB}d", told):
        watched = Watched(f"{JOB}d", 40)
        for each in told:
            watched.look()
            figures = picture(watched)
            assert [worker["name"] for worker in figures["workers"]] == ["rank 0"], each
            assert figures["state"] == "running"
            assert draw(figures, 80, None, True)
        assert "starting" in figures["messages"][0]


def test_a_killed_process_leaves_nothing_behind() -> None:
    with offering(f"{JOB}3") as process:
        process.kill()
        process.wait()
        assert not any(each.job == f"{JOB}3" for each in addresses())


@pytest.mark.skipif(not seccomp.CALLS, reason="system calls of this machine are not known")
def test_a_kernel_that_refuses_the_socket_stops_no_job() -> None:
    code = (
        "import socket, seccomp\n"
        "from gradwire.live.publisher import publish\n"
        "seccomp.refuse('socket', socket.AF_UNIX)\n"
        f"end = publish('{JOB}9', dict)\n"
        "end()\n"
        "end()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_job_of_another_user_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = 60001
    with name_taken(Address(f"{JOB}4", "1-1", uid)):
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        for asked in (None, f"{JOB}4"):
            with pytest.raises(GradwireError) as caught:
                find_job(asked)
            # Without a name other jobs of this machine may be meant.
            assert str(uid if asked else uid + 1) in str(caught.value)
            assert "\n" not in str(caught.value)


def test_a_name_that_somebody_else_has_taken_is_not_believed() -> None:
    address = Address(f"{JOB}5", "1-1", os.geteuid() + 1)
    with name_taken(address):
        assert states({address: {}}, 0) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_only_its_user_and_root_get_an_answer() -> None:
    with offering(f"{JOB}6"):
        (address,) = (each for each in addresses() if each.job == f"{JOB}6")
        ask = (
            "import os, socket, sys\n"
            "os.setuid(65534)\n"
            "asks = socket.socket(socket.AF_UNIX)\n"
            f"asks.connect({address.name!r})\n"
            "try:\n"
            """    asks.sendall(b'{"since": {}, "steps": 0}\\n')\n"""
            "    sys.exit(len(asks.recv(100)))\n"
            "except (ConnectionResetError, BrokenPipeError):\n"
            "    sys.exit(0)\n"
        )
        assert subprocess.run([sys.executable, "-S", "-c", ask], check=False).returncode == 0
        assert states({address: {}}, 0)[address]["job"] == f"{JOB}6"


def test_a_job_of_another_version_is_refused_in_one_line() -> None:
    with (
        name_taken(Address(f"{JOB}7", "1-1", os.geteuid(), FORMAT + 1)),
        pytest.raises(GradwireError, match=f"form {FORMAT + 1}"),
    ):
        find_job(f"{JOB}7")


@pytest.mark.parametrize("asked", [b"", b"\n", b"nonsense\n", b'{"since": 3, "steps": "x"}\n'])
def test_a_reader_that_talks_nonsense_keeps_nobody_from_reading(asked: bytes) -> None:
    with offering(f"{JOB}8"):
        (address,) = (each for each in addresses() if each.job == f"{JOB}8")
        with socket.socket(socket.AF_UNIX) as asks:
            asks.connect(address.name)
            asks.sendall(asked)
        assert states({address: {}}, 0)[address]["job"] == f"{JOB}8"


def test_no_job_is_one_line_and_status_2() -> None:
    for more in ([], ["--json"]):
        shown = subprocess.run([*TOP, "-1", "0bad", *more], capture_output=True, text=True)
        assert shown.returncode == 2
        assert len((shown.stdout + shown.stderr).splitlines()) == 1
        assert "0bad" in shown.stdout + shown.stderr
