"""Exporters: where the figures of each step go, read back by the libraries that carry them."""

from __future__ import annotations

import copy
import json
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from ddp_jobs import batch, model, wrap
from gradwire.core.report import StepReport
from gradwire.core.settings import Settings
from gradwire.exports import FIGURES, OpenTelemetry, Record, TensorBoard, WandB, figures
from gradwire.exports.telemetry import Telemetry, open_telemetry
from ranks import Ranks, free_port
from test_telemetry import report, transfer

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "examples" / "grafana-dashboard.json"
PAGE = ROOT / "docs" / "guides" / "exports.md"


def steps(count: int) -> Iterator[StepReport]:
    """Reports in which the first step lost a quarter and all others nothing."""
    for step in range(count):
        whole = report(transfer([300, 100], [1.0, 1.0 if step else 0.0]))
        yield replace(whole, step=step, period_s=1.0, exposed_s=0.25)


def telemetry(*export: object, rank: int = 0, file: Path | None = None) -> Telemetry:
    found = open_telemetry(Settings(export=export, report=file), rank, first=rank == 0)
    assert found is not None
    return found


def write(to: Telemetry, count: int = 3) -> None:
    for step in steps(count):
        to.write(step)


def write_all(to: Telemetry) -> None:
    write(to)
    to.close()


