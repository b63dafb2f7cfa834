"""Imports point downwards only, in the package and in the engine (docs/design.md, "Layers")."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gradwire"
ENGINE = ROOT / "engine"

# Top layer first. A module may import its own layer and those below.
LAYERS = (
    (
        "cli",
        "lab",
        "sim",
        "virtual",
        "bench",
        "demo",
        "server",
    ),
    (
        "ddp",
        "hook",
        "groups",
        "pipeline",
        "ballots",
        "books",
        "consultation",
        "guarding",
        "skips",
        "configure",
        "moments",
        "magnitudes",
        "buckets",
        "names",
        "modules",
        "pruning",
        "staging",
        "steps",
        "calibration",
        "layer_search",
        "device_books",
        "device_codec",
        "job_calibration",
        "calibration_roll",
    ),
    ("policies",),
    (
        "phases",
        "feedback",
        "flat_book",
        "flat_copies",
        "chunk_book",
        "momentum",
        "telemetry",
        "guard",
    ),
    (
        "addresses",
        "communicator",
        "hosts",
        "opening",
        "handles",
        "arrays",
        "native",
        "executor",
        "rendezvous",
        "transforms",
    ),
    ("_engine",),
    # plain data and words that any layer may use
    ("plans", "errors", "settings", "loss_runs", "scalars", "states", "hashed"),
)
RANK = {name: len(LAYERS) - depth for depth, names in enumerate(LAYERS) for name in names}
# Policies write plans and read reports; they never reach for what carries them out. The lab serves
# bench, which it does not know.
FORBIDDEN = {
    "policies": {"_engine", "communicator", "hosts", "opening", "native", "transforms"},
    "lab": {"bench", "cli", "sim"},
}

# Inside the lab: what people run, then doing and telling, which do not know each other, then what a
# scenario says; all else, 0, is what a network is made of and serves demo and bench as well.
LAB_RANK = {"command": 3, "run": 2, "report": 2, "scenario": 1}

# The package's own __init__ is the public face: what it offers comes from the faces to torch.
INIT = "__init__"
RANK[INIT] = RANK["ddp"]

ENGINE_LAYERS = {"binding": 7, "lab": 6, "io": 5, "sim": 5, "proto": 4}
ENGINE_LAYERS |= {"reduce": 3, "codec": 2, "wire": 1}
# What the layers below io (and sim, which is virtual) must not see: clocks, sockets, random
# sources, threads.
IMPURE = re.compile(
    r"^(chrono|random|thread|mutex|future|condition_variable|ctime|time\.h|unistd\.h|poll\.h"
    r"|sys/(?!types\.h).*|netinet/.*|arpa/.*|net/.*|linux/.*|pthread\.h|netdb\.h)$"
)
PAPERS = {"dblp", "ltp", "plot", "mlt", "optireduce", "netsense", "netsenseml"}


# ---------------------------------------------------------------------------- Python


def top_level(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported(path: Path, package: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted name in parts) for each import of gradwire's, wherever it stands in a file."""
    base = ["gradwire", *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        targets: list[list[str]] = []
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = base[: len(base) - node.level + 1] if node.level else []
            source = start + (node.module.split(".") if node.module else [])
            targets = [[*source, alias.name] for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                targets = [str(first.value).split(".")]
        for target in targets:
            if target[0] == "gradwire" and target[1:] != ["__version__"]:
                yield node.lineno, target


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level gradwire module) for each import in a file."""
    for line, target in imported(path, package):
        inner = target[1] if len(target) > 1 else INIT
        is_module = (package / inner).is_dir() or any(package.glob(f"{inner}.py*"))
        yield line, inner if is_module or inner in RANK else INIT


def lab_faults(path: Path, package: Path) -> list[str]:
    here = path.relative_to(package).parts[1].removesuffix(".py")
    rank = LAB_RANK.get(here, 0)
    return [
        f"gradwire/{path.relative_to(package)}:{line}: the lab's {here} imports its {target[2]}, "
        "which does not stand below it"
        for line, target in imported(path, package)
        if target[1:2] == ["lab"]
        and len(target) > 2
        and target[2] != here
        and LAB_RANK.get(target[2], 0) >= max(rank, 1)
    ]


def python_faults(package: Path) -> list[str]:
    faults = []
    for path in sorted(package.rglob("*.py")):
        here = top_level(path, package)
        where = f"gradwire/{path.relative_to(package)}"
        if here not in RANK:
            faults.append(f"{where}: say which layer it belongs to (LAYERS in {__file__})")
            continue
        for line, there in imports(path, package):
            if there not in RANK:
                continue  # named by its own file's fault
            if RANK[there] > RANK[here]:
                faults.append(f"{where}:{line}: {here} imports {there}, which stands above it")
            elif there in FORBIDDEN.get(here, ()):
                faults.append(f"{where}:{line}: {here} must not import {there}")
        if here == "lab":
            faults += lab_faults(path, package)
    return faults


# ---------------------------------------------------------------------------- engine


def engine_files(engine: Path) -> list[Path]:
    return sorted(p for ext in ("*.cc", "*.h") for p in engine.rglob(ext))


def words(text: str) -> set[str]:
    """Words in prose and in identifiers: LtpClose, ltp_close and LTP all hold "ltp"."""
    return {w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)}


def engine_faults(engine: Path) -> list[str]:
    faults = []
    for path in engine_files(engine):
        where = path.relative_to(engine)
        layer = where.parts[0]
        text = path.read_text(encoding="utf-8")
        if found := words(text) & PAPERS or words(str(where)) & PAPERS:
            faults.append(f"engine/{where}: names {sorted(found)}; the engine knows plans only")
        if layer in ("tests", "fuzz"):
            continue
        if layer not in ENGINE_LAYERS or len(where.parts) == 1:
            faults.append(f"engine/{where}: say which layer it belongs to (ENGINE_LAYERS)")
            continue
        for number, line in enumerate(text.splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not match:
                continue
            quoted, name = match[1] == '"', match[2]
            at = f"engine/{where}:{number}: {layer} includes {name}"
            there = name.split("/")[0]
            if there in ENGINE_LAYERS and (quoted or (engine / name).exists()):
                if there != layer and ENGINE_LAYERS[there] >= ENGINE_LAYERS[layer]:
                    faults.append(f"{at}, which does not stand below it")
            elif quoted:
                faults.append(f'{at}: say it from engine/ on, as in "wire/packet.h"')
            elif layer not in ("io", "lab", "binding") and IMPURE.match(name):
                faults.append(f"{at}: no clocks, sockets, threads or random sources here")
            elif name.startswith(("torch/", "ATen/", "c10/")) or (
                layer != "binding" and name.startswith(("nanobind/", "Python.h"))
            ):
                faults.append(f"{at}: only binding knows Python, and nothing knows torch")
    return faults


# ---------------------------------------------------------------------------- tests


def test_python_imports_point_downwards() -> None:
    assert any(PACKAGE.rglob("*.py"))
    assert python_faults(PACKAGE) == []


def test_engine_includes_point_downwards() -> None:
    assert engine_files(ENGINE)
    assert engine_faults(ENGINE) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("communicator", "from gradwire import telemetry", "imports telemetry, which stands above"),
        ("communicator", "import gradwire.training.attach", "imports ddp, which stands above"),
        ("phases", "def f():\n    from .policies.dblp import DBLP", "imports policies"),
        ("feedback", "import importlib\nimportlib.import_module('gradwire.cli')", "imports cli"),
        ("telemetry", "from gradwire import attach", "imports __init__"),
        ("ddp", "from gradwire.cli import main", "imports cli"),
        ("policies/dblp", "from gradwire._engine import Plan", "must not import _engine"),
        ("policies/dblp", "from ..communicator import Communicator", "must not import commun"),
        ("helpers", "", "say which layer it belongs to"),
        ("lab/measure", "from gradwire.lab.run.build import build", "measure imports its run"),
        ("lab/network", "from .scenario import load", "network imports its scenario"),
        ("lab/race", "from gradwire.bench.net import sweep", "must not import bench"),
        ("lab/scenario/work", "from gradwire.lab import report", "scenario imports its report"),
        ("lab/run/marks", "from ..report.words import row", "run imports its report"),
    ],
)
def test_a_planted_python_fault_is_found(
    tmp_path: Path, module: str, source: str, fault: str
) -> None:
    path = tmp_path / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    faults = python_faults(tmp_path)
    assert len(faults) == 1
    assert fault in faults[0]


def test_downward_python_imports_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "dblp.py").write_text(
        "import torch\nfrom . import base\nfrom ..phases import Detector\n"
        "from gradwire import __version__, telemetry\n"
    )
    (tmp_path / "telemetry.py").write_text("")
    (tmp_path / "cli.py").write_text("import gradwire\nfrom gradwire import demo\n")
    assert python_faults(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "line", "fault"),
    [
        ("wire/packet.h", '#include "proto/plan.h"', "does not stand below"),
        ("sim/fabric.cc", '#include "io/socket.h"', "does not stand below"),
        ("reduce/sum.cc", '  #  include "proto/plan.h"', "does not stand below"),
        ("proto/sender.cc", "#include <chrono>", "no clocks"),
        ("proto/sender.cc", "#include <sys/socket.h>", "no clocks"),
        ("proto/sender.cc", "#include <nanobind/nanobind.h>", "only binding"),
        ("binding/module.cc", "#include <torch/torch.h>", "only binding"),
        ("proto/sender.cc", '#include "plan.h"', "say it from engine/ on"),
        ("proto/sender.cc", "struct LtpClose {};", "names ['ltp']"),
        ("proto/sender.cc", "// as in DBLP", "names ['dblp']"),
        ("proto/sender.cc", "int mlt_bound;", "names ['mlt']"),
        ("tls/record.cc", "", "say which layer"),
        ("util.h", "", "say which layer"),
    ],
)
def test_a_planted_engine_fault_is_found(tmp_path: Path, path: str, line: str, fault: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(line + "\n")
    faults = engine_faults(tmp_path)
    assert len(faults) == 1
    assert fault in faults[0]


def test_downward_engine_includes_are_left_alone(tmp_path: Path) -> None:
    for path, text in {
        "proto/sender.cc": '#include "proto/sender.h"\n#include "wire/packet.h"\n#include <vector>',
        "io/loop.cc": '#include <sys/epoll.h>\n#include <chrono>\n#include "proto/sender.h"',
        "binding/module.cc": '#include <nanobind/nanobind.h>\n#include "sim/fabric.h"',
        "wire/packet.h": "// plotted multiply exploit",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert engine_faults(tmp_path) == []
