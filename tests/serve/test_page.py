"""The page in a real browser: search, change the corpus, use the keyboard, on a phone."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_server import LiveServer, running
from trundle.serve.settings import ServerSettings, _Served

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

expect.set_options(timeout=30_000)  # the server reads the documentation of many packages meanwhile

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STORY = "\n\n".join(
    (
        "The fox jumps over the lazy dog and runs into the wood.",
        "A small bed slides under a large one and shares its frame.",
        "How an index survives when the model behind it changes.",
        "Commas, full stops and other marks are read like words.",
    )
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test when its script does."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    failures: list[str] = []
    opened.on("pageerror", lambda error: failures.append(str(error)))
    outside: list[str] = []
    opened.on("request", lambda request: outside.append(request.url))
    yield opened
    context.close()
    assert failures == []
    assert all(url.startswith(("http://127.0.0.1", "data:")) for url in outside), "works offline"


@pytest.fixture
def story(tmp_path: Path) -> Path:
    file = tmp_path / f"{tmp_path.name}.txt"  # the server keeps what other tests dropped
    file.write_text(STORY, encoding="utf-8")
    return file


def drop(page: Page, story: Path) -> None:
    page.set_input_files("#file", story)
    expect(page.get_by_role("radio", name=story.name)).to_be_checked()
    expect(page.locator("#status")).to_have_text("4 passages.")


def await_answers(page: Page) -> None:
    """Waits until no search is running that would replace the results; typing starts one after a delay."""
    page.evaluate("new Promise(done => setTimeout(done, 300))")
    page.wait_for_function("state.asked > 0 && state.shown === state.asked")


def test_type_and_see_three_columns(page: Page, server: LiveServer, story: Path) -> None:
    page.goto(server.url)
    expect(page.locator(".card")).to_have_count(2)
    drop(page, story)
    page.locator("#query").fill("a bed that shares a frame")
    columns = page.locator(".column")
    expect(columns).to_have_count(3)
    assert columns.locator("h2").all_inner_texts() == ["Teacher", "Asymmetric", "Student"]
    for place in range(3):
        expect(columns.nth(place).locator(".result")).to_have_count(4)
        expect(columns.nth(place).locator(".ms")).to_have_text(re.compile(r"^[\d.]+ ms$"))
    expect(columns.nth(1).locator(".overlap")).to_contain_text("4 of 4 as the teacher")
    scores = [float(score) for score in columns.nth(0).locator(".score").all_inner_texts()]
    assert scores == sorted(scores, reverse=True)
    expect(page.locator(".card", has_text="big")).to_contain_text(re.compile(r"[\d.]+ ms"))


def test_switch_to_the_documentation_found_here(page: Page, server: LiveServer, story: Path) -> None:
    page.goto(server.url)
    drop(page, story)
    page.get_by_role("radio", name="Documentation found here").click()
    example = page.locator("#examples .chip").first
    example.wait_for(timeout=60_000)
    words = example.inner_text()
    example.click()
    expect(page.locator("#query")).to_have_value(words)
    expect(page.locator(".column")).to_have_count(3, timeout=20_000)


def test_the_keyboard_is_enough(page: Page, server: LiveServer, story: Path) -> None:
    page.goto(server.url)
    drop(page, story)
    page.locator("h1").click()
    page.keyboard.press("/")
    expect(page.locator("#query")).to_be_focused()
    page.keyboard.type("an index")
    page.keyboard.press("Enter")
    expect(page.locator(".column")).to_have_count(3)
    await_answers(page)
    page.keyboard.press("ArrowDown")
    expect(page.locator(".column").nth(0).locator(".result").nth(0)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    focused = page.locator(".column").nth(1).locator(".result").nth(1)
    expect(focused).to_be_focused()
    expect(page.locator(".result.same")).to_have_count(3)
    page.keyboard.press("Enter")
    expect(focused).to_have_class(re.compile("open"))
    page.keyboard.press("Escape")
    expect(page.locator("#query")).to_be_focused()


def test_light_and_dark(browser: Browser, server: LiveServer) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(server.url)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch between light and dark").click()
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light != dark
    context.close()


def test_phone_width(browser: Browser, server: LiveServer, story: Path) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(server.url)
    drop(page, story)
    page.locator("#query").fill("a frame")
    expect(page.locator(".column")).to_have_count(3)
    await_answers(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    third = page.locator(".column").nth(2).locator(".result").first
    third.scroll_into_view_if_needed()
    expect(third).to_be_in_viewport()
    context.close()


def test_the_page_asks_for_a_key(browser: Browser, alone: _Served) -> None:
    with running(alone, ServerSettings(keys=("a-key-for-the-page",))) as live:
        context = browser.new_context()
        page = context.new_page()
        page.goto(live.url)
        page.locator("#key").fill("a-key-for-the-page")
        page.keyboard.press("Enter")
        expect(page.locator(".card")).to_have_count(1)
        context.close()


def test_the_pages_routes_reject_invalid_requests(server: LiveServer) -> None:
    for path, content, status in (
        ("/compare/search", {"query": "", "corpus": "environment"}, 400),
        ("/compare/search", {"query": "a", "corpus": "file-999"}, 404),
        ("/compare/search", {"query": "a"}, 400),
        ("/compare/corpora", {"name": "empty.txt", "text": "  \n\n "}, 400),
        ("/compare/corpora", {"name": "", "text": "a"}, 400),
        ("/compare/corpora", b'{"name": "x", "text": "\\ud800"}', 400),
    ):
        answer = server.post(path, content)
        assert answer.status == status, (path, content, answer.body)
        assert answer.json()["error"]["message"]
    form = server.post("/compare/corpora", b"name=x", {"Content-Type": "text/plain"})
    assert form.status == 415
    assert server.get("/compare/corpora/none").status == 404


def test_others_are_answered_while_a_large_file_is_split(
    alone: _Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reached, opened = threading.Event(), threading.Event(), list[bool]()

    def split(text: str) -> list[str]:
        reached.set()
        opened.append(gate.wait(20))
        return ["a passage of this file"]

    monkeypatch.setattr("trundle.serve.playground._split_passages", split)
    with running(alone) as live:
        body = {"name": "large.txt", "text": "x" * 200_000}
        dropping = threading.Thread(target=live.post, args=("/compare/corpora", body))
        dropping.start()
        assert reached.wait(30)
        assert live.get("/health").status == 200
        gate.set()
        dropping.join()
    assert opened == [True], "the answer came only after the file was split"
