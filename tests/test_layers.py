"""Imports point downwards only, and classes stay small (docs/design.md, "Layout")."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gradwire"
LAB = ROOT / "lab" / "src" / "gradwire_lab"
ENGINE = ROOT / "engine"

# What each room may import beside itself: a folder of a package, or a module at its top. "" is the
# package's own __init__, its public face. Nothing points upwards, so nothing goes in circles.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "gradwire": {
        "core": (),
        "policies": ("core",),
        "exports": ("core",),
        "live": ("core",),
        "transport": ("core", "live", "_engine"),
        "calibration": ("core", "policies"),
        "training": ("core", "policies", "exports", "live", "transport"),
        "process_group": ("core", "policies", "transport", "training"),
        "integrations": ("core", "policies", "exports", "training"),
        "autoload": ("process_group",),
        "sim": ("core", "policies", "transport", "training", "_engine"),
        "": ("core", "policies", "transport", "training", "calibration"),
        "server": ("core", "live", "policies", "transport", "training"),
        "watch": ("core", "live"),
        "doctor": ("core", "policies", "transport", "server", "_engine"),
        "reading": ("core",),
        "cli": ("core",),  # finds the commands by name
    },
    "gradwire_lab": {
        "_link": (),
        "network": ("_link",),
        "contest": ("network",),
        "training": ("contest", "network"),
        "scenario": ("training", "contest", "network"),
        "run": ("scenario", "training", "contest", "network"),
        "report": ("run", "scenario"),
        "command": ("run", "report", "scenario", "contest", "network"),
        "demo": ("report", "scenario", "training", "contest", "network"),
        "study": ("run", "scenario", "training", "contest", "network"),
        "faults": ("contest", "network"),
        "bench": ("study", "demo", "report", "faults", "contest", "network", "training"),
        "": (),
    },
}

ENGINE_LAYERS = {"binding": 7, "lab": 6, "io": 5, "sim": 5, "proto": 4}
ENGINE_LAYERS |= {"reduce": 3, "codec": 2, "seal": 2, "wire": 1}
# Inside proto: what each part may include beside itself. What stands last wires the others.
PROTO_ROOMS = {
    "base": (),
    "plan": ("base",),
    "recovery": ("base", "plan"),
    "congestion": ("base", "recovery"),
    "credit": ("base", "recovery", "congestion"),
    "sched": ("base", "plan"),
    "push": ("base", "plan"),
    "pull": ("base", "plan", "push"),
    "op": ("base", "plan", "push", "pull"),
    "path": ("base", "plan", "recovery", "congestion", "credit", "sched", "op"),
}
PROTO_ROOMS["endpoint"] = tuple(PROTO_ROOMS)
# What the layers below io (and sim, which is virtual) must not see: clocks, sockets, random
# sources, threads.
IMPURE = re.compile(
    r"^(chrono|random|thread|mutex|future|condition_variable|ctime|time\.h|unistd\.h|poll\.h"
    r"|sys/(?!types\.h|mman\.h|auxv\.h).*|netinet/.*|arpa/.*|net/.*|linux/.*|pthread\.h|netdb\.h)$"
)
# Fields of one class in proto, with those of its bases: more are two classes.
MOST_FIELDS = 20
# Named constants of congestion control, in these rooms: who tunes it has to know each of them.
MOST_CONSTANTS = 94
CONGESTION_CONTROL = ("congestion", "credit")
PAPERS = {"dblp", "ltp", "plot", "mlt", "optireduce", "netsense", "netsenseml"}


# ---------------------------------------------------------------------------- Python


def imported(path: Path, package: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted name in parts) for each import of ours, wherever it stands in a file."""
    base = [package.name, *path.relative_to(package).parent.parts]
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
            if target[0] in ROOMS and target[1:] != ["__version__"]:
                yield node.lineno, target


def python_faults(package: Path) -> list[str]:
    rooms = ROOMS[package.name]
    faults = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        here = where.parts[0].removesuffix(".py").removeprefix("__init__")
        if here not in rooms:
            faults.append(f"{package.name}/{where}: {here} is no room (ROOMS in {__file__})")
            continue
        for line, target in imported(path, package):
            at = f"{package.name}/{where}:{line}: {here or '__init__'}"
            there = target[1] if len(target) > 1 and target[1] in rooms else ""
            if len(target) > 1 and target[1].startswith("_"):
                there = target[1]
            if target[0] != package.name:
                if package.name == "gradwire":
                    faults.append(f"{at} imports {'.'.join(target)}: the product knows no lab")
            elif there != here and there not in rooms[here]:
                faults.append(f"{at} must not import {there or '__init__'}")
    return faults


# ---------------------------------------------------------------------------- engine


def engine_files(engine: Path) -> list[Path]:
    return sorted(p for ext in ("*.cc", "*.h") for p in engine.rglob(ext))


