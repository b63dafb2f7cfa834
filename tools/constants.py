"""Runs the engine with each constant of congestion control and recovery halved and doubled.

    python tools/constants.py                          # all constants
    python tools/constants.py --only delay_window      # those whose name contains this
    python tools/constants.py --groups far known       # on these kinds of networks alone
    python tools/constants.py --set KEY=VALUE …        # these values together

The constants are those that tools/engine_counts.py counts. A copy of the engine is built in which
each of them reads its value from the environment. Quick networks of `gradwire bench networks` run
in virtual time with one constant changed. Of a factor near 1 its difference from 1 is halved and
doubled. A second seed shows how far figures lie apart by chance.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from engine_counts import PROTO, ROOT, counted_places, name_of

BUILD = ROOT / "build" / "constants"
PREFIX = "GRADWIRE_CONSTANT_"
Rows = dict[str, dict[str, Any]]
TUNED = """
#pragma once
#include <cstdlib>
#include <string>
namespace gradwire {
// The value of a constant in the environment, or its own.
template <class T>
T tuned(const char* name, T own) {
  const char* set = std::getenv((std::string("GRADWIRE_CONSTANT_") + name).c_str());
  return set ? static_cast<T>(std::atof(set)) : own;
}
}  // namespace gradwire
"""


class Tuned(NamedTuple):
    """A constant of the copy.

    Attributes:
        key: Its name in the environment.
        value: Its literal.
        whole: It is a whole number.
    """

    key: str
    value: float
    whole: bool

    @property
    def changed(self) -> tuple[float, float]:
        """Half and twice."""
        if self.whole:
            return float(max(1, int(self.value) // 2)), 2 * self.value
        if 0.5 < self.value < 2:
            return 1 + (self.value - 1) / 2, 1 + 2 * (self.value - 1)
        return self.value / 2, 0.75 if self.value == 0.5 else 2 * self.value


# ---------------------------------------------------------------------------- the copy


def copy_of_engine(folder: Path) -> list[Tuned]:
    """Write a copy of the sources whose constants can be set, and return these."""
    ignored = shutil.ignore_patterns("tests", "fuzz", "__pycache__")
    shutil.copytree(ROOT / "engine", folder / "engine", ignore=ignored, dirs_exist_ok=True)
    for name in ("CMakeLists.txt", "src/gradwire/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    proto = folder / PROTO
    (proto / "base" / "tuned.h").write_text(TUNED, encoding="utf-8")
    found = []
    for path in sorted(each for each in proto.rglob("*") if each.suffix in (".h", ".cc")):
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        tuned = list(_tune(path.relative_to(proto).as_posix(), lines))
        found += tuned
        changed = "\n".join(map(_variable, lines))
        if tuned:
            changed = changed.replace("#include", '#include "proto/base/tuned.h"\n#include', 1)
        if changed != text:
            path.write_text(changed, encoding="utf-8")
    return found


def _tune(file: str, lines: list[str]) -> Iterator[Tuned]:
    """Let the constants of a file read the environment."""
    for at, start, end, value in counted_places(file, "\n".join(lines))[::-1]:
        line, literal = lines[at], lines[at][start:end]
        name = name_of(line) or f"{at + 1}_{start}"
        if (field := re.match(r"^\s*(?:[\w:]+ |.*\.)(\w+) = ", line)) and not name_of(line):
            name = f"{field[1]}{'_long' if '.' in line[: field.end(1)] else ''}"
        key = f"{Path(file).stem}__{name}"
        own = f'gradwire::tuned("{key}", {literal})'
        if name[0].isdigit():
            own = f"([] {{ static const auto own = {own}; return own; }}())"
        lines[at] = line[:start] + own + line[end:]
        whole = bool(re.fullmatch(r"[\d'uUlL]+", literal))
        yield Tuned(key, value, whole)


def _variable(line: str) -> str:
    """Return a line whose constant is computed when the engine is loaded."""
    if not re.search(r"\bconstexpr [\w:<>, ]+ k[A-Z]\w*(?: = |\{)", line) or "[]" in line:
        return line
    if "static constexpr" in line:
        return line.replace("static constexpr", "static inline const")
    return line.replace("constexpr", "const")


def build() -> Path:
    """Build the copy, and return its module."""
    source, objects = BUILD / "source", BUILD / "objects"
    tools = Path(sys.executable).parent
    configure: list[str | Path] = [tools / "cmake", "-S", source, "-B", objects, "-G", "Ninja"]
    configure += ["-DGRADWIRE_WERROR=OFF", "-DCMAKE_CXX_FLAGS=-Wno-narrowing"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={tools}/ninja"]
    jobs = os.environ.get("JOBS", str(os.cpu_count()))
    compile_: list[str | Path] = [tools / "cmake", "--build", objects, "-j", jobs]
    for command in (configure, compile_):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout[-4000:] + done.stderr[-4000:])
    return next(objects.glob("_engine*.so"))


# ---------------------------------------------------------------------------- the networks


def situations(groups: Collection[str] = ()) -> list[Any]:
    """Return the networks on which the constants are tried: quick ones of each kind, or of some."""
    from gradwire_lab.bench.network_groups import GROUPS

    wanted = {
        "grid": (
            "0.1 Gbit/s, 4 ranks, uplinks x 10, queue 16 KiB",
            *(
                f"1 Gbit/s, {ranks} ranks, uplinks x {uplinks}, queue {queue} KiB"
                for ranks, uplinks, queue in (
                    *((2, 10, 32), (2, 10, 122), (4, 1, 16), (4, 10, 32), (4, 10, 122)),
                    *((8, 1, 41), (8, 10, 122)),
                )
            ),
        ),
        "policers": ("out, 2 ranks", "in, 2 ranks"),
        "incast": ("push of 16",),
        "far": ("",),
        "sites": (
            *("40 ms, queue 256 KiB, loss 0%", "40 ms, queue 4 MiB, loss 1%"),
            *("40 ms, queue 256 KiB, loss 5%", "100 ms, queue 4 MiB, loss 0%"),
        ),
        "known": (
            *("A, 2 ranks, 1 MB", "A, 4 ranks, 0.064 MB", "A, 8 ranks, 1 MB", "A, push"),
            *("B, 2 ranks, 2 MB", "B, 4 ranks, 2 MB", "B, 4 ranks, bursts", "B, 4 ranks, steady"),
            *("loss", "1 ms late", "marks", "10 Gbit/s, 4 ranks"),
        ),
        "rates": ("",),
    }
    chosen = [
        each
        for group, names in wanted.items()
        for each in GROUPS[group]()
        if any(name in f"{each.group} {each.name}" for name in names)
    ]
    return [each for each in (*chosen, yielding()) if not groups or each.group in groups]


def yielding() -> Any:
    """Return a job beside four flows of TCP, for a shorter time than the judge has."""
    from dataclasses import replace

    from gradwire_lab.bench import network_scenes

    play = partial(network_scenes._beside_flows, 4, seconds=6.0)
    return replace([*network_scenes.tcp()][1], name="A, 4 ranks beside 4 TCP", play=play)


def figures(module: Path, groups: Collection[str], seeds: int) -> Rows:
    """Run all situations on an engine, in this process, each with so many seeds."""
    import importlib.util

    import gradwire

    found = importlib.util.spec_from_file_location("gradwire._engine", str(module))
    assert found is not None
    assert found.loader is not None
    engine = importlib.util.module_from_spec(found)
    sys.modules["gradwire._engine"] = engine
    found.loader.exec_module(engine)
    vars(gradwire)["_engine"] = engine
    rows: Rows = {}
    for each in situations(groups):
        for seed in range(seeds):
            try:
                rows[f"{each.name} #{seed}"] = each.figures(seed)
            except ValueError as error:
                rows[f"{each.name} #{seed}"] = {"failure": str(error)}
    return rows


def run(
    module: Path, values: Mapping[str, float], groups: Collection[str] = (), seeds: int = 2
) -> Rows:
    """Run all situations in a process of its own, with these constants; none where it fails.

    It is a fork, since torch takes longer to import than a quick network to run.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        os.environ.update({f"{PREFIX}{key}": repr(value) for key, value in values.items()})
        sender.send(figures(module, groups, seeds))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        rows: Rows = receiver.recv()
    except EOFError:
        rows = {}
    process.join()
    return rows


