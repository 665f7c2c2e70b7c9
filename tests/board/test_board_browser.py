"""The leaderboard in a real browser: sorting, filtering, comparing, languages, phones; only local files are read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nexttransformer import leaderboard
from tests.board.synthetic_records import write_board
from tests.browser import Page, open_browser

pytestmark = pytest.mark.browser
METHODS = (
    "Array.from(document.querySelectorAll('#board tbody tr')).filter((row) => !row.hidden)"
    ".map((row) => row.cells[1].querySelector('a').textContent)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    yield from open_browser()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    assert (
        leaderboard.main(["--evidence", str(write_board(folder / "evidence")), "--output", str(folder / "site")]) == 0
    )
    return folder / "site"


def test_sorting_and_filtering(browser: Page, site: Path):
    browser.open(site / "en/index.html")
    printed = browser.run(METHODS)
    assert printed == ["Mhc", "Simple Hc", "Gdn Hybrid", "Hc", "Sssl", "Dense Full", "Gdn"]
    heads = browser.run("Array.from(document.querySelectorAll('#board th')).map((head) => head.textContent.trim())")
    core = next(index for index, text in enumerate(heads) if text.startswith("CORE"))
    button = f"#board th:nth-child({core + 1}) button"
    browser.click(button)
    assert browser.run(METHODS) == ["Gdn", "Dense Full", "Sssl", "Gdn Hybrid", "Hc", "Simple Hc", "Mhc"]
    assert browser.run(f"document.querySelector('{button}').closest('th').getAttribute('aria-sort')") == "ascending"
    browser.click(button)
    assert browser.run(METHODS)[0] == "Mhc"
    browser.click("#board th:nth-child(2) button")
    assert browser.run(METHODS) == sorted(printed)
    browser.click("#board th:first-child button")
    assert browser.run(METHODS) == printed
    browser.choose("#family", "residual")
    assert browser.run(METHODS) == ["Mhc", "Simple Hc", "Hc"]
    browser.choose("#family", "")
    assert browser.run(METHODS) == printed
    assert browser.problems == []


def test_comparison_of_any_two(browser: Page, site: Path):
    browser.open(site / "en/compare.html")
    verdict = "document.getElementById('verdict').textContent"
    # At first the baseline and the best.
    assert browser.run(verdict) == "Mhc is better than Dense Full by 0.0055 BPB, beyond the noise of single runs."
    assert browser.run("document.querySelectorAll('#curve svg.chart path').length") == 2
    assert browser.run("document.querySelectorAll('#difference svg.chart .band').length") == 1
    assert browser.run("document.querySelectorAll('#tasks tbody tr').length") == 22
    browser.choose("#second", "sssl")
    assert "not distinguishable" in browser.run(verdict)
    browser.choose("#second", "dense_full")
    assert browser.run(verdict) == "Choose two different methods."
    # Results from elsewhere have no curve.
    browser.choose("#second", "published_mhc")
    assert "not audited here" in browser.run(verdict)
    assert browser.run("document.getElementById('difference').hidden") is True
    assert browser.run("location.hash") == "#a=dense_full&b=published_mhc"
    browser.open(site / "zh/compare.html", fragment="#a=gdn&b=hc")
    assert "Hc 优于 Gdn" in browser.run(verdict)
    assert browser.problems == []


def test_method_page_draws_its_charts(browser: Page, site: Path):
    browser.open(site / "en/methods/mhc.html")
    assert browser.run("document.querySelectorAll('svg.chart').length") == 2
    browser.run(
        "(() => { const chart = document.querySelector('svg.chart'), box = chart.getBoundingClientRect(); "
        "chart.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 12, clientY: box.top + 60})); })()"
    )
    assert "Mhc 0.6617" in browser.run("document.querySelector('.readout').textContent")
    browser.open(site / "en/demo/methods/mhc_lite.html")
    # Limited CORE has no curve.
    assert browser.run("document.querySelectorAll('svg.chart').length") == 1
    assert browser.problems == []


@pytest.mark.parametrize("dark", [False, True])
def test_phone_and_contrast(browser: Page, site: Path, dark: bool):
    for name in ("index", "demo", "compare", "methods/mhc", "methods/gdn_swa"):
        for language in ("en", "zh"):
            browser.open(site / f"{language}/{name}.html", width=390, height=844, dark=dark)
            assert browser.overflow() <= 0, f"{language}/{name}"
            assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert browser.problems == []


def test_the_root_leads_to_a_language(browser: Page, site: Path):
    browser.open(site / "index.html")
    browser.wait("location.pathname.endsWith('/index.html') && /\\/(en|zh)\\//.test(location.pathname)")
    browser.run("document.querySelector('nav a[hreflang]').click()")
    browser.wait("document.documentElement.lang === 'zh-CN' && location.pathname.includes('/zh/')")
    assert browser.problems == []
