"""Counts the constants of congestion control and recovery, and the lines of engine/proto.

    python tools/engine_counts.py                    # of this working tree
    python tools/engine_counts.py 551a2c4 main       # of commits
    python tools/engine_counts.py --list             # with each constant in its line

A constant is a literal in the code of the folders congestion, recovery and credit, and a named
one in the files elsewhere that hold rules of theirs. 0, 1 and 2 are none, nor are factors between
units, such as 1e9. Sizes of rings bound memory, and are counted apart. Code lines are those that
are neither blank nor a comment.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROTO = "engine/proto"
FOLDERS = ("congestion", "credit", "port", "recovery")
"""Every literal of these folders is a constant of congestion control and recovery."""
OTHER_FOLDERS = ("base", "op", "plan", "pull", "push")
"""Folders without rules of theirs; of all further ones the named constants count."""
OTHER_FILES = {
    *("farewell", "liveness", "messages", "op", "op_memory", "ops", "passes", "path_limit"),
    *("priority", "results", "silence", "waits"),
}
OTHER_NAMES = {
    *("kOpsAhead", "kMostEncoded", "kTailShare", "kLongestReport", "kLongestError", "kMaxSegments"),
    *("kMaxBytes", "kStatSlots", "kLaneBits", "datagram_bytes", "peer_timeout", "ping_interval"),
    *("kMostFrames", "kTrialInterval", "receive_buffer", "memory_limit", "timeout"),
}
"""Files and constants of memory, texts, sizes, liveness and the close rule."""
ANYWHERE = {"delay_target"}
"""Constants that count wherever they stand."""
RINGS = {
    ("received_packets", "kWindow"),
    ("sent_packets", "kMost"),
    ("sent_packets", "kFirst"),
    ("recovery", "kHistory"),
}
SMALL = {0.0, 1.0, 2.0}
UNITS = {1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9, 1024.0}
"""Factors between units where they stand in an expression; alone, a value is a constant."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"')
_NUMBER = re.compile(
    r"(?<![\w.'])(?:0[xX][0-9a-fA-F']+|(?:\d[\d']*\.?[\d']*|\.\d[\d']*)(?:[eE][+-]?\d+)?)"
    r"[fFuUlLzZ]*"
)
_WORD_OF_BITMAP = re.compile(r"\b\w+(?:\{\w+\})? [*/%] 64\b")
_SHIFTED = re.compile(r"<< \d+")
_CODEPOINT = re.compile(r"^enum \w*Codepoint\b.*$", re.M)
_NAMED = re.compile(r"\b(?:constexpr|const) [\w:<>, ]*?\b(k[A-Z]\w*)(?: = |\{)|^\w[\w:]* (\w+) = ")


class Constant(NamedTuple):
    """A literal, and where it stands."""

    file: str
    line: str
    value: float


class Counts(NamedTuple):
    """What was counted."""

    constants: list[Constant]
    rings: list[Constant]
    named: int
    lines: int
    endpoint_lines: int
    methods: int


