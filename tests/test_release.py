"""What stands around the code: containers, workflow, citation, versions and addresses on pages."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gradwire
import report_files
from gradwire import cli
from gradwire.training.training_state import STATE_VERSION
from gradwire.transport.native import load_engine

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = ROOT / "docs" / "tutorial.md"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lines(shell: str) -> list[str]:
    """The commands of a shell text, without comments, continued lines as one."""
    joined = re.sub(r"\\\n\s*", "", shell)
    return [re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines() if line.strip()]


def typed(page: str) -> list[str]:
    """The commands that a page says to type."""
    return [
        line for code in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) for line in lines(code)
    ]


# ---------------------------------------------------------------------------- containers


def test_the_containers_run_what_the_tutorial_says_to_type() -> None:
    services = yaml.safe_load(read("compose.yaml"))["services"]
    assert sorted(services) == ["alpha", "beta"]
    said = typed(TUTORIAL.read_text(encoding="utf-8"))
    for name, service in services.items():
        assert service["hostname"] == name
        shell, options, script = service["command"]
        assert (shell, options) == ("sh", "-ec")
        commands = lines(script)
        assert len(commands) == 2
        assert not [command for command in commands if command not in said]
    assert services["alpha"]["command"] == services["beta"]["command"]
    assert not {"privileged", "cap_add", "network_mode"} & {*services["alpha"], *services["beta"]}


def test_what_the_image_copies_is_there_and_sent() -> None:
    sent = {line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    copied = re.findall(r"^COPY (?!--from)(\S+) ", read("Dockerfile"), re.M)
    assert {name for name in copied if name != "."} <= sent
    assert {"CMakeLists.txt", "LICENSE", "README.md", "engine", "pyproject.toml", "src"} <= sent
    assert re.search(r"^USER (?!root)", read("Dockerfile"), re.M)


def has_compose() -> bool:
    command = ["docker", "compose", "version"]
    return (
        bool(shutil.which("docker")) and not subprocess.run(command, capture_output=True).returncode
    )


@pytest.mark.skipif(not has_compose(), reason="there is no Docker with Compose here")
def test_docker_reads_the_compose_file() -> None:
    command = ["docker", "compose", "-f", ROOT / "compose.yaml", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------- the tutorial


def test_the_options_that_the_tutorial_gives_to_the_example_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsers: list[argparse.ArgumentParser] = []

    class Read(Exception):
        """The options are known, and nothing more of the script is wanted."""

    def stop(self: argparse.ArgumentParser, *_: object) -> None:
        parsers.append(self)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(read("examples/train_ddp.py"), "train_ddp.py", "exec"), names)
    with pytest.raises(Read):
        names["main"]()  # type: ignore[operator]
    monkeypatch.undo()
    given = [line.partition("examples/train_ddp.py ")[2] for line in typed(TUTORIAL.read_text())]
    assert len([options for options in given if options]) == 4
    for options in given:
        parsers[0].parse_args(options.split())


def test_the_commands_of_the_tutorial_read_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("steps.jsonl", "reliable.jsonl"):
        report_files.write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    page = typed(TUTORIAL.read_text())
    commands = [line for line in page if re.match(r"gradwire (report|diff|why) ", line)]
    assert len(commands) == 3
    for words in commands:
        done = CliRunner().invoke(cli.app, words.split()[1:])
        assert done.exit_code == 0, done.output


# ---------------------------------------------------------------------------- versions


def test_pages_name_the_versions_that_the_code_has() -> None:
    protocol = load_engine().PROTOCOL_VERSION
    compatibility = read("docs/compatibility.md")
    assert f"the protocol, which is {protocol} now" in compatibility
    assert f"in format {STATE_VERSION} now" in compatibility
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.stem != "CHANGELOG")
    assert {*re.findall(r"\(protocol (\d+)\)", text)} == {str(protocol)}
    text += read("mkdocs.yml")
    assert {*re.findall(r"gradwire (\d+\.\d+\.\d+)\b", text)} == {gradwire.__version__}
    assert yaml.safe_load(read("CITATION.cff"))["version"] == gradwire.__version__


# ---------------------------------------------------------------------------- publication


def test_the_workflow_runs_what_a_checkout_has() -> None:
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    typed_there = [step["run"] for step in steps if "run" in step]
    assert ".ci/run" in typed_there
    assert any("cibuildwheel --output-dir dist" in line for line in typed_there)
    targets = re.findall(r"^([\w-]+):", read("Makefile"), re.M)
    made = [line.split()[1] for line in typed_there if line.startswith("make ")]
    assert {*made} <= {*targets}
    assert workflow["permissions"] == {"contents": "read"}


def test_every_placeholder_is_named_for_whoever_publishes() -> None:
    table = read("CONTRIBUTING.md").partition("| placeholder | file |")[2].partition("\n\n")[0]
    named = {*re.findall(r"`([\w.]+\.\w+)`", table)} - {"example.org"}
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != "CONTRIBUTING.md"]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"), ROOT / "mkdocs.yml"]
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in files}
    found = {name for name, text in texts.items() if re.search(r"[/@]example\.org\b", text)}
    assert found == named


def test_libraries_that_are_taken_are_required_and_those_refused_are_not() -> None:
    table = read("CONTRIBUTING.md").partition("| library | for | verdict | why |")[2]
    rows = [line.split("|")[1:-1] for line in table.partition("\n\n")[0].splitlines()[2:]]
    places = ("pyproject.toml", "lab/pyproject.toml", ".github/workflows/ci.yml")
    required = "".join(map(read, places))
    assert len(rows) > 10
    for named, _, verdict, reason in rows:
        assert verdict.strip() in ("taken", "refused")
        assert reason.strip()
        for library in re.findall(r"`([\w-]+)`", named):
            if library != "click":  # typer brings it
                assert (f"{library}" in required) == (verdict.strip() == "taken"), library
