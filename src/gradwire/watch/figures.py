"""Makes the figures of a job that people are shown, from what its processes have answered."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

from gradwire.watch.source import Process, Watched

VERSION = 1
"""The version of the keys that `gradwire top --json` prints."""
SHOWN_STEPS = 40
"""How many steps a picture has."""
SILENT_S = 2.0
"""From when on a process that does not answer, or a step that waits, is worth a line."""
LATE = 0.05
"""From which share of the time on others wait for a worker so that it is named as a straggler."""


def picture(watched: Watched) -> dict[str, Any]:
    """Returns all figures of a job as JSON takes them; times in seconds, rates in bytes/s."""
    heard = watched.heard
    workers = [_worker(process, engine) for process, engine in _engines(heard)]
    paths = [_path(*pair, path) for pair in _engines(heard) for path in pair[1]["paths"]]
    paths.sort(key=_badness, reverse=True)
    rows = _steps(heard)
    late = _late(paths)
    first = heard[0].now if heard else {}
    return {
        "version": VERSION,
        "job": watched.job,
        "script": first.get("script", ""),
        "host": first.get("host", ""),
        "others": [{"job": each.number, "script": each.script} for each in watched.others],
        "at": time.time(),
        "up_s": max((each.now["at"] - each.now["started"] for each in heard), default=0.0),
        "over_s": _span(heard[0]) if heard else 0.0,
        "workers_of_job": max((each["of"] for each in workers), default=0),
        "attachments": [
            {key: each[key] for key in ("number", "policy", "ranks")}
            for each in (heard[0].now["attachments"] if heard else ())
        ],
        "state": _state(watched, heard),
        "messages": list(_messages(watched, heard, rows, late)),
        "stragglers": late,
        "workers": workers,
        "paths": paths,
        "steps": rows,
        **{key: sum(each.now[key] for each in heard) for key in _COSTS},
    }


_COSTS = ("keeping_s", "answering_s", "processor_s")
"""Processor time of the job: to keep steps, to answer looks, and in all."""


def _engines(heard: Iterable[Process]) -> Iterator[tuple[Process, dict[str, Any]]]:
    for process in heard:
        for engine in process.now["engines"]:
            yield process, engine


def _earlier(process: Process, engine: dict[str, Any]) -> dict[str, Any]:
    for each in process.before["engines"] if process.before else ():
        if (each["name"], each["group"]) == (engine["name"], engine["group"]):
            found: dict[str, Any] = each
            return found
    return {}


def _span(process: Process) -> float:
    """Returns the seconds that rates are taken over: since the answer before, or the start."""
    now, before = process.now, process.before
    since: float = now["at"] - now["started"]
    return max(1e-6, now["clock"] - before["clock"] if before else since)


def _rates(now: dict[str, Any], before: dict[str, Any], span: float) -> dict[str, float]:
    grown = {name: now[name] - before.get(name, 0) for name in _TOTALS}
    packets = max(1, grown["packets_sent"])
    return {
        "sent": grown["bytes_sent"] / span,
        "received": grown["bytes_received"] / span,
        "again": min(1.0, grown["retransmissions"] / packets),
        "lost": min(1.0, grown["declared_lost"] / packets),
    }


_TOTALS = ("packets_sent", "bytes_sent", "bytes_received", "retransmissions", "declared_lost")


def _worker(process: Process, engine: dict[str, Any]) -> dict[str, Any]:
    counters = engine["counters"]
    attachments = process.now["attachments"]
    steps = process.steps[attachments[0]["id"]] if attachments else ()
    last: dict[str, Any] = steps[-1] if steps else {}
    return {
        "name": engine["name"],
        "ranks": attachments[0]["ranks"] if attachments else [],
        "of": engine["workers"],
        "pid": process.now["pid"],
        "host": process.now["host"],
        "state": "ended" if process.gone else "failed" if engine["failure"] else "",
        **_rates(counters, _earlier(process, engine).get("counters", {}), _span(process)),
        "rtprop_s": counters["rtprop_ns"] / 1e9,
        "queue_s": counters["queue_delay_ns"] / 1e9,
        "btlbw": counters["btlbw"],
        "send_window": counters["send_window"],
        "receive_window": counters["receive_window"],
        "delivered": last.get("delivered"),
        "step": last.get("step"),
    }


def _path(process: Process, engine: dict[str, Any], path: dict[str, Any]) -> dict[str, Any]:
    before = _earlier(process, engine).get("paths", ())
    earlier: dict[str, Any] = next((each for each in before if each["peer"] == path["peer"]), {})
    span = _span(process)
    return {
        "from": engine["name"],
        "to": path["peer"],
        **_rates(path, earlier, span),
        "loss_to": path["loss_to"],
        "loss_from": path["loss_from"],
        "rtprop_s": path["rtprop_ns"] / 1e9,
        "round_s": path["round_ns"] / 1e9,
        "queue_s": path["queue_to_ns"] / 1e9,
        "window": path["window"],
        "in_flight": path["in_flight"],
        "waits": min(1.0, (path["waited_ns"] - earlier.get("waited_ns", 0)) / 1e9 / span),
        "silence_s": path["silence_s"],
    }


def _badness(path: dict[str, Any]) -> tuple[float, ...]:
    return (
        *(round(max(path["loss_to"], path["loss_from"]), 3), round(path["again"], 3)),
        *(round(path["waits"], 2), path["queue_s"], path["round_s"]),
    )


def _steps(heard: list[Process]) -> list[dict[str, Any]]:
    """Returns the last steps of the first attachment, of all its workers that answer here.

    Times are those of the first worker. What was delivered and lost is that of the worker that
    lost most.
    """
    chains = []
    for process in heard:
        attachments = process.now["attachments"]
        if attachments:
            steps = process.steps[attachments[0]["id"]]
            chains.append({each["step"]: each for each in steps})
    if not chains:
        return []
    rows = []
    for number in chains[0]:
        same = [chain[number] for chain in chains if number in chain]
        own, following = chains[0][number], chains[0].get(number + 1)
        whole = following["period_s"] if following else None
        packets = max(1, sum(each["packets"] for each in same))
        lost: dict[str, float] = {}
        for each in same:
            for name, share in each["lost"].items():
                lost[name] = max(share, lost.get(name, 0.0))
        row = {key: value for key, value in own.items() if key != "period_s"}
        row.update(
            step_s=whole,
            compute_s=None if whole is None else max(0.0, whole - own["exposed_s"]),
            delivered=min(each["delivered"] for each in same),
            again=sum(each["retransmissions"] for each in same) / packets,
            lost=lost,
        )
        rows.append(row)
    return rows


def _late(paths: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the workers that others wait for longer than usual, the latest first."""
    waits: dict[str, float] = {}
    for path in paths:
        waits[path["to"]] = max(path["waits"], waits.get(path["to"], 0.0))
    usual = statistics.median_low(waits.values()) if waits else 0.0
    least = max(LATE, 2 * usual)
    late = sorted(((share, name) for name, share in waits.items() if share >= least), reverse=True)
    return [{"name": name, "waits": share} for share, name in late]


