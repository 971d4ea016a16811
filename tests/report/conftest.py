"""Runs that trundle made from pico models, and a report that measured them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import pico
from compressing import compress
from trundle.data.corpus import read_corpus
from trundle.recipe import parse_recipe
from trundle.report.contents import _Report
from trundle.report.report import make_report

RECIPE = """
steps:
  - vocabulary: {keep: 120}
  - depth: {pick: small}
  - align: {steps: 6, batch_size: 8, margin: true}
"""
NASTY = '<script>alert("x")</script> "><img src=x onerror=alert(1)> & a text'

PLANNING = {
    "budget": {"bytes": 100_000, "parameters": None, "milliseconds": 5.0},
    "teacher": {"parameters": 40_000, "bytes": 160_000, "milliseconds": 9.0},
    "candidates": [
        {
            "name": "2 layers <marquee>",
            "steps": [{"depth": {"keep": 2}}],
            "parameters": 20_000,
            "bytes": 80_000,
            "milliseconds": 4.0,
            "outcome": "chosen",
            "rungs": [{"steps": 10, "distance": 0.5}, {"steps": 20, "distance": 0.4}],
        },
        {
            "name": "1 layer",
            "steps": [],
            "parameters": 10_000,
            "bytes": 40_000,
            "milliseconds": 2.0,
            "outcome": "given up",
            "rungs": [{"steps": 10, "distance": 0.6}],
        },
        {
            "name": "3 layers",
            "steps": [],
            "parameters": 30_000,
            "bytes": 120_000,
            "milliseconds": 6.0,
            "outcome": "over the budget",
            "rungs": [],
        },
    ],
    "chosen": "2 layers <marquee>",
    "predicted": {"bytes": 80_000, "milliseconds": 4.0},
    "measured": {"bytes": 80_400, "milliseconds": 4.4},
    "remarks": ["there is no int8 graph, <i>alas"],
}
WEIGHTS = {
    "says": "half",
    "alignment": {"counts": [10, 0, 150, 240], "shared": 240, "specific": 150, "conflicting": 10},
    "matrices": [
        {"layer": layer, "matrix": matrix, "weights": 100, "kept": 30 + 20 * layer}
        for layer in range(2)
        for matrix in ("attention.output.dense", "output.dense")
    ],
}


@pytest.fixture(scope="session")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of which some would be markup, if a page let them."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    lines = [f"{text} {number}" for number in range(60) for text in pico.TEXTS]
    path.write_text("\n".join([*lines, *(f"{NASTY} {number}" for number in range(60))]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tuples_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuples") / "tuples.jsonl"
    rows = [
        {"query": f"{text.split()[0]} {number}", "positive": f"{text} {number}"}
        for number in range(40)
        for text in pico.TEXTS
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def run_folder(
    tmp_path_factory: pytest.TempPathFactory, pico_folders: Callable[[str], Path], tuples_file: Path
) -> Path:
    """A run with every kind of file; those of the search and of weights are written by hand."""
    folder = tmp_path_factory.mktemp("runs") / "small <i>"
    recipe = parse_recipe(RECIPE, name="all")
    compress(str(pico_folders("bert")), recipe, output=folder, corpus=read_corpus([str(tuples_file)], seed=0))
    (folder / "planning.json").write_text(json.dumps(PLANNING), encoding="utf-8")
    (folder / "weights.json").write_text(json.dumps(WEIGHTS), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def bare_folder(tmp_path_factory: pytest.TempPathFactory, pico_folders: Callable[[str], Path]) -> Path:
    """A run that only cut: no texts, no training."""
    folder = tmp_path_factory.mktemp("runs") / "bare"
    compress(str(pico_folders("bert")), parse_recipe("steps: [depth: {keep: 2}]", name="cut"), output=folder)
    return folder


@pytest.fixture(scope="session")
def full_report(run_folder: Path, bare_folder: Path, texts_file: Path) -> _Report:
    """Two runs of one teacher, measured; not raced, which takes long and is tested where bench is."""
    return make_report([run_folder, bare_folder], data=[str(texts_file)], speed=False)


@pytest.fixture
def another_run(tmp_path: Path, bare_folder: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(bare_folder, tmp_path / "run")
    return tmp_path / "run"
