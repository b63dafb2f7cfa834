"""Draws the figures of a job for a terminal of any width, with colour or without."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from gradwire.watch.source import DIGITS

BAD, GOOD_TO_KNOW, HEAD = "bold red", "yellow", "bold"
LOSS, AGAIN, QUEUE_S = 0.01, 0.02, 0.005
"""Shares of packets lost and sent again, and seconds in a queue, from which on a row is marked."""
BURST = 3.0
"""How many times the median a step takes, or sends again, where it is marked as a burst."""
OTHERS = 4
"""So many other jobs are named."""
BLOCKS, LETTERS = "▁▂▃▄▅▆▇█", ".:-=+*#@"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        worth: What it is worth where the terminal is narrow; those worth least go first.
        left: Whether it is aligned to the left.
    """

    head: str
    text: Callable[[dict[str, Any]], str]
    worth: int
    left: bool = False


def draw(picture: dict[str, Any], width: int, height: int | None, utf: bool) -> Text:
    """Returns the figures as text."""
    top = [*_head(picture, width), *_lines(picture, width, utf)]
    workers = _table(_WORKERS, picture["workers"], width, _worker_mark)
    room = None if height is None else max(0, height - len(top) - len(workers) - 3)
    paths, steps = picture["paths"], list(reversed(picture["steps"]))
    kept_steps = min(len(steps), 8 if room is None else max(3, room // 2))
    kept_paths = len(paths) if room is None else max(0, min(len(paths), room - kept_steps - 3))
    parts = [top, workers]
    if kept_paths:
        parts.append(_table(_PATHS, paths[:kept_paths], width, _path_mark))
    if len(paths) > kept_paths > 0:
        parts[-1].append(Text(f"  and {len(paths) - kept_paths} other paths, none of them worse"))
    if steps:
        usual = _usual(picture["steps"])
        mark = lambda row: _step_mark(row, usual)  # noqa: E731
        parts.append(_table(_STEPS, steps[:kept_steps], width, mark))
    lines = [line for part in parts for line in [*part, Text("")] if part][:-1]
    for line in lines:
        line.truncate(width)
    out = Text("\n").join(lines if height is None else lines[: max(1, height)])
    return out if utf else Text("\n").join(_ascii(line) for line in out.split("\n"))


def _ascii(line: Text) -> Text:
    """Returns a line for a terminal that shows ASCII alone; it keeps its styles and its length."""
    plain = line.plain.translate(
        {ord("→"): ">", ord("–"): "-", ord("…"): "~", ord("×"): "x", ord("µ"): "u"}
    )
    return Text(plain.encode("ascii", "replace").decode(), spans=line.spans)


def _head(picture: dict[str, Any], width: int) -> Iterator[Text]:
    workers = [each for each in picture["workers"] if not each["name"].startswith("server")]
    policies = sorted({each["policy"] for each in picture["attachments"]}) or ["no attachment"]
    script = f" ({picture['script']})" if picture["script"] else ""
    title = (
        f"gradwire top: job {picture['job'][:DIGITS]}{script}, {', '.join(policies)}, "
        f"{len(workers)} of {picture['workers_of_job']} workers here, "
        f"up {_clock(picture['up_s'])}, {picture['state']}"
    )
    yield from _wrapped(title, width, HEAD)
    if others := picture["others"]:
        count = f"{len(others)} other job{'s' if len(others) > 1 else ''} here"
        named = ", ".join(
            each["job"][:DIGITS] + (f" ({each['script']})" if each["script"] else "")
            for each in others[:OTHERS]
        )
        more = ", …" if len(others) > OTHERS else ""
        typed = f"`gradwire top {others[0]['job'][:DIGITS]}` shows the first"
        yield from _wrapped(f"{count}: {named}{more}; {typed}", width)
    for message in picture["messages"]:
        yield from _wrapped(f"! {message}", width, BAD)


def _wrapped(text: str, width: int, style: str = "") -> Iterator[Text]:
    for line in textwrap.wrap(text, width, subsequent_indent="  "):
        yield Text(line, style)


def _lines(picture: dict[str, Any], width: int, utf: bool) -> Iterator[Text]:
    """Yields the last step in words, and a row of bars for each figure of the last steps."""
    rows = picture["steps"]
    if not rows:
        return
    last = rows[-1]
    known = rows[-2] if len(rows) > 1 else last
    loss = last["loss"]
    told = "" if loss is None else f", loss {loss:.5g}" if isinstance(loss, float) else f", {loss}"
    in_words = (
        f"step {last['step']}: {last['phase']} phase, {last['encoding']}, may lose "
        f"{_share(last['bound'])}, delivered {_share(last['delivered'])}{told}"
    )
    yield from _wrapped(in_words, width)
    if known["step_s"] is not None:
        times = (
            f"{_ms(known['step_s'])} a step: compute {_ms(known['compute_s'])}, wait "
            f"{_ms(known['exposed_s'])}; push {_ms(known['push_s'])}, pull {_ms(known['pull_s'])}"
        )
        yield from _wrapped(times, width)
    bars: tuple[tuple[str, list[float | None], Callable[[float], str]], ...] = (
        ("step time", [each["step_s"] for each in rows], _ms),
        ("lost", [1.0 - each["delivered"] for each in rows], _share),
        ("sent again", [each["again"] for each in rows], _share),
    )
    for name, values, text in bars:
        shown = [each for each in values if each is not None][-max(4, width - 36) :]
        if shown:
            most = max(shown)
            row = _bars(shown, BLOCKS if utf else LETTERS)
            yield Text(f"{name:10} {row} {text(shown[-1])} now, {text(most)} most")


def _bars(values: Sequence[float], signs: str) -> str:
    most = max(values)
    if most <= 0:
        return signs[0] * len(values)
    return "".join(signs[min(7, int(8 * each / most))] for each in values)


def _table(
    columns: Sequence[Column],
    rows: Sequence[dict[str, Any]],
    width: int,
    mark: Callable[[dict[str, Any]], str],
) -> list[Text]:
    """Returns a table's lines; the columns worth least are left out until it fits."""
    if not rows:
        return []
    columns = list(columns)
    cells = {each.head: [each.text(row) for row in rows] for each in columns}
    widths = {head: max(len(head), *map(len, texts)) for head, texts in cells.items()}
    marks = [mark(row) for row in rows]
    marked = max(map(len, marks))

    def needed() -> int:
        return sum(widths[each.head] + 2 for each in columns) - 2 + (marked + 2 if marked else 0)

    while len(columns) > 2 and needed() > width:
        columns.remove(min(columns, key=lambda each: each.worth))

    def line(texts: Sequence[str]) -> str:
        pairs = zip(columns, texts, strict=True)
        fitted = (
            text.ljust(widths[c.head]) if c.left else text.rjust(widths[c.head])
            for c, text in pairs
        )
        return "  ".join(fitted).rstrip()

    lines = [Text(line([each.head for each in columns]), HEAD)]
    for index in range(len(rows)):
        text = Text(line([cells[each.head][index] for each in columns]))
        if marks[index]:
            text.pad_right(needed() - marked - len(text))
            text.append(marks[index])
            text.stylize(GOOD_TO_KNOW)
        lines.append(text)
    return lines


def _rate(value: float) -> str:
    return f"{value / 1e6:.1f}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "…"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _share(value: float | None) -> str:
    if value is None:
        return "–"
    if 0 < value < 0.0005:
        return "<0.1 %"
    return f"{100 * value:.0f} %" if value in (0, 1) else f"{min(100 * value, 99.9):.1f} %"


def _size(value: float) -> str:
    return f"{value / 1e3:.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _name(row: dict[str, Any]) -> str:
    name: str = row["name"]
    more = len(row["ranks"]) - 1
    return f"{name} +{more}" if more > 0 else name


_WORKERS = (
    Column("worker", _name, 99, left=True),
    Column("sent MB/s", lambda row: _rate(row["sent"]), 90),
    Column("got MB/s", lambda row: _rate(row["received"]), 60),
    Column("delivered", lambda row: _share(row["delivered"]), 85),
    Column("lost", lambda row: _share(row["lost"]), 80),
    Column("again", lambda row: _share(row["again"]), 70),
    Column("round trip", lambda row: _ms(row["rtprop_s"]), 65),
    Column("queue", lambda row: _ms(row["queue_s"]), 64),
    Column("window kB", lambda row: _size(row["send_window"]), 30),
    Column("bottleneck MB/s", lambda row: _rate(row["btlbw"]) if row["btlbw"] else "–", 20),
    Column("process", lambda row: str(row["pid"]), 10),
)
_PATHS = (
    Column("path", lambda row: f"{row['from']} → {row['to']}", 99, left=True),
    Column("sent MB/s", lambda row: _rate(row["sent"]), 70),
    Column("got MB/s", lambda row: _rate(row["received"]), 40),
    Column("lost to", lambda row: _share(row["loss_to"]), 90),
    Column("lost from", lambda row: _share(row["loss_from"]), 50),
    Column("again", lambda row: _share(row["again"]), 60),
    Column("round trip", lambda row: _ms(row["round_s"]), 80),
    Column("queue", lambda row: _ms(row["queue_s"]), 65),
    Column("window kB", lambda row: _size(row["window"]), 30),
    Column("waits for it", lambda row: _share(row["waits"]), 55),
)
_STEPS = (
    Column("step", lambda row: str(row["step"]), 99),
    Column("time", lambda row: _ms(row["step_s"]), 90),
    Column("compute", lambda row: _ms(row["compute_s"]), 60),
    Column("wait", lambda row: _ms(row["exposed_s"]), 80),
    Column("push", lambda row: _ms(row["push_s"]), 50),
    Column("pull", lambda row: _ms(row["pull_s"]), 49),
    Column("delivered", lambda row: _share(row["delivered"]), 85),
    Column("again", lambda row: _share(row["again"]), 70),
    Column("phase", lambda row: row["phase"], 40, left=True),
    Column("encoding", lambda row: row["encoding"], 30, left=True),
)


def _worker_mark(row: dict[str, Any]) -> str:
    if row["state"]:
        return f"! {row['state']}"
    return "! loss" if row["lost"] >= LOSS else "! sent again" if row["again"] >= AGAIN else ""


def _path_mark(row: dict[str, Any]) -> str:
    if max(row["loss_to"], row["loss_from"]) >= LOSS:
        return "! loss"
    if row["again"] >= AGAIN:
        return "! sent again"
    return "! queue" if row["queue_s"] >= QUEUE_S else ""


def _usual(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Returns the medians of a step's time, of what went again, and of what was lost."""
    times = [each["step_s"] for each in rows if each["step_s"] is not None]
    again = statistics.median(each["again"] for each in rows)
    delivered = statistics.median(each["delivered"] for each in rows)
    return statistics.median(times or [0.0]), again, 1.0 - delivered


def _step_mark(row: dict[str, Any], usual: tuple[float, float, float]) -> str:
    """Marks a step that the guard acted on, or in which a burst passed."""
    if row["guard"]:
        return f"! {row['guard']}"
    time_s, again, lost = usual
    more_again = row["again"] >= max(AGAIN, BURST * again)
    if more_again or 1.0 - row["delivered"] >= max(LOSS, BURST * lost):
        return "! burst"
    return "! slow" if row["step_s"] is not None and row["step_s"] > BURST * time_s > 0 else ""
