"""The pages: links and anchors resolve, snippets parse, commands exist, errors are the code's."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import math
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import typer

import gradwire
from gradwire import cli
from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.policies import names, policy_class

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "experiments/results/README.md"])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in these languages ("" for those that name none)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [code for language, code in found if language in languages]


def test_no_page_has_the_marks_of_a_merge() -> None:
    marked = [page for page in PAGES if re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.M)]
    assert not marked


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs.yml make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        while slug in found:
            slug += "-1"
        found.add(slug)
    return found


def generator() -> ModuleType:
    path = ROOT / "tools" / "settings_page.py"
    spec = importlib.util.spec_from_file_location("settings_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_and_anchors_resolve() -> None:
    broken = []
    for page in PAGES:
        for target in LINK.findall(prose(page)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            if anchor in ("only-light", "only-dark"):  # a picture's form, for the theme
                anchor = ""
            other = (page.parent / path).resolve() if path else page
            if not other.exists() or (anchor and anchor not in anchors(other)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_lines_are_short_and_the_readme_is_read_in_two_minutes() -> None:
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100 and not line.startswith("|")
    ]
    assert not long
    read = re.sub(r"<[^>]*>", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(read.split()) <= 700
    started = (
        (DOCS / "getting-started.md").read_text(encoding="utf-8").partition("## Where to go")[0]
    )
    assert len(read.split()) + len(started.split()) <= 1000


def test_the_page_of_settings_is_what_the_code_says() -> None:
    written = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    assert written == generator().page(), "run: python tools/settings_page.py --write"


def whole_or_not(text: str) -> float:
    """A number as the docstrings write it: 5, 0.01, 1e-9 or 2**62."""
    base, _, power = text.partition("**")
    return int(base) ** int(power) if power else int(base) if base.isdigit() else float(base)


def bounds(said: str, *, whole: bool) -> Iterator[tuple[bool, object]]:
    """Values at the ends of the intervals of a text, and whether each is allowed."""
    number = r"(\d[\d.e*-]*)"
    spans = re.findall(rf"(?<!in )([\[(]){number}, {number}([\])])", said)
    spans += [("[", low, "", "") for low in re.findall(rf"{number} or more", said)]
    for opens, low, high, closes in spans:
        for end, closed, away in ((low, opens == "[", -math.inf), (high, closes == "]", math.inf)):
            if end:
                at = whole_or_not(end)
                step = int(math.copysign(1, away))
                yield closed, at
                out = at + step if whole else math.nextafter(at, away)
                inside = at - step if whole else math.nextafter(at, -away)
                yield (False, out) if closed else (True, inside)


def accepted(kind: type, name: str, value: object) -> bool:
    """Whether an option takes a value, alone or beside what some of the values need."""
    beside: list[dict[str, object]] = [
        {},
        {"route": "server"},
        {"control": "probe"},
        {"p_low": 0.0},
        {"p_high": value},
    ]
    names = {field.name for field in dataclasses.fields(kind)}
    table = {"table": {"*": 0.1}} if kind is policy_class("plot") else {}
    for more in beside:
        if {*more} <= names:
            try:
                kind(**{**table, **more, name: value})
            except ConfigError:
                continue
            return True
    return False


def test_the_allowed_values_are_the_codes() -> None:
    tried = 0
    for kind in (Settings, *map(policy_class, names())):
        hints = get_type_hints(kind)
        for name, meaning in generator().entries(kind).items():
            assert meaning.text, (kind, name)
            assert meaning.allowed, (kind, name)
            said = meaning.allowed.partition(";")[0]
            words = re.findall(r'(?<!=)"(\w+)"', said)
            tries: list[tuple[bool, object]] = [(True, word) for word in words]
            tries += [(False, "nonsense")] if words else []
            tries += [(True, None)] if re.search(r"\bNone\b", said) else []
            tries += bounds(said, whole="float" not in str(hints[name]))
            for allowed, value in tries:
                assert accepted(kind, name, value) == allowed, (kind.__name__, name, value)
            tried += len(tries)
    assert tried > 200


def test_the_navigation_has_every_page() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    beside = ("changelog.md", "security.md")  # tools/site_pages.py adds them
    there = [*(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")), *beside]
    assert sorted(listed) == sorted(there)


def named(directive: str) -> object:
    """The object that a directive of mkdocstrings names."""
    module, _, name = directive.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_pages_of_the_api_have_every_public_name() -> None:
    directives: dict[str, list[str]] = {}
    for page in (DOCS / "reference" / "api").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name, options in re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", text, re.M):
            assert name not in directives, name
            directives[name] = re.findall(r"- (\w+)$", options, re.M)
    public = {f"gradwire.{name}" for name in gradwire.__all__ if name[0] != "_"}
    public |= {f"gradwire.policies.{name}" for name in gradwire.policies.__all__}
    assert {*directives} >= public - {"gradwire.policies"}
    for directive, members in directives.items():
        if "integrations" not in directive:  # whose frameworks may be absent
            found = named(directive)
            assert not [member for member in members if not hasattr(found, member)]
            assert found.__doc__, directive


def test_the_site_loads_nothing_from_elsewhere() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "://" not in re.sub(r"^(?:site|repo)_url: .*$", "", settings, flags=re.M)
    (scripts,) = re.findall(r"^  polyfills: \[(.*)\]", settings, re.M)
    assert [script for script in scripts.split(", ") if (DOCS / script).exists()]


def rows(page: Path, head: str) -> dict[str, list[str]]:
    """The cells of the table below a head, by their first."""
    text = page.read_text(encoding="utf-8").partition(f"\n{head}\n")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells}


def rounded(figure: str) -> str:
    """A figure with two places, as people round."""
    return str(Decimal(figure).quantize(Decimal("0.01"), ROUND_HALF_UP))


def test_the_figures_of_the_readme_are_those_of_the_measurements() -> None:
    found = rows(DOCS / "measurements.md", "| what | rounds | Gloo | `reliable` | lost | eager |")
    shown = rows(ROOT / "README.md", "| network and work | Gloo over TCP | gradwire |")
    same = (
        ("4 hosts, 1 Gbit/s, 25 MB, quiet, exact: median", "A, 25 MB, quiet: median", 2),
        ("4 hosts, 1 Gbit/s, 10 MB, bursts into one port, exact: p99", "A, 10 MB, bursts: p99", 2),
        ("the same, bound 10 %, eager: p99", "A, 10 MB, bursts: p99", 4),
        (
            "4 hosts, 200 Mbit/s, 2 MB, bursts, bound 40 %, eager: longest",
            "B, 2 MB, bursts: longest",
            4,
        ),
    )
    for here, there, column in same:
        peer, ours = shown.pop(here)
        assert ours == rounded(found[there][column]), here
        if peer:
            assert peer.split()[0] == rounded(found[there][1].split()[0]), here
    assert not [row for row in shown if not row.startswith("---")]
    quiet = found["A, 25 MB, quiet: median"]
    said = f"took {rounded(quiet[2])} of the ideal, Gloo's {rounded(quiet[1])}"
    assert said in (DOCS / "when-not.md").read_text(encoding="utf-8")


def test_what_is_said_of_a_policer_is_what_the_networks_say() -> None:
    found = rows(DOCS / "networks.md", "| network | time | own drops | most of them |")
    _, dropped, costs = found["a policer of a tenth of the links' rate"]
    assert costs == "costs little"
    said = f"behind a policer {dropped} of its own packets were dropped"
    assert said in (DOCS / "when-not.md").read_text(encoding="utf-8")


def test_no_table_has_an_empty_head() -> None:
    for page in PAGES:
        assert not re.search(r"^\|(?: *\|)+\n\|---", page.read_text(encoding="utf-8"), re.M), page


def test_files_that_pages_name_exist() -> None:
    name = re.compile(r"`((?:src|lab|engine|tests|tools|examples|experiments)/[\w./-]+)`")
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in name.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert not missing


def test_python_on_the_pages_is_python() -> None:
    for page in PAGES:
        for code in blocks(page, "python"):
            try:
                ast.parse(code.replace("…", "..."))
            except SyntaxError as error:
                pytest.fail(f"{page.relative_to(ROOT)}: {error}\n{code}")


# ---------------------------------------------------------------------------- logging


def template(node: ast.expr) -> str:
    """The text of a log's or warning's first argument, with … for what is put in."""
    if isinstance(node, ast.JoinedStr):
        parts = [str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values]
        return "".join(parts)
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return re.sub(r"%[.\w]*\w", "…", str(node.value)).replace("\n", " ")


def logged() -> Iterator[tuple[str, str]]:
    """(level, line) of each log and (level, text) of each warning in the sources."""
    levels = {"exception": "error", "warn": "warn"}
    sources = set((ROOT / "src" / "gradwire").rglob("*.py"))
    for path in sources - {ROOT / "src" / "gradwire" / "core" / "callers.py"}:  # warns for others
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if owner in ("log", "warnings", "callers") and node.args:
                level = levels.get(node.func.attr, node.func.attr)
                yield level.upper(), template(node.args[0])
            assert owner != "logging" or ast.unparse(node) == "logging.getLogger('gradwire')", path


def test_the_page_of_logging_has_every_line_and_no_other() -> None:
    page = (DOCS / "reference" / "logging.md").read_text(encoding="utf-8")
    lines, warnings = page.split("\n## Warnings\n")
    rows = re.findall(r"^\| (INFO|WARNING|ERROR|DEBUG|CRITICAL) \| `(.+?)` \| \S", lines, re.M)
    rows += [("WARN", text) for text in re.findall(r"^\| `(.+?)` \| \S", warnings, re.M)]
    assert sorted(rows) == sorted(set(logged()))


# ---------------------------------------------------------------------------- commands


def commands() -> Iterator[tuple[Path, list[str]]]:
    """The lines of shell blocks, without comments, as words."""
    for page in PAGES:
        for code in blocks(page, "sh", ""):
            for line in code.splitlines():
                words = re.sub(r"(^|\s)#.*", "", line).split()
                if words:
                    yield page, words


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    """The command of gradwire that the words name, and the words after it."""
    found: Any = typer.main.get_command(cli.app)
    while words and hasattr(found, "get_command") and not words[0].startswith("-"):
        inner = found.get_command(None, words[0])
        assert inner is not None, words
        found, words = inner, words[1:]
    return found, words


def test_commands_and_their_options_exist() -> None:
    seen = 0
    for page, words in commands():
        if words[0] != "gradwire":
            continue
        found, rest = subcommand(words[1:])
        known = {option for parameter in found.params for option in parameter.opts}
        for word in rest:
            option = word.partition("=")[0]
            assert not option.startswith("--") or option in {*known, "--help"}, (page, words)
        seen += 1
    assert seen > 20


def quoted(text: str) -> set[str]:
    """The commands of gradwire that a text names in backquotes."""
    return {
        word.removeprefix("gradwire ")
        for word in re.findall(r"`([\w. ]+)`", text)
        if word.removeprefix("gradwire ") in {*cli.OWN, *cli.LAB}
    }


def test_pages_know_which_commands_the_product_has_alone() -> None:
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `gradwire (\w+)` \| .* \| (gradwire|the lab) \|$", page, re.M)
    assert {name for name, owner in rows if owner == "gradwire"} == {*cli.OWN}
    assert {name for name, owner in rows if owner == "the lab"} == {*cli.LAB}
    for name in ("reference/commands.md", "questions.md"):
        page = (DOCS / name).read_text(encoding="utf-8")
        said = re.search(r"((?:`[\w ]+`(?:, | and ))+`[\w ]+`)\s+(?:belong to|end with)", page)
        assert said is not None
        assert quoted(said[1].replace("\n", " ")) == {*cli.LAB}


def test_pages_raise_buffers_to_what_the_engine_asks_for() -> None:
    source = (ROOT / "engine/io/socket.h").read_text(encoding="utf-8")
    asked = {
        limit: str(int(number) << int(power))
        for limit, name in (("rmem_max", "kReceiveBuffer"), ("wmem_max", "kSendBuffer"))
        for number, power in re.findall(rf"{name} = (\d+) << (\d+);", source)
    }
    typed = {
        found for page in PAGES for found in re.findall(r"(\wmem_max)=(\d+)", page.read_text())
    }
    assert typed == {*asked.items()}


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page, words in commands():
        if "make" in words[:3]:
            target = words[words.index("make") + 1]
            assert target in targets, (page, words)


# ---------------------------------------------------------------------------- errors


def texts() -> str:
    """All literal texts of the sources, in which adjacent literals are one."""
    found: list[str] = []
    for path in (ROOT / "src" / "gradwire").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for path in (ROOT / "engine").rglob("*.cc"):
        joined = re.sub(r'"\s*"', "", path.read_text(encoding="utf-8"))
        found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
    return "\n".join(found)


def test_the_questions_are_errors_of_gradwire() -> None:
    known = texts()
    headings = re.findall(r"^### (.+)$", (DOCS / "questions.md").read_text(), re.M)
    assert len(headings) >= 15
    missing = [
        heading
        for heading in headings
        for part in heading.split("…")
        if len(part.split()) > 1 and part.strip() not in known
    ]
    assert not missing


def test_the_picture_and_what_is_said_of_the_demo_are_of_one_run() -> None:
    figures = json.loads((ROOT / "docs" / "step-times.json").read_text(encoding="utf-8"))
    ours, theirs = (figures["contestants"][name] for name in ("adaptive", "gloo-fp16"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"trained {ours['speed_over_peer']:.2f} times as fast" in readme
    longest = (round(1000 * entry["comm_max_s"]) for entry in (ours, theirs))
    assert "longest step waited {} ms, TCP's {}.".format(*longest) in readme
    far = json.loads((ROOT / "docs" / "far-times.json").read_text(encoding="utf-8"))
    near = f"hosts {1000 * far['round_trip_s']:g} ms apart, with {100 * far['loss']:g} % of loss"
    steps, ratio = (far["contestants"]["adaptive"][key] for key in ("timed_steps", "speed_over"))
    said = f"it trained {ratio['gloo-fp16']:.1f} times as fast in {steps} timed steps."
    assert f"Between {near}, {said}" in readme
    measured = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    table = measured[measured.index("## The demo") :]
    for key, row in (("comm_median_s", "communication, median"), ("comm_max_s", "max")):
        times = (f"{1000 * entry[key]:.0f} ms" for entry in figures["contestants"].values())
        assert f"| {row} | {' | '.join(times)} |" in table
    for form in ("step-times.svg", "step-times-dark.svg"):
        drawn = (ROOT / "docs" / form).read_text(encoding="utf-8")
        assert f"{1000 * ours['comm_median_s']:.0f} · " in drawn


def test_the_picture_of_sizes_and_what_is_said_of_it_are_of_one_run() -> None:
    figures = json.loads((DOCS / "sizes.json").read_text(encoding="utf-8"))["rows"]
    small = [row["exact"] for row in figures if row["kib"] <= 256]
    large = [row["exact"] for row in figures if row["kib"] >= 1024]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = f"{min(small):.1f} to {max(small):.1f} times as fast as Gloo's up to 256 KiB, and"
    assert f"{said} {min(large):.2f} to {max(large):.2f} times from 1 MiB on" in readme


# ---------------------------------------------------------------------------- words

OF_THE_CODE = (
    "design.md",
    "measurements.md",
    "reproduction.md",
    "accuracy.md",
    "lab.md",
    "demo.md",
)
"""Pages that may use the words of the code."""

EVERYDAY = {
    *("arm", "axis", "block", "competition", "course", "early", "ground", "limit", "message"),
    *("place", "refused", "repeat", "replica", "spare", "task", "turn", "way", "way back"),
    *("window", "wire"),
}
"""Words of the code that are everyday words, too."""


def words_of(page: str) -> list[str]:
    """The words that the tables of a page explain, as they stand in their first columns."""
    text = (DOCS / page).read_text()
    section = text[text.index("\n## Words\n") :].split("\n## ")[1]
    cells = re.findall(r"^\| (.+?) \|", section, re.M)
    return [cell for cell in cells if cell not in ("word", "---")]


def test_a_word_stands_in_one_table() -> None:
    words = words_of("concepts.md") + words_of("design.md")
    assert len(words) > 80
    assert sorted(words) == sorted(set(words))


def test_pages_for_users_keep_to_the_words_of_concepts() -> None:
    of_code, of_users = (
        {
            word
            for cell in words_of(page)
            for word in re.split(r"[,;] ", re.sub(r" \(.*?\)", "", cell))
        }
        for page in ("design.md", "concepts.md")
    )
    theirs = sorted(of_code - of_users - EVERYDAY)
    pages = [page for page in DOCS.rglob("*.md") if page.name not in OF_THE_CODE]
    found = [
        f"{page.relative_to(DOCS)}: {word}"
        for page in pages
        for word in theirs
        if re.search(rf"(?<![\w`-]){re.escape(word)}s?(?![\w`-])", page.read_text(), re.I)
    ]
    assert found == []
