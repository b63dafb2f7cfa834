"""Results of the lab as tests make them: what a test does not name is not known."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradwire_lab.run.model import FORMAT, KIND, CellResult, Kernel, Results, Summary
from gradwire_lab.scenario.mark import Map
from gradwire_lab.scenario.network import Loss, Rivals, Topology
from gradwire_lab.scenario.work import Model, Work


def summary(**values: Any) -> Summary:
    known: dict[str, Any] = dict.fromkeys(each.name for each in dataclasses.fields(Summary))
    return Summary(**{**known, "by_seed": {}, "delivered_by_worker": [], **values})


def cell_result(name: str, contestants: list[Summary]) -> CellResult:
    work = Work("all_reduce")
    return CellResult(name, {}, Topology(), work, Model(), Loss(), Rivals(), contestants, runs=[])


def results(**values: Any) -> Results:
    known: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "scenario": "s",
        "title": "t",
        "published": "",
        "quick": False,
        "date": "2026-05-01",
        "dates": ("2026-05-01T10:00:00+00:00",) * 2,
        "commits": [],
        "command": "gradwire lab run",
        "machine": {"cores": 2, "cpu": "x", "kernel": "6", "torch": "2"},
        "machines": [],
        "gradwire": "0",
        "elsewhere": False,
        "settings": {},
        "kernel": Kernel([], [], "", [], [], []),
        "work": Work("all_reduce"),
        "seeds": [0],
        "missing": 0,
        "map": Map(),
        "file": {},
        "left_out": {},
        "calibrations": [],
        "cells": [],
        "marks": [],
        "errors": [],
        "other_forms": [],
        "wall_s": 1.0,
    }
    return Results(**{**known, **values})