def _state(watched: Watched, heard: list[Process]) -> str:
    if all(each.gone for each in watched.processes.values()):
        return "ended"
    if any(engine["failure"] for _, engine in _engines(heard)):
        return "failed"
    now = time.monotonic()
    silent = [_silent(each, now) for each in watched.processes.values() if not each.gone]
    return "silent" if silent and all(silent) else "running"


def _silent(process: Process, now: float) -> bool:
    unheard = not (process.now or process.unread)
    return not process.gone and (unheard or now - process.heard > SILENT_S)


def _messages(
    watched: Watched,
    heard: list[Process],
    rows: list[dict[str, Any]],
    late: list[dict[str, Any]],
) -> Iterator[str]:
    """Yields what is worth a line, the gravest first."""
    now = time.monotonic()
    for _, engine in _engines(heard):
        if engine["failure"]:
            yield f"{engine['name']} has failed: {engine['failure']}"
    for process in watched.processes.values():
        if process.strange and not process.gone:
            yield (
                f"process {process.number} is not shown: it is starting, or this gradwire does not "
                "know the form of its answer"
            )
        if not _silent(process, now):
            continue
        names = ", ".join(each["name"] for _, each in _engines([process] if process.now else []))
        who = names or "a process"
        yield (
            f"{who} (process {process.number}) has not answered for {now - process.heard:.0f} s: "
            "it is stopped, or this host is overloaded; its figures are old"
        )
    for _, engine in _engines(heard):
        waits = engine["waits"]
        if waits and waits["seconds"] >= SILENT_S:
            whom = ", ".join(waits["for"]) or "packets of others"
            yield (
                f"{engine['name']} has waited for {waits['seconds']:.0f} s in step "
                f"{waits['step']} for {whom}"
            )
    if rows and heard:
        pause = heard[0].now["at"] - rows[-1]["at"]
        usual = [each["step_s"] for each in rows if each["step_s"] is not None]
        if pause > max(5.0, 10 * statistics.median(usual or [0.0])):
            yield f"no step has ended for {pause:.0f} s"
    elif heard and heard[0].now["attachments"]:
        yield "no step has ended yet"
    if late:
        shares = ((each["name"], 100 * each["waits"]) for each in late[:4])
        named = ", ".join(f"{name} ({share:.0f} % of the time)" for name, share in shares)
        yield f"others wait for {named} to begin"
    ended = [engine["name"] for each, engine in _engines(heard) if each.gone]
    if ended:
        yield f"ended: {', '.join(ended)}"
