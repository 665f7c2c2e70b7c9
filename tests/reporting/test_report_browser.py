"""The report page in a real browser: it draws, switches axes and colours, fits a phone, and reads only local files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nexttransformer import report
from tests.browser import Page, open_browser
from tests.reporting.synthetic import Launch, write_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    yield from open_browser()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    first = write_run(folder / "dense", [Launch(0, 8, "killed"), Launch(5, 20, "finished")])
    second = write_run(folder / "mhc", [Launch(0, 20, "finished")], shift=-0.1, run_id="1" * 16)
    assert report.main([str(first), "--output", str(folder / "one.html")]) == 0
    assert report.main([str(first), str(second), "--output", str(folder / "two.html"), "--lang", "zh"]) == 0
    return folder


def test_curves_are_drawn_over_three_axes(browser: Page, pages: Path):
    browser.open(pages / "one.html")
    browser.wait("document.querySelectorAll('.figures .main-svg').length >= 7")
    ranges = {}
    for axis in ("update", "tokens", "hours"):
        browser.click(f"button[data-axis={axis}]")
        ranges[axis] = browser.run("document.getElementById('figure-loss').data[0].x.slice(-1)[0]")
    # 20 updates of 8 x 128 tokens, half a second each.
    assert ranges == {"update": 20, "tokens": 20 * 1024, "hours": pytest.approx(20 * 0.5 / 3600, rel=1e-4)}
    browser.click("#log")
    assert browser.run("document.getElementById('figure-loss').layout.xaxis.type") == "log"
    assert browser.problems == []


def test_light_and_dark(browser: Page, pages: Path):
    colours = {}
    for dark in (False, True):
        browser.open(pages / "one.html", dark=dark)
        browser.wait("document.querySelectorAll('.figures .main-svg').length >= 7")
        assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        colours[dark] = browser.run("document.getElementById('figure-loss').layout.font.color")
    assert colours[False] != colours[True]
    browser.click("#theme")
    assert browser.run("document.documentElement.dataset.theme") == "light"
    assert browser.run("document.getElementById('figure-loss').layout.font.color") == colours[False]
    browser.run("localStorage.clear()")
    assert browser.problems == []


@pytest.mark.parametrize("name", ["one.html", "two.html"])
def test_phone(browser: Page, pages: Path, name: str):
    browser.open(pages / name, width=390, height=844)
    browser.wait("document.querySelectorAll('.figures .main-svg').length >= 7")
    assert browser.overflow() <= 0
    assert browser.problems == []


def test_comparison_draws_the_difference(browser: Page, pages: Path):
    browser.open(pages / "two.html")
    browser.wait("document.getElementById('figure-difference').data.length === 1")
    # One colour and one dash for each run.
    lines = browser.run("document.getElementById('figure-bpb').data.map((trace) => trace.line)")
    assert lines[0]["color"] != lines[1]["color"] and lines[0]["dash"] != lines[1]["dash"]
    assert browser.problems == []
