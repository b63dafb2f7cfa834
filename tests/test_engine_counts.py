"""tools/engine_counts.py: what counts as a constant, a line of code and a method."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "engine_counts.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_counts", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("constexpr double kCut = 0.7;", [0.7]),
        ("constexpr Nanos kFresh = 5 * kMillisecond;", [5]),
        ("constexpr double kLong = 64 << 10;", [64]),
        ("constexpr uint64_t kLeast = 32 * 1024;", [32]),
        ("constexpr double kAllLost = 1e-3;", [0.001]),
        ("constexpr uint64_t kMost = 10'000u;", [10_000]),
        ("constexpr double kTwice = 2.0;", []),
        ("const double rate = bytes * 1e9 / static_cast<double>(time);", []),
        ("deviation_ += (error - deviation_) / 4;", [4]),
        ("for (uint64_t w = 0; w * 64 < known; ++w) {", []),
        ('return "at 3 of 4";', []),
        ("uint32_t x86 = 0x10;", [16]),
    ],
)
def test_literals_are_constants_but_small_ones_and_units(
    tool: ModuleType, line: str, values: list[float]
) -> None:
    assert list(tool.literals(line)) == values


def test_each_constant_has_its_place(tool: ModuleType) -> None:
    text = "// 3 laws\nconstexpr double kCut = 0.7;  // 5\nuse(1, 64 << 10);\n"
    places = tool.counted_places("congestion/window.h", text)
    lines = text.split("\n")
    assert [(lines[at][begin:end], value) for at, begin, end, value in places] == [
        ("0.7", 0.7),
        ("64", 64),
    ]
    assert tool.counted_places("op/op.h", text) == []


def test_folders_are_counted_each_by_its_rule(tool: ModuleType) -> None:
    found = tool.count(
        {
            "congestion/window.h": "// 3 laws\nconstexpr double kCut = 0.7;  // 5\n\n/* 7\n */\n",
            "recovery/sent_packets.h": "static constexpr uint64_t kMost = 131'072;\n",
            "endpoint/trains.cc": "constexpr double kShare = 0.5;\nuse(4);\n",
            "endpoint/ops.cc": "constexpr size_t kHuge = 8 << 20;\n",
            "endpoint/endpoint_impl.h": (
                "struct Endpoint::Impl {\n  struct Inner { int of() { return 3; } };\n"
                "  void one(int at = 0);\n  bool two(X& x, Y y = {}) { return x.f(y); }\n"
                "  int three = 0;\n  std::map<int, int> four{f()};\n};\n"
            ),
            "push/list.h": "constexpr int kFew = 5;\n",
            "base/config.h": "Nanos delay_target = 1300 * kMicrosecond;\n",
        }
    )
    assert [each.value for each in found.constants] == [1300, 0.7, 0.5]
    assert [each.value for each in found.rings] == [131_072]
    assert found.lines == 1 + 1 + 2 + 1 + 7 + 1 + 1
    assert found.endpoint_lines == 2 + 1 + 7
    assert found.methods == 2


def test_it_counts_this_checkout() -> None:
    command = [sys.executable, str(TOOL), "--list"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    head, *listed = result.stdout.splitlines()
    counted, rings = (int(head.split()[place]) for place in (1, 8))
    assert 0 < counted + rings == len(listed), head


def test_the_endpoint_stays_a_room_without_rules(tool: ModuleType) -> None:
    found = tool.count(tool.files_at(None))
    assert 0 < found.endpoint_lines <= 900
    assert 0 < found.methods <= 45
