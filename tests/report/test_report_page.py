"""The page: well formed, self-contained, escaped, and equal to its JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from trundle.evaluate.shortening import Inheritance
from trundle.report import contents
from trundle.report.contents import _Quality, _Report
from trundle.report.markup import _HEIGHT, _megabytes, _percent
from trundle.report.page import _overview, _page
from trundle.report.report import make_report, write_report

VOID = {"meta", "br", "img", "link", "input", "hr"}
LEADS_OUT = {"src", "href", "action", "poster", "srcset", "data", "xlink:href", "formaction"}


class Reader(HTMLParser):
    """Checks that every tag is closed where it was opened, and collects what there is."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def drawn(full_report: _Report) -> Reader:
    return read(_page(full_report))


def test_every_section_is_there(drawn: Reader) -> None:
    wanted = ["overview", "budget", "layers", "coverage", "sparsity", "training", "shortened", "projection"]
    wanted += ["texts", "searches", "recipe", "use"]
    assert [name for name in drawn.ids if name != "tip"] == wanted
    assert len(drawn.ids) == len(set(drawn.ids))


def test_the_page_has_no_external_links(drawn: Reader, full_report: _Report) -> None:
    for tag, name, value in drawn.attributes:
        if name in LEADS_OUT:
            assert (value or "").startswith("#"), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
    html = _page(full_report)
    assert not re.search(r"@import|url\(|<link|<iframe|<base", html)
    own = "".join(re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", html, flags=re.DOTALL))
    assert "//" not in own


def test_links_lead_to_sections(drawn: Reader) -> None:
    targets = [str(value)[1:] for tag, name, value in drawn.attributes if (tag, name) == ("a", "href")]
    assert targets
    assert set(targets) <= set(drawn.ids)


def test_the_agreement_of_gradients_is_drawn(drawn: Reader) -> None:
    bars = [str(value).split() for tag, name, value in drawn.attributes if (tag, name) == ("rect", "class")]
    assert [kinds[-1] for kinds in bars if "bar" in kinds] == ["c1", "quiet", "quiet", "c0"]
    assert "conflicting 2.5%" in "".join(drawn.text)


def test_texts_stay_texts(drawn: Reader) -> None:
    """Texts, names of folders and candidates are full of markup; none of it becomes an element."""
    assert drawn.tags.count("script") == 1
    assert "img" not in drawn.tags
    assert not {"marquee", "i"} & set(drawn.tags)
    text = "".join(drawn.text)
    assert '<script>alert("x")</script> "><img src=x onerror=alert(1)>' in text
    assert "small <i>" in text
    assert "2 layers <marquee>" in text
    assert "There is no int8 graph, <i>alas." in text, "what the search had to remark is shown, too"


def test_json_is_what_is_drawn(
    full_report: _Report, tmp_path: Path, drawn: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "Inheritance", Inheritance, raising=False)  # only for type checkers there
    html, beside = write_report(full_report, tmp_path / "page.html")
    assert html.read_text(encoding="utf-8") == _page(full_report)
    assert _page(TypeAdapter(_Report).validate_json(beside.read_text(encoding="utf-8"))) == _page(full_report)
    found = json.loads(beside.read_text(encoding="utf-8"))
    text = "".join(drawn.text)
    rings = [
        value for tag, name, value in drawn.attributes if (tag, name, value) == ("circle", "class", "ring")
    ]
    assert len(rings) == sum(len(one["projection"]["texts"]) for one in found["measured"].values())
    for run in found["runs"]:
        measured = found["measured"][run["name"]]
        assert _megabytes(run["form"]["bytes"]) in text
        assert _percent(measured["quality"]["agreement_asymmetric"]) in text
        for one in [*measured["nearest"], *measured["farthest"]]:
            assert one["text"] in text
        for search in measured["searches"]:
            assert search["query"] in text
            for way in ("teacher", "asymmetric", "student"):
                assert all(found["documents"][str(place)] in text for place in search[way]["documents"])
        for step in run["steps"]:
            assert step["says"] in text
    assert len(found["documents"]) == len(
        {
            p
            for one in found["measured"].values()
            for s in one["searches"]
            for w in ("teacher", "asymmetric", "student")
            for p in s[w]["documents"]
        }
    )


def test_a_minimal_run_shows_only_what_it_recorded(bare_folder: Path) -> None:
    reader = read(_page(make_report([bare_folder])))
    assert [name for name in reader.ids if name != "tip"] == ["overview", "recipe", "use"]
    text = "".join(reader.text)
    assert "Pass --data TEXTS to see" in text
    assert "Pass --tasks FOLDER to see scores on labelled tasks." in text
    assert "Compress with --budget to see" in text
    assert "figure" not in reader.tags


def test_the_page_says_how_to_add_missing_sections(full_report: _Report) -> None:
    text = "".join(read(_page(full_report)).text)
    assert "Pass --data" not in text
    assert "Pass --tasks" in text


def test_same_report_same_bytes(full_report: _Report) -> None:
    assert _page(full_report) == _page(full_report)


def test_agreement_of_a_search_with_the_teacher_is_counted(full_report: _Report) -> None:
    run = full_report.runs[0]
    search = full_report.of(run).searches[0]
    shared = len(set(search.teacher.documents) & set(search.asymmetric.documents))
    assert f"({shared}/10)" in _page(full_report)


def test_a_run_above_its_teacher_is_inside_the_plot(full_report: _Report) -> None:
    run = full_report.runs[0]
    better = replace(full_report.of(run), quality=_Quality(measured="tasks", share_standard=1.05))
    drawn = _overview(replace(full_report, measured={run.name: better}))
    heights = [float(found) for found in re.findall(r'cy="(-?[\d.]+)"', drawn)]
    assert heights
    assert all(0 < height < _HEIGHT for height in heights)