def scrape(text: str) -> dict[str, float]:
    """The samples of a page of Prometheus by their names; each has one series here."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(text)
    return {sample.name: sample.value for each in families for sample in each.samples}


def scrape_until(port: int, steps: int) -> dict[str, float]:
    """The samples at a port once it has heard of so many steps: records come by a thread."""
    deadline = time.monotonic() + 20
    while (found := scrape(page(port))).get("gradwire_steps_total") != steps:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


# ---------------------------------------------------------------------------- each library


def test_prometheus_answers_with_the_last_step_and_totals() -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    to = telemetry(f"prometheus:{port}")
    write(to)
    found = scrape_until(port, 3)
    assert found["gradwire_lost_elements_total"] == pytest.approx(100)
    assert found["gradwire_elements_total"] == 1200
    assert found["gradwire_exposed_seconds_total"] == pytest.approx(0.75)
    assert found["gradwire_step_delivered"] == 1.0
    assert 'policy="mlt"' in page(port)
    to.close()
    with pytest.raises(OSError):
        page(port)


def test_attachments_share_a_port() -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    first, second = (telemetry(f"prometheus:{port}") for _ in range(2))
    for number, each in enumerate((first, second)):
        for step in steps(1):
            each.write(replace(step, attachment=number))
    first.close()
    until = time.monotonic() + 20
    while 'attachment="1"' not in (text := page(port)):
        assert time.monotonic() < until
    assert 'attachment="0"' not in text
    second.close()


def test_prometheus_writes_a_file_for_node_exporter(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    to = telemetry(f"prometheus:{tmp_path}/gradwire-{{rank}}.prom", rank=2)
    write(to)
    to.close()
    found = scrape((tmp_path / "gradwire-2.prom").read_text())
    assert found["gradwire_steps_total"] == 3


def test_a_page_that_could_not_be_written_last_is_given_up(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    folder = tmp_path / "gone"
    folder.mkdir()
    target = f"prometheus:{folder}/job.prom"
    first = telemetry(target)
    shutil.rmtree(folder)
    with pytest.warns(RuntimeWarning, match="Prometheus"):
        write_all(first)
    folder.mkdir()
    write_all(telemetry(target))
    text = (folder / "job.prom").read_text()
    assert len(re.findall(r"^gradwire_steps_total{", text, re.MULTILINE)) == 1


def test_tensorboard_reads_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    own = SummaryWriter(str(tmp_path / "own"))
    to = telemetry(f"tensorboard:{tmp_path}/folder", TensorBoard(own))
    write(to)
    to.close()
    own.add_scalar("loss", 1.0, 3)  # which is still open
    own.close()
    for folder in ("folder", "own"):
        read = EventAccumulator(str(tmp_path / folder))
        read.Reload()
        scalars = read.Scalars("gradwire/delivered")
        assert [(each.step, each.value) for each in scalars] == [(0, 0.75), (1, 1.0), (2, 1.0)]
        known = {f"gradwire/{name}" for name in FIGURES} - {"gradwire/loss"}
        assert set(read.Tags()["scalars"]) - {"loss"} == known


def test_wandb_gets_figures_without_steps_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb: Any = pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    with wandb.init(
        mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(silent=True)
    ) as run:
        for each in ("wandb", WandB(run)):
            before = run.step
            to = telemetry(each)
            write(to)
            to.close()
            assert run.step == before
            run.log({"mine": 1.0})
            assert run.summary["gradwire/delivered"] == 1.0
            assert run.summary["gradwire/step"] == 2


def test_opentelemetry_gets_a_span_of_each_step() -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    kept = memory.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    to = telemetry(OpenTelemetry(provider.get_tracer("test")))
    write(to)
    to.close()
    spans = kept.get_finished_spans()
    whole = [span for span in spans if span.name == "gradwire step"]
    exposed = [span for span in spans if span.name == "gradwire exposed"]
    assert [span.attributes["gradwire.step"] for span in whole] == [0, 1, 2]
    assert [span.attributes["gradwire.delivered"] for span in whole] == [0.75, 1.0, 1.0]
    assert [span.end_time - span.start_time for span in whole] == [500_000_000] * 3
    for outer, inner in zip(whole, exposed, strict=True):
        assert inner.parent.span_id == outer.context.span_id
        assert inner.end_time - inner.start_time == 250_000_000


def test_the_dashboard_asks_for_metrics_that_are_exported(tmp_path: Path) -> None:
    page = tmp_path / "job.prom"
    write_all(telemetry(f"prometheus:{page}"))
    exported = set(scrape(page.read_text()))
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"\bgradwire_\w+", query)}
    assert len(queries) > 10
    assert asked <= exported
    labels = {label for query in queries for label in re.findall(r"\{(\w+)=", query)}
    assert labels == {"rank"}


def test_the_page_names_every_figure() -> None:
    _, table = PAGE.read_text().split("\n## The figures\n")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.M)
    assert rows == [(name, figure.meaning) for name, figure in FIGURES.items()]


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "given",
    ["promethoeus:9400", "prometheus", "prometheus:", "tensorboard", "wandb:x", "", 9400, [3]],
)
def test_an_export_that_is_none_names_what_is_allowed(given: object) -> None:
    with pytest.raises(gradwire.ConfigError) as caught:
        Settings.build({"export": given})
    assert caught.value.setting == "export"
    assert "tensorboard:FOLDER" in caught.value.allowed


def test_exports_are_read_from_the_environment() -> None:
    read = Settings.build(environment={"GRADWIRE_EXPORT": "wandb, tensorboard:runs/a"})
    assert read.export == ("wandb", "tensorboard:runs/a")
    with pytest.raises(gradwire.ConfigError) as caught:
        Settings.build(environment={"GRADWIRE_EXPORT": "wand"})
    assert caught.value.setting == "GRADWIRE_EXPORT"


@pytest.mark.parametrize("target", ["x", "70000", "9400+x", "/nowhere/there/a.prom", "300.1.1.1:1"])
def test_a_target_that_cannot_be_is_an_error(target: str) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(gradwire.ConfigError) as caught:
        telemetry(f"prometheus:{target}")
    assert caught.value.setting == "export"
    assert target in str(caught.value.value)


def test_a_library_that_is_absent_is_an_error_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(gradwire.ConfigError) as caught:
        telemetry("prometheus:0")
    assert "[prometheus]" in caught.value.allowed


def test_other_ranks_open_only_what_names_them(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    settings = Settings(export=[f"prometheus:{tmp_path}/a.prom"], report=tmp_path / "a.jsonl")
    assert open_telemetry(settings, 1, first=False) is None
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------- exporters that fail


class Keeps:
    """An exporter that waits until it may go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.steps: list[int] = []
        self.closed = 0

    def write(self, record: Record) -> None:
        self.go.wait()
        self.steps.append(record.report.step)

    def close(self) -> None:
        self.closed += 1