def code_of(text: str) -> str:
    """Return C++ without comments; each line stays in its place."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    return "\n".join(line.rstrip() for line in _COMMENT.sub(blank, text).split("\n"))


def lines_of(code: str) -> int:
    """Return the number of lines that are not blank."""
    return sum(1 for line in code.split("\n") if line.strip())


def places(line: str) -> Iterator[tuple[int, int, float]]:
    """Yield where the literals of a line of code stand that are constants, and their values.

    A shift by bits that makes a number of KiB, and the bits of a word of a bitmap, are units.
    """
    plain = line
    for unit in (_TEXT, _SHIFTED, _WORD_OF_BITMAP):
        plain = unit.sub(lambda match: " " * len(match[0]), plain)
    factor = bool(re.search(r"[*/<>,+]", plain)) and not re.search(r"= [\d.e'-]+;", plain)
    for match in _NUMBER.finditer(plain):
        text = match[0].rstrip("fFuUlLzZ").replace("'", "")
        value = float(int(text, 16)) if text[:2] in ("0x", "0X") else float(text)
        if value not in SMALL and not (factor and value in UNITS):
            yield match.start(), match.end(), value


def literals(line: str) -> Iterator[float]:
    """Yield the literals of a line of code that are constants."""
    for _, _, value in places(line):
        yield value


def name_of(line: str) -> str:
    """Return the name of the constant or field that a line declares; "" for none."""
    found = _NAMED.search(line.strip())
    return (found[1] or found[2] or "") if found else ""


def methods_of(code: str) -> int:
    """Return the number of methods that Endpoint::Impl declares, or Endpoint where it has none."""
    for head in (r"\bstruct Endpoint::Impl\b[^;{]*\{", r"\bclass Endpoint\b[^;{]*\{"):
        if found := re.search(head, code):
            text = _outside_braces(code[found.end() :])
            return sum(1 for each in text.split(";") if re.match(r"[^=(]*\w\(", each.strip()))
    return 0


def _outside_braces(text: str) -> str:
    """Return the text up to the brace that closes it, with what stands in braces as ";"."""
    depth = 0
    kept: list[str] = []
    for letter in text:
        if letter == "}":
            depth -= 1
            if depth < 0:
                break
        elif letter == "{":
            depth += 1
            kept.append(" " if depth > 1 or "".join(kept).rstrip().endswith("=") else ";")
        elif depth == 0:
            kept.append(letter)
    return "".join(kept)


def count(files: Mapping[str, str]) -> Counts:
    """Count in the files of engine/proto, whose paths are below that folder."""
    constants: list[Constant] = []
    rings: list[Constant] = []
    named = lines = endpoint = methods = 0
    for path, text in sorted(files.items()):
        folder, stem, code = path.split("/")[0], Path(path).stem, code_of(text)
        lines += lines_of(code)
        if folder == "endpoint":
            endpoint += lines_of(code)
            methods = max(methods, methods_of(code))
        for line in _CODEPOINT.sub("", code).split("\n"):
            name = name_of(line)
            if not _counts(path, line):
                continue
            found = [Constant(path, line.strip(), value) for value in literals(line)]
            ring = (stem, name) in RINGS
            (rings if ring else constants).extend(found)
            named += bool(name.startswith("k") and not ring)
    return Counts(constants, rings, named, lines, endpoint, methods)


def counted_places(path: str, text: str) -> list[tuple[int, int, int, float]]:
    """Return line, begin, end and value of the constants of a file, sizes of rings left out."""
    code = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    code = _CODEPOINT.sub("", code)
    return [
        (at, *place)
        for at, line in enumerate(code.split("\n"))
        if _counts(path, line) and (Path(path).stem, name_of(line)) not in RINGS
        for place in places(line)
    ]


def _counts(path: str, line: str) -> bool:
    """Return whether the literals of a line count where it stands in a file."""
    folder, name = path.split("/")[0], name_of(line)
    if line.startswith("#"):
        return False
    if folder in FOLDERS:
        return True
    if folder in OTHER_FOLDERS or Path(path).stem in OTHER_FILES:
        return name in ANYWHERE
    return bool(name) and name not in OTHER_NAMES


def files_at(commit: str | None) -> dict[str, str]:
    """Return the sources of engine/proto by path, at a commit or as they stand."""
    if commit is None:
        folder = ROOT / PROTO
        return {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in folder.rglob("*")
            if path.suffix in (".h", ".cc")
        }
    paths = _git("ls-tree", "-r", "--name-only", commit, "--", PROTO).split()
    return {
        path.removeprefix(f"{PROTO}/"): _git("show", f"{commit}:{path}")
        for path in paths
        if path.endswith((".h", ".cc"))
    }


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print the counts of each commit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commits", nargs="*")
    parser.add_argument("--list", action="store_true", help="print each constant in its line")
    arguments = parser.parse_args()
    for commit in arguments.commits or [None]:
        found = count(files_at(commit))
        print(
            f"{commit or 'here'}: {len(found.constants)} constants of congestion control and "
            f"recovery, {len(found.rings)} sizes of rings; {found.named} of them have names, "
            f"values of 0 to 2 included; proto {found.lines} code lines, endpoint "
            f"{found.endpoint_lines}, {found.methods} methods"
        )
        if arguments.list:
            for kind, each in (("", found.constants), (" (ring)", found.rings)):
                for constant in each:
                    print(f"  {constant.file}: {constant.value:g}{kind}: {constant.line}")


if __name__ == "__main__":
    main()