def words(text: str) -> set[str]:
    """Words in prose and in identifiers: LtpClose, ltp_close and LTP all hold "ltp"."""
    return {w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)}


def within_proto(here: str, name: str) -> bool:
    there = name.split("/")[1]
    return here not in PROTO_ROOMS or there == here or there in PROTO_ROOMS[here]


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
                elif layer == there == "proto" and not within_proto(where.parts[1], name):
                    faults.append(f"{at}, which does not stand below it in proto")
            elif quoted:
                faults.append(f'{at}: say it from engine/ on, as in "wire/packet.h"')
            elif layer not in ("io", "lab", "binding") and IMPURE.match(name):
                faults.append(f"{at}: no clocks, sockets, threads or random sources here")
            elif name.startswith(("torch/", "ATen/", "c10/")) or (
                layer != "binding" and name.startswith(("nanobind/", "Python.h"))
            ):
                faults.append(f"{at}: only binding knows Python, and nothing knows torch")
    return faults


class Fields(NamedTuple):
    """A class, the number of its own fields, and its bases."""

    name: str
    own: int
    bases: tuple[str, ...] = ()


def fields(text: str) -> list[Fields]:
    """Counts the fields of each class and struct in C++ code that clang-format has put in form.

    The innermost braces are resolved first, until none is left. A class counts the declarations of
    data between its braces; bodies of functions are dropped.
    """
    found: list[Fields] = []

    def bare(code: str) -> str:
        while code != (code := re.sub(r"<[^<>(]*(\([^()]*\))?[^<>(]*>|\[\[.*?\]\]", "", code)):
            pass
        return code

    def declared(statement: str) -> int:
        statement = bare(re.sub(r"\b(public|private|protected)\s*:", "", statement)).strip()
        other = bool(re.match(r"(static|using|friend|enum|struct|class|template)\b|$", statement))
        declarators = re.sub(r"=[^,]*", "", statement)
        other = other or "(" in declarators or "operator=" in statement
        return 0 if other else declarators.count(",") + 1

    def resolve(match: re.Match[str]) -> str:
        head, body = match.groups()
        code = bare(head)
        if name := re.search(r"(?<!enum )\b(?:class|struct|union) ([\w:]+)([^()]*)$", code):
            bases = tuple(re.findall(r"([\w:]+)\s*(?:,|$)", name[2].partition(":")[2]))
            own = sum(declared(statement) for statement in body.split(";"))
            found.append(Fields(name[1], own, bases))
            return ";"
        function = "(" in code and code.count("(") == code.count(")") and head[-1].isspace()
        return ";" if function else head

    text = re.sub(r"//.*|^\s*#.*|\"(\\.|[^\"\\])*\"|'(\\.|[^'\\])'", "", text, flags=re.MULTILINE)
    while text != (text := re.sub(r"([^;{}]*)\{([^{}]*)\}", resolve, text)):
        pass
    return found


def with_bases(classes: list[Fields]) -> list[tuple[str, int]]:
    """Adds the fields of all bases to those of each class; a base is found by its last name."""
    known = {each.name.split("::")[-1]: each for each in classes}

    def total(each: Fields) -> int:
        bases = (known.get(base.split("::")[-1]) for base in each.bases)
        return each.own + sum(total(base) for base in bases if base)

    return [(each.name, total(each)) for each in classes]


# ---------------------------------------------------------------------------- tests


@pytest.mark.parametrize("package", [PACKAGE, LAB], ids=lambda package: package.name)
def test_imports_follow_the_rooms(package: Path) -> None:
    assert any(package.rglob("*.py"))
    assert python_faults(package) == []


@pytest.mark.parametrize("package", list(ROOMS))
def test_rooms_have_one_direction(package: str) -> None:
    for room, below in ROOMS[package].items():
        for other in below:
            assert room not in ROOMS[package].get(other, ()), f"{room} and {other}"