def compare(before: Rows, after: Rows) -> dict[str, Any]:
    """Return the mean change of times and drops, and the situations that change most."""
    both = [
        name for name in before if not {"failure"} & {*before[name], *after.get(name, ["failure"])}
    ]
    times: dict[str, list[float]] = {}
    drops: dict[str, list[float]] = {}
    for name in both:
        was, now, place = before[name], after[name], name.split(" #")[0]
        for key in ("time", "regain_halved", "regain_doubled", "losses"):
            if was.get(key, 0) > 0 and now[key] > 0:
                times.setdefault(f"{key}: {place}", []).append(math.log(now[key] / was[key]))
        drops.setdefault(place, []).append(now.get("drops", 0) - was.get("drops", 0))
    ops = [mean(values) for name, values in times.items() if name.startswith("time")]
    by_time = sorted((math.expm1(mean(values)), name) for name, values in times.items())
    by_drops = sorted((mean(values), name) for name, values in drops.items())
    return {
        "same": sum(before[name] == after.get(name) for name in before),
        "of": len(before),
        "failed": len(before) - len(both),
        "time": math.expm1(mean(ops)) if ops else math.nan,
        "drops": mean(map(mean, drops.values())) if drops else math.nan,
        "most": [by_time[-1], by_time[0], by_drops[-1], by_drops[0]] if both else [],
    }


