"""`gradwire top --web`: who gets the page, and what a browser makes of it."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ranks import Ranks
from test_top import STEPS, TOP, all_steps, look_until, reports, training

PAGE = Path(__file__).parent.parent / "src/gradwire/watch/page.html"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
browser = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")


@contextlib.contextmanager
def serving(job: str, *options: str) -> Iterator[str]:
    """The address of a page that `gradwire top --web` serves."""
    server = subprocess.Popen(
        [*TOP, job, "--web", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert server.stdout.read() == ""


def get(url: str, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def run_browser(*arguments: str) -> str:
    shown = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server"),
            *("--window-size=1000,900", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return shown.stdout


def dom(url: str, *options: str) -> str:
    """What a headless browser makes of a page, as HTML."""
    return run_browser("--virtual-time-budget=4000", "--dump-dom", *options, url)


def text_of(page: str, place: str) -> str:
    found = re.search(rf'id="{place}"[^>]*>(.*?)</(p|table|h1|h2|div)>', page, re.S)
    assert found is not None, place
    return html.unescape(re.sub(r"<[^>]*>", " ", found[1])).strip()


def test_the_page_needs_nothing_from_elsewhere(two: Ranks, tmp_path: Path) -> None:
    source = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[\w.]+/|@import|url\(", source)
    assert re.search(r"<noscript>.+gradwire\s+top.+</noscript>", source, re.S)
    with training(two, tmp_path) as watched, serving(watched.job) as url:
        status, headers, page = get(url, urlsplit(url).path)
    assert status == 200
    assert page.decode() == source
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_who_does_not_know_the_address_gets_nothing(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path) as watched, serving(watched.job) as url:
        at = urlsplit(url)
        assert at.hostname == "127.0.0.1"
        secret = at.path
        assert len(secret) > 12
        statuses = {
            path: get(url, path)[0]
            for path in (
                "/",
                "/state",
                "/x/state",
                f"{secret}other",
                f"{secret}../",
                f"{secret}state",
            )
        }
        assert statuses.pop(f"{secret}state") == 200
        assert set(statuses.values()) == {404}
        taken = subprocess.run(
            [*TOP, watched.job, "--web", "--port", str(at.port)], capture_output=True, text=True
        )
    assert taken.returncode == 2
    assert f"--port {at.port}" in taken.stderr


def test_only_new_steps_come_again(two: Ranks, tmp_path: Path) -> None:
    with training(two, tmp_path) as watched:
        look_until(watched, all_steps)
        with serving(watched.job) as url:

            def state(query: str) -> list[dict[str, Any]]:
                figures = json.loads(get(url, f"{urlsplit(url).path}state{query}")[2])
                steps: list[dict[str, Any]] = figures["steps"]
                return steps

            steps = state("")
            assert [each["step"] for each in steps] == list(range(STEPS))
            assert state(f"?since={steps[-3]['at']}") == steps[-2:]
            assert state("?since=nonsense") == steps


def test_the_pictures_of_the_guide_are_small() -> None:
    pictures = sorted(PAGE.parents[3].glob("docs/top*.*"))
    assert [each.name for each in pictures] == ["top-dark.png", "top-light.png", "top.svg"]
    assert max(each.stat().st_size for each in pictures) < 150_000
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", pictures[2].read_text())


@browser
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_a_browser_shows_the_job(two: Ranks, tmp_path: Path, scheme: int) -> None:
    with training(two, tmp_path, drop=0.05, p=0.2) as watched:
        look_until(watched, all_steps)
        with serving(watched.job) as url:
            page = dom(url, f"--blink-settings=preferredColorScheme={scheme}")
    lines, other = reports(tmp_path, 0), reports(tmp_path, 1)
    assert "mlt, 2 of 2 workers" in text_of(page, "title")
    assert text_of(page, "last").startswith(
        f"Step {STEPS - 1}: tolerant phase, f32, may lose 20.0 %"
    )
    workers = text_of(page, "workers")
    assert "rank 0" in workers
    assert "rank 1" in workers
    assert "rank 0 → rank 1" in text_of(page, "paths")
    layers = {
        region["name"]
        for line in [*lines, *other]
        for region in line["regions"]
        if region["delivered"] < 1
    }
    assert f"{len(layers)} layers, {STEPS} steps" in text_of(page, "scale")
    drawn = dict(re.findall(r'<canvas id="(\w+)"[^>]*aria-label="([^"]+)"', page))
    assert drawn["times"].startswith(f"{STEPS - 1} steps")  # the last one's time is not known
    assert drawn["loss"].startswith("training loss from ")
    assert drawn["map"].startswith(f"{len(layers)} layers lost something")
    assert "gradwire top" not in text_of(page, "messages")  # no step ends any more, but it answers


@browser
def test_a_browser_without_javascript_shows_a_sentence(tmp_path: Path) -> None:
    """A frame that may run no scripts has the text, so that it is no blank picture."""

    def shot(page: str) -> bytes:
        outer, picture = tmp_path / "outer.html", tmp_path / "shot.png"
        outer.write_text(f'<iframe sandbox srcdoc="{html.escape(page)}"></iframe>')
        run_browser(f"--screenshot={picture}", outer.as_uri())
        return picture.read_bytes()

    page = PAGE.read_text(encoding="utf-8")
    assert shot(page) != shot(re.sub(r"<noscript>.*</noscript>", "", page, flags=re.S))