def test_engine_includes_point_downwards() -> None:
    assert engine_files(ENGINE)
    assert engine_faults(ENGINE) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("core/plan", "from gradwire import policies", "core must not import policies"),
        ("transport/engines", "import gradwire.training.attach", "must not import training"),
        ("transport/engines", "from gradwire.policies.base import Policy", "import policies"),
        ("policies/mlt", "def f():\n    from ..training.hook import HookState", "import training"),
        ("core/names", "import importlib\nimportlib.import_module('gradwire.cli')", "import cli"),
        ("training/hook", "from gradwire import attach", "must not import __init__"),
        ("policies/dblp", "from gradwire._engine import Plan", "must not import _engine"),
        ("policies/dblp", "from ..transport.native import load_engine", "import transport"),
        ("training/attach", "from gradwire_lab.network import Network", "knows no lab"),
        ("helpers", "", "is no room"),
        ("lab/helpers", "", "is no room"),
    ],
)
def test_a_planted_python_fault_is_found(
    tmp_path: Path, module: str, source: str, fault: str
) -> None:
    path = tmp_path / "gradwire" / f"{module}.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    faults = python_faults(tmp_path / "gradwire")
    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("network/topology", "from gradwire_lab.scenario import load"),
        ("contest/race", "from gradwire_lab.bench.net import sweep"),
        ("scenario/work", "from gradwire_lab import report"),
        ("run/marks", "from ..report.words import row"),
    ],
)
def test_a_planted_fault_of_the_lab_is_found(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / "gradwire_lab" / f"{module}.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert len(python_faults(tmp_path / "gradwire_lab")) == 1


def test_downward_python_imports_are_left_alone(tmp_path: Path) -> None:
    package = tmp_path / "gradwire"
    (package / "policies").mkdir(parents=True)
    (package / "policies" / "dblp.py").write_text(
        "import torch\nfrom . import base\nfrom ..core.plan import TransferPlan\n"
        "from gradwire import __version__\n"
    )
    (package / "cli.py").write_text("import typer\nfrom gradwire import __version__\n")
    assert python_faults(package) == []


@pytest.mark.parametrize(
    ("path", "line", "fault"),
    [
        ("wire/packet.h", '#include "proto/plan.h"', "does not stand below"),
        ("sim/fabric.cc", '#include "io/socket.h"', "does not stand below"),
        ("proto/plan/grid.cc", '#include "proto/push/aggregator.h"', "stand below it in proto"),
        ("proto/path/path.h", '#include "proto/endpoint/endpoint.h"', "stand below it in proto"),
        ("proto/op/op.h", '#include "proto/path/path.h"', "stand below it in proto"),
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
    file.parent.mkdir(parents=True, exist_ok=True)
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


def test_no_class_of_the_protocol_has_too_many_fields() -> None:
    paths = engine_files(ENGINE / "proto")
    classes = [each for path in paths for each in fields(path.read_text(encoding="utf-8"))]
    assert [each for each in with_bases(classes) if each[1] > MOST_FIELDS] == []


def test_the_fields_of_bases_are_counted() -> None:
    text = """
    struct Ground { int a; };
    struct Side { int b, c; };
    struct Middle final : Ground { int d; };
    class Top : public gradwire::Middle, private Side, Foreign<int> { int e; };
    """
    counts = [("Ground", 1), ("Side", 2), ("Middle", 2), ("Top", 5)]
    assert with_bases(fields(text)) == counts


def constants(text: str) -> list[str]:
    """The names of the constants that C++ code defines."""
    return re.findall(r"\bconstexpr [\w:]+ (k[A-Z]\w*)", text)


def test_congestion_control_has_few_constants() -> None:
    names = [
        name
        for room in CONGESTION_CONTROL
        for path in engine_files(ENGINE / "proto" / room)
        for name in constants(path.read_text(encoding="utf-8"))
    ]
    assert 0 < len(names) <= MOST_CONSTANTS, names


def test_a_constant_is_counted_once_where_it_is_defined() -> None:
    text = """
    static constexpr Nanos kPause = 2 * kSecond;
    constexpr std::size_t kMost = kFewest;
    inline constexpr double kShare{0.5};
    static constexpr Nanos at(Nanos kept) { return kept; }
    """
    assert constants(text) == ["kPause", "kMost", "kShare"]


def test_a_field_too_many_is_counted() -> None:
    text = """
    #include <map>
    template <typename T>
    class Part final : public Base<T> {
     public:
      enum class Kind : uint8_t { push, pull };
      static constexpr int kMost = 20;
      explicit Part(int count) : count_(count), room_{count} {}
      Part& operator=(const Part&) = delete;
      bool operator<(const Part& other) const { return count_ < other.count_; }
      void take(Nested value = {}, int most = kMost);
      int room() const {
        for (int i = 0; i < count_; ++i) call({i, '{'});
        return room_;
      }

     private:
      struct Nested {
        int a = 0, b = 1;  // int c;
        const char* text = "int d; }";
      };
      using Map = std::map<int, Nested>;

      %s
    };
    int Part::most = 3;
    """
    own = ["int count_;", "int room_{3};", "Map map_;", "std::map<int, std::set<int>> sets_ = {};"]
    own += ["std::function<void(int)> call_;", "Nested nested_[2] = {{1, 2}, {}};"]
    own += [f"Nanos at{i}_ = now(0);" for i in range(len(own), MOST_FIELDS)]
    part = Fields("Part", MOST_FIELDS, ("Base",))
    assert fields(text % "\n".join(own)) == [Fields("Nested", 3), part]
    assert fields(text % "\n".join([*own, "bool one_;"]))[-1].own == MOST_FIELDS + 1
