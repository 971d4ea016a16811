"""The page in a real Chromium: no requests, phone width, and keyboard use."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trundle.report.contents import _Report
from trundle.report.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(full_report: _Report, tmp_path_factory: pytest.TempPathFactory) -> str:
    place, _ = write_report(full_report, tmp_path_factory.mktemp("page") / "report.html")
    return Path(place).as_uri()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    yield page
    page.close()


def test_the_page_sends_no_requests(browser: Any, address: str) -> None:
    page = browser.new_page()
    wrong, asked = [], []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.close()
    assert wrong == []
    assert asked == [address]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen(browser: Any, address: str, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('figure svg text')].filter(t => t.checkVisibility())"
        ".map(t => t.getBoundingClientRect().height))"
    )
    assert smallest >= 9
    page.close()


def test_one_query_is_shown_at_a_time(opened: Any, full_report: _Report) -> None:
    queries = [search.query for search in full_report.of(full_report.runs[0]).searches]
    shown = opened.locator("#searches blockquote:visible")
    assert shown.all_text_contents() == queries[:1]
    select = opened.locator("#searches select:visible").nth(1)
    select.focus()
    opened.keyboard.press("ArrowDown")
    assert shown.all_text_contents() == queries[1:2]


def test_the_other_run_can_be_chosen(opened: Any, full_report: _Report) -> None:
    assert opened.locator("#recipe .lineage:visible").count() == 1
    opened.locator("#recipe select").first.select_option(label="bare")
    shown = opened.locator("#recipe .lineage:visible").text_content()
    assert "bare" in shown
    assert "align" not in shown


def test_a_mark_has_a_tooltip(opened: Any) -> None:
    mark = opened.locator("#overview .mark:visible").first
    mark.hover()
    assert opened.locator("#tip").is_visible()
    said = opened.locator("#tip").text_content()
    assert said == mark.get_attribute("aria-label")
    opened.mouse.move(1, 1)
    assert not opened.locator("#tip").is_visible()
    mark.focus()
    assert opened.locator("#tip").text_content() == said
    opened.keyboard.press("Escape")
    assert not opened.locator("#tip").is_visible()


def test_printed_it_shows_every_choice(opened: Any) -> None:
    opened.emulate_media(media="print")
    assert opened.locator("#recipe .lineage:visible").count() == 2
    assert (
        opened.locator("#searches blockquote:visible").count() == 2
    )  # of each run the query that was chosen
    assert not opened.locator("nav").is_visible()


def test_without_scripts_nothing_is_hidden(browser: Any, address: str, full_report: _Report) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    queries = sum(len(full_report.of(run).searches) for run in full_report.runs)
    assert page.locator("#searches blockquote:visible").count() == queries
    context.close()