class Fails(Keeps):
    def write(self, record: Record) -> None:
        self.steps.append(record.report.step)
        raise OSError("the disk is full")


def test_a_slow_exporter_holds_up_no_step() -> None:
    slow, quick = Keeps(), Keeps()
    quick.go.set()
    to = telemetry(slow, quick)
    with pytest.warns(RuntimeWarning, match="leaves out steps"):
        write(to, 1100)  # more than may wait
    slow.go.set()
    to.close()
    to.close()
    assert slow.steps == list(range(len(slow.steps)))
    assert 1024 <= len(slow.steps) <= 1025
    assert quick.steps[-1] == 1099 or len(quick.steps) >= 1024
    assert (slow.closed, quick.closed) == (1, 1)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exporter_that_raises_is_closed_and_the_others_go_on() -> None:
    failing, other = Fails(), Keeps()
    other.go.set()
    to = telemetry(failing, other)
    with pytest.warns(RuntimeWarning, match="Fails stops"):
        write_all(to)
    assert (failing.steps, failing.closed) == ([0], 1)
    assert other.steps == [0, 1, 2]


# ---------------------------------------------------------------------------- whole jobs


def exports(rank: int, world: int, port: int, folder: str) -> dict[str, float]:
    ddp = wrap(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))))
    attachment = gradwire.attach(
        ddp,
        "reliable",
        report=f"{folder}/steps-{{rank}}.jsonl",
        export=f"prometheus:{port}+{{rank}}, tensorboard:{folder}/{{rank}}, opentelemetry",
    )
    data = torch.randn(512, 1024)
    for _ in range(3):
        ddp(data).square().mean().backward()
    before = scrape_until(port + rank, 3)
    for _ in range(10):
        ddp(data).square().mean().backward()
    after = scrape_until(port + rank, 13)
    attachment.detach()
    return {name: after[name] - before[name] for name in after}


def test_all_telemetry_costs_less_than_a_hundredth_of_a_jobs_processor_time(
    two: Ranks, tmp_path: Path
) -> None:
    for library in ("prometheus_client", "tensorboard", "opentelemetry.sdk.trace"):
        pytest.importorskip(library)
    for found in two.run(exports, port=free_port(following=1), folder=str(tmp_path)):
        share = found["gradwire_telemetry_cpu_seconds_total"]
        share /= found["gradwire_process_cpu_seconds_total"]
        assert share < 0.01


def copied(rank: int, world: int) -> None:
    kept = Keeps()
    kept.go.set()
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable", export=kept)
    copy.deepcopy(ddp)  # which could share neither its lock nor its steps
    ddp(batch(rank, 0)).square().mean().backward()
    attachment.detach()
    assert (kept.steps, kept.closed) == ([0], 1)


def test_a_model_can_be_copied_whatever_it_exports_to(two: Ranks) -> None:
    two.run(copied)


def profiled(rank: int, world: int) -> list[tuple[str, float]]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    ddp(batch(rank, 0)).square().mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(batch(rank, 1)).square().mean().backward()
    attachment.detach()
    events = profile.events() or []
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def test_a_profile_shows_each_bucket_until_its_result(two: Ranks) -> None:
    for found in two.run(profiled):
        own = [(name, spent) for name, spent in found if name.startswith("gradwire")]
        names = [name for name, _ in own]
        assert names.count("gradwire: bucket 0") == 1
        assert names.count("gradwire: wait for results") == 1
        assert len(names) >= 3
        assert all(spent > 0 for _, spent in own)


def test_figures_leave_out_what_is_not_known() -> None:
    (step,) = steps(1)
    assert "gradwire/loss" not in figures(step)
    with_loss = replace(step, agreed=replace(step.agreed, loss=2.0))
    assert figures(with_loss, ("loss", "delivered")) == {
        "gradwire/loss": 2.0,
        "gradwire/delivered": 0.75,
    }
