"""The demo's result is put into words: the headline, and notes on what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire_lab.demo.scenario import TAIL_STEPS
from gradwire_lab.report.words import NONE, share

Document = Mapping[str, Any]

_ENOUGH_STEPS = 50
_CLEAR_STEPS = 5
"""Steps of each that tell two contestants apart where all of one are shorter than any other."""
_MOST = 0.5
"""Share of the timed steps above which a contestant counts as one that compresses."""
_OURS = ("adaptive", "dblp", "reliable")
"""gradwire's contestants in the order in which the headline prefers them."""


def milliseconds(seconds: float | None) -> str:
    """Return a time as people read it; a dash where there is none."""
    return NONE if seconds is None else f"{seconds * 1000:.0f} ms"


def number(value: float | None) -> str:
    """Return a loss as people read it; a word where it is none."""
    return "diverged" if value is None else f"{value:.3f}"


def contestant(document: Document, name: str) -> Mapping[str, Any] | None:
    """Return a contestant's part of the document; None if it had no turn."""
    for entry in document["contestants"]:
        if entry["name"] == name:
            found: Mapping[str, Any] = entry
            return found
    return None


def against_gloo(document: Document, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a contestant of gradwire's with those of Gloo's.

    Returns:
        ``speed_over``: its steps per second over those of each of Gloo's contestants, by name.
        ``peer``: the one of these that sends alike: half precision, if the contestant compressed
        most of its timed steps, else single precision; None if that one takes no part.
    """
    if entry["policy"] is None:
        return {"speed_over": {}, "peer": None}
    gloo = [each for each in document["contestants"] if each["policy"] is None]
    alike = [each["name"] for each in gloo if _compresses(each) == _compresses(entry)]
    return {
        "speed_over": {each["name"]: entry["steps_per_s"] / each["steps_per_s"] for each in gloo},
        "peer": alike[0] if alike else None,
    }


def _compresses(entry: Mapping[str, Any]) -> bool:
    return (entry["compressed_share"] or 0.0) > _MOST


def headline(document: Document) -> str:
    """Return one sentence with what matters most."""
    if document["error"]:
        return _early(document)
    if _is_far(document):
        return _far_headline(document)
    if document["mode"] != "loopback" and (few := _few_steps(document)) is not None:
        far = document["far"]
        works = far is None or far["error"] is None
        return f"Everything works, but {few[0].lower()}{few[1:]}" if works else few
    compared = _compared(document)
    if not compared:
        return _uncompared(document["contestants"])
    ours = compared[0]
    peer = _peer(document, ours)
    losses = f"{number(ours['final_loss'])} against {number(peer['final_loss'])}"
    if document["mode"] == "loopback":
        dropped = share(document["scenario"]["drop_rate"])
        return (
            f"On loopback {ours['label']} trains with {dropped} of its packets dropped to a "
            f"held-out loss of {losses} over TCP, which loses none."
        )
    return (
        f"Over {ours['label']} the model trains {_faster(document, ours)} while the network "
        f"bursts, to a held-out loss of {losses}."
    )


def _is_far(document: Document) -> bool:
    return document["mode"] != "loopback" and bool(document["scenario"]["round_trip_s"])


def _early(document: Document) -> str:
    """Return what ended a demo early and, where a rank was late, whether the machine may be why."""
    far, machine = bool(document["scenario"]["round_trip_s"]), document["machine"]
    said = f"The demo ended early{', in its far case' if far else ''}: {document['error']}"
    if not document["late"]:
        return said
    busy = machine["load"] > document["scenario"]["ranks"] + machine["cores"]
    alone = " `gradwire demo --case far` tries this case alone;" if far else ""
    return (
        f"{said.rstrip('.')}. The machine's load was {machine['load']:.0f} on {machine['cores']} "
        f"processors{', which is probably why' if busy else ''}.{alone} `gradwire demo --quick` "
        "takes half a minute."
    )


def _far_headline(document: Document) -> str:
    """Return what a step waits for over gradwire and over TCP, where that is beyond doubt."""
    ours = [entry for name in _OURS if (entry := contestant(document, name)) is not None]
    gloo = [entry for entry in document["contestants"] if entry["policy"] is None]
    if not ours or not gloo:
        return _uncompared(document["contestants"])
    mine, peer = ours[0], max(gloo, key=lambda entry: float(entry["steps_per_s"]))
    if not _clear(mine, peer):
        return f"Over {_path(document)} everything works, but too few steps were timed to compare."
    return (
        f"Over {_path(document)} the model trains {mine['speed_over'][peer['name']]:.1f} times as "
        f"fast over {mine['label']} as over {peer['label']}: a step waits "
        f"{milliseconds(mine['comm_median_s'])} and {milliseconds(peer['comm_median_s'])} for its "
        f"gradients, the medians of {mine['timed_steps']} steps."
    )


def _clear(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two contestants can be compared: by many steps, or by few that lie apart."""
    fewest = min(one["timed_steps"], other["timed_steps"])
    times = [[s["comm"] for s in entry["series"] if s["timed"]] for entry in (one, other)]
    apart = any(max(a) < min(b) for a, b in (times, times[::-1]) if a and b)
    return fewest >= _ENOUGH_STEPS or (fewest >= _CLEAR_STEPS and apart)


def _path(document: Document) -> str:
    scenario = document["scenario"]
    return (
        f"a path with a round trip of {milliseconds(scenario['round_trip_s'])} and "
        f"{share(scenario['loss'])} of loss"
    )


def _compared(document: Document) -> list[Mapping[str, Any]]:
    """Return gradwire's contestants whose peer takes part, the one of the headline first."""
    ours = [contestant(document, name) for name in _OURS]
    return [entry for entry in ours if entry is not None and entry["peer"] is not None]


def _few_steps(document: Document) -> str | None:
    """Return a sentence where there are too few steps to compare times by."""
    fewest = min((entry["timed_steps"] for entry in document["contestants"]), default=0)
    if fewest >= _ENOUGH_STEPS:
        return None
    return f"Too few steps of each contestant were timed to compare times by: {fewest}."


def _peer(document: Document, ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the contestant of Gloo's that one of gradwire's is compared with."""
    found = contestant(document, ours["peer"])
    assert found is not None
    return found


def speed(entry: Mapping[str, Any]) -> str:
    """Return a contestant's speed over that of its peer; a dash where it has none."""
    return NONE if entry["peer"] is None else f"{entry['speed_over'][entry['peer']]:.2f}"


def _uncompared(entries: Sequence[Mapping[str, Any]]) -> str:
    if len(entries) > 1:
        names = " and ".join(entry["label"] for entry in entries)
        return f"{names} trained; no peer of gradwire's takes part, so no speeds are compared."
    return "; ".join(
        f"{entry['label']}: median {milliseconds(entry['comm_median_s'])} of communication a "
        f"step, longest {milliseconds(entry['comm_max_s'])}, {entry['steps_per_s']:.2f} steps/s"
        for entry in entries
    )


def _faster(document: Document, ours: Mapping[str, Any]) -> str:
    ratio = ours["speed_over"][ours["peer"]]
    speed = "as fast" if 0.98 <= ratio <= 1.02 else f"{ratio:.2f} times as fast"
    return f"{speed} as over {_peer(document, ours)['label']}"


def _speed_note(document: Document, ours: Mapping[str, Any]) -> str:
    peer = _peer(document, ours)
    tail, name = ("comm_p99_s", "99th percentile")
    if peer[tail] is None or ours[tail] is None:
        tail, name = "comm_max_s", "longest"
    return (
        f"Over {ours['label']} the model trains {_faster(document, ours)}: "
        f"a step's gradients take {milliseconds(ours['comm_median_s'])} and "
        f"{milliseconds(peer['comm_median_s'])} (median; {name} {milliseconds(ours[tail])} and "
        f"{milliseconds(peer[tail])}), and {share(ours['delivered'])} of them are delivered."
    )


def notes(document: Document) -> list[str]:
    """Return notes that a reader needs to judge the numbers."""
    if not document["contestants"]:
        return []
    lines = []
    far = _is_far(document)
    if document["mode"] != "loopback" and not far and _few_steps(document) is None:
        lines += [_speed_note(document, entry) for entry in _compared(document)]
    if document["mode"] == "loopback":
        scenario = document["scenario"]
        lines.append(
            f"{document['reason']}. So this ran on loopback, which has no rate, no queue and no "
            f"bursts; {share(scenario['drop_rate'])} of gradwire's packets were dropped on "
            f"arrival, in runs of {scenario['drop_burst']:g} on average. TCP cannot be treated so: "
            "it lost nothing, and its times are those of copies in memory. Compare the losses and "
            "the delivered share, not the times."
        )
    else:
        lines.append(_network_note(document))
    lines.append(_turns_note(document))
    if far:
        lines.append(
            "Gloo's TCP is the kernel's default, cubic, which takes each loss for congestion. Few "
            "steps tell the two apart only because all of one are shorter than any of the other."
        )
    else:
        lines.extend(_peers_note(document))
    lines.append(
        "Communication time runs from the moment when all ranks have their gradients until the "
        "last rank has the averaged ones; all gradients travel as one bucket after the backward "
        "pass, so nothing hides behind computation."
    )
    lines.append(
        "One seed and a short run: the losses show what was learnt so far, neither the spread over "
        "seeds nor where a long run ends."
    )
    if not far and (few := _few_steps(document)) is not None:
        lines.append(few)
    if any(entry["comm_p99_s"] is None for entry in document["contestants"]):
        lines.append(f"A 99th percentile is given from {TAIL_STEPS} timed steps on.")
    if document["softnet_drops"]:
        lines.append(
            f"The machine was too slow for the network: it dropped {document['softnet_drops']} "
            "packets or trains of them outside of any queue."
        )
    lines.extend(_phase_note(entry) for entry in document["contestants"] if entry["verdict"])
    lines.extend(_encoding_note(document))
    lines.extend(_replica_notes(document))
    return lines


def _phase_note(entry: Mapping[str, Any]) -> str:
    if entry["critical_share"] == 1.0:
        return f"{entry['label']}: every step was critical; the run was too short for more."
    critical = f"{entry['label']}: {share(entry['critical_share'])} of the steps were critical"
    if entry["verdict"] == "phases":
        return f"{critical}; the detector fired again after the start."
    return f"{critical}; after the start the detector did not fire: a fixed bound."


def _peers_note(document: Document) -> list[str]:
    gloo = [entry["label"] for entry in document["contestants"] if entry["policy"] is None]
    ours = [entry for entry in document["contestants"] if entry["policy"] is not None]
    if not gloo or not ours:
        return []
    alike = ", ".join(
        f"{entry['label']} with "
        + ("none here" if entry["peer"] is None else _peer(document, entry)["label"])
        for entry in ours
    )
    return [
        f"{' and '.join(gloo)}: DDP over TCP. Speeds compare like with like: a contestant that "
        "sent most timed steps in half precision or less with Gloo in half precision (torch's "
        f"fp16_compress_hook), every other one with Gloo in single precision: {alike}."
    ]


def _encoding_note(document: Document) -> list[str]:
    ours, exact = contestant(document, "adaptive"), contestant(document, "reliable")
    if ours is None or exact is None or not exact["bytes_sent"]:
        return []
    return [
        f"{ours['label']} sends half precision or int8 where that shortens the steps, and tries "
        f"each encoding first: in {share(ours['compressed_share'])} of its timed steps, and "
        f"{share(ours['bytes_sent'] / exact['bytes_sent'])} of the bytes of {exact['label']} in "
        "all."
    ]


def _turns_note(document: Document) -> str:
    scenario = document["scenario"]
    phase = "" if document["bursts"] is None else " at the same phase of the bursts"
    return (
        f"The same {scenario['ranks']} processes train the contestants in turns of "
        f"{scenario['block']} steps{phase}, from the same weights on the same data. The first "
        f"{scenario['warm_up']} of a turn's steps train, but are not timed."
    )


def _network_note(document: Document) -> str:
    network, bursts = document["network"], document["bursts"]
    text = (
        f"Network {network['name']}: {document['scenario']['ranks']} hosts on one switch, "
        f"{network['rate'] / 1e6:g} Mbit/s and a drop-tail queue of {network['queue'] // 1024} KiB "
        "in each direction of each port; "
    )
    if bursts is None:
        text += f"{_path(document)} between any two hosts, made by wires of the lab."
    else:
        text += (
            f"bursts of {bursts['rate'] / 1e6:g} Mbit/s for {bursts['on'] * 1000:g} ms every "
            f"{bursts['period'] * 1000:g} ms into one port."
        )
    if document["header_ideal_s"] is not None:
        text += (
            f" A step's all-reduce moves {document['payload_bytes'] / 1e6:.1f} MB through each "
            "port in each direction, which takes the bare port "
            f"{milliseconds(document['header_ideal_s'])} (the header ideal)."
        )
    return text


def _replica_notes(document: Document) -> list[str]:
    verdicts = {entry["label"]: entry["replicas_identical"] for entry in document["contestants"]}
    broken = [label for label, same in verdicts.items() if same is False]
    if broken:
        return [f"The replicas differ between ranks: {', '.join(broken)}."]
    if verdicts and all(verdicts.values()):
        return ["All ranks ended with bit-identical weights, for every contestant."]
    return []
