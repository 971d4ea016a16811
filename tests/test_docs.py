"""Every documented command parses, every Python example runs, every named file exists."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import pico
from trundle.cli.app import _EXAMPLES, main
from trundle.errors import BadInput
from trundle.export.exporting import export_model
from trundle.recipe import recipe_names
from trundle.runtime.encoder import Encoder

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "docs" / "reference" / "cli.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != GENERATED),
]
READY = "models/all-mpnet-base-v2-12MB"
COMMANDS = sorted(
    {
        line.split("#")[0].strip()
        for page in PAGES
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for line in block.splitlines()
        if line.startswith("trundle ")
    }
    | {line for lines in _EXAMPLES.values() for line in lines}
)
EXAMPLES = [
    block
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
]


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) >= 5
    assert EXAMPLES


def stop(*_: object, **__: object) -> NoReturn:
    raise BadInput("this is as far as a documented command goes in a test")


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_parse(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each ends with an input error: the hub can't be reached or files are missing, but no flag is wrong."""
    monkeypatch.setattr("trundle.bench.rounds._measure", stop)  # it would start a process for each model
    monkeypatch.setattr("trundle.scale.shard_plan._resolved", stop)  # it would wait for the network
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    monkeypatch.setattr("warnings.simplefilter", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("trundle: ")
    assert "itself failed" not in said


DATABASE = "postgresql://me@localhost/search"


@pytest.mark.parametrize("example", EXAMPLES)
def test_documented_python_runs(
    example: str,
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    for module in re.findall(r"^(?:import|from) (\w+)", example, flags=re.MULTILINE):
        pytest.importorskip(module, reason=f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))
    if 'Encoder("small")' in example and 'output="small"' not in example:
        shutil.copytree(pico_folders("bert", 2), tmp_path / "small")
        export_model("small", to="onnx")
    if DATABASE in example:
        example = example.replace(DATABASE, request.getfixturevalue("postgres").url)
    if READY in example:
        shutil.copytree(pico_folders("bert", 2), tmp_path / READY)
        export_model(str(tmp_path / READY), to="onnx")
    (tmp_path / "texts.txt").write_text("\n".join(pico.different_texts(700)), encoding="utf-8")
    exec(compile(example.replace("path/to/model", str(pico_folders("bert", 2))), "example", "exec"), {})
    assert (tmp_path / (READY if READY in example else "small") / "modules.json").is_file()


def test_no_page_is_unfinished() -> None:
    for page in PAGES:
        assert not re.search(r"pending|[A-Z]+_TABLE|TODO", page.read_text(encoding="utf-8")), page.name


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            place = (page.parent / target).resolve()
            assert place.exists(), f"{page.name} → {target}"
            outside = page.parent != ROOT and not place.is_relative_to(ROOT / "docs")
            assert not outside, f"{page.name} → {target} is not on the site; write `{place.name}`"


def test_the_page_of_recipes_includes_each_of_them() -> None:
    page = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    included = re.findall(r'--8<-- "src/trundle/recipes/(.*)\.yaml"', page)
    assert included == recipe_names()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    for page in PAGES[2:]:
        assert f'"{page.relative_to(ROOT / "docs").as_posix()}"' in site, page.name


def test_the_tree_that_contributors_read_is_the_tree() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for room in (ROOT / "src" / "trundle").iterdir():
        public = room.is_dir() and not room.name.startswith("__") and room.name != "recipes"
        if public:
            assert f"{room.name}/ " in text, room.name


@pytest.mark.parametrize("folder", sorted((ROOT / "models").iterdir()), ids=lambda folder: folder.name)
def test_a_ready_model_is_as_large_as_its_name_says_and_encodes(folder: Path) -> None:
    encoder = Encoder(folder)
    graph = folder / encoder.graph.path
    most = int(folder.name.rpartition("-")[2].removesuffix("MB")) * 1_000_000
    assert graph.stat().st_size <= most
    near, same, far = encoder.encode(["How do I renew my passport?", "renewing a passport", "a cake recipe"])
    assert near @ same > near @ far
    assert str(encoder.dimensions) in (folder / "README.md").read_text(encoding="utf-8")