def of_another_seed(rows: Rows) -> dict[str, Any]:
    """Return what one seed more changes: how far figures lie apart by chance."""
    first = {name: row for name, row in rows.items() if name.endswith("#0")}
    second = {name.replace("#1", "#0"): row for name, row in rows.items() if name.endswith("#1")}
    return compare(first, second)


# ---------------------------------------------------------------------------- what is said


def text_of(name: str, row: Mapping[str, Any]) -> str:
    """Return a line about a change."""
    places = "; ".join(f"{change:+.1%} {place}" for change, place in row["most"])
    return (
        f"{name:60}{row['same']:3} of {row['of']} the same, time {row['time']:+.1%}, "
        f"drops {row['drops']:+.2%}, failed {row['failed']}; {places}"
    )


IN_WORDS = {
    "time": "",
    "losses": "losses: ",
    **{
        f"regain_{way}": f"seconds until a rate that has {way} is used: "
        for way in ("halved", "doubled")
    },
}
"""What figures of networks are called in the table."""


def table_of(trials: Mapping[str, Sequence[tuple[float, Mapping[str, Any]]]]) -> str:
    """Return a table in Markdown: of each constant its values with what each comes to."""
    of = next(iter(trials.values()))[0][1]["of"]
    lines = [
        f"| constant and value | changed to | same of {of} | time | drops | most | least |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, rows in trials.items():
        for value, row in rows:
            most, least = row["most"][:2]
            lines.append(
                f"| `{key.replace('__', ': ')}` | {value:g} | {row['same']} | {row['time']:+.1%} "
                f"| {row['drops']:+.2%} | {_change(*most)} | {_change(*least)} |"
            )
    return "\n".join(lines) + "\n"


def _change(change: float, place: str) -> str:
    figure, name = place.split(": ", 1)
    return "–" if abs(change) < 0.0005 else f"{change:+.0%} {IN_WORDS[figure]}{name}"


def main() -> None:
    """Print what half and twice of each constant change."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="constants whose key contains this")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--groups", nargs="+", default=[], help="kinds of networks: grid, far, …")
    parser.add_argument("--seeds", type=int, choices=(1, 2), default=2)
    parser.add_argument("--table", type=Path, help="write a table in Markdown there")
    arguments = parser.parse_args()
    import gradwire_lab.bench.network_groups  # noqa: F401  # for all forks

    constants = copy_of_engine(BUILD / "source")
    try_out = partial(run, build(), groups=arguments.groups, seeds=arguments.seeds)
    base = try_out({})
    if arguments.set:
        values = dict(each.split("=") for each in arguments.set)
        if unknown := values.keys() - {each.key for each in constants}:
            parser.error(f"--set: {', '.join(sorted(unknown))} is no constant")
        numbers = {key: float(value) for key, value in values.items()}
        print(text_of(" ".join(arguments.set), compare(base, try_out(numbers))))
        return
    if arguments.seeds > 1:
        print(text_of("another seed", of_another_seed(base)), flush=True)
    trials = [
        (each, value) for each in constants if arguments.only in each.key for value in each.changed
    ]
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(try_out, {each.key: value}) for each, value in trials]
        for (each, value), future in zip(trials, running, strict=True):
            name = f"{each.key} {each.value:g} -> {value:g}"
            row = compare(base, future.result())
            found.setdefault(f"{each.key} {each.value:g}", []).append((value, row))
            print(text_of(name, row), flush=True)
    if arguments.table:
        arguments.table.write_text(table_of(found), encoding="utf-8")


if __name__ == "__main__":
    main()
