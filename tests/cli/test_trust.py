"""Every command that opens a model: code that comes with it runs with --trust-remote-code only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pico
from trundle.bench import rounds
from trundle.bench.child import _loader, _RequestHandler
from trundle.embedder import Vectors
from trundle.index.base import Wanted
from trundle.index.readers import build_index, create_store

Run = Callable[..., tuple[int, str, str]]
OUT, TEXTS = ("-o", "out"), ("--data", "texts.txt")
BUDGET = ("--budget", "2x", "--minutes", "0.1", *TEXTS, *OUT)
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "model"),
    "evaluate": ("evaluate", "model", "--teacher", "safe", *TEXTS),
    "evaluate, teacher": ("evaluate", "safe", "--teacher", "model", *TEXTS),
    "bench": ("bench", "safe", "model", "--rounds", "1", "--seconds", "0.01", "--threads", "1"),
    "pair": ("pair", "model", "--teacher", "safe", *OUT),
    "pair, teacher": ("pair", "safe", "--teacher", "model", *OUT),
    "export": ("export", "model", *OUT),
    "serve": ("serve", "model", "--port", "0"),
    "serve, teacher": ("serve", "graph", "--teacher", "model", "--port", "0"),
    "report, teacher": ("report", "made", "--teacher", "model", "--no-speed", *TEXTS),
    "index build": ("index", "build", "model", *TEXTS, *OUT),
    "index check": ("index", "check", "model", "--against", "index", "--sample", "50"),
    "index search": ("index", "search", "index", "a text"),
    "targets build": ("targets", "build", "model", *TEXTS, *OUT),
    "depth": ("depth", "model", "--keep", "2", *OUT),
    "width": ("width", "model", "--widths", "1/2", "--steps", "2", *TEXTS, *OUT),
    "vocabulary": ("vocabulary", "model", "--parameters", "97%", *TEXTS, *OUT),
    "weights": ("weights", "model", "--method", "magnitude", "--sparsity", "50%", *OUT),
    "align": ("align", "model", "--teacher", "safe", "--steps", "2", *TEXTS, *OUT),
    "align, teacher": ("align", "safe", "--teacher", "model", "--steps", "2", *TEXTS, *OUT),
    "contrast": ("contrast", "model", "--data", "pairs.jsonl", "--steps", "2", *OUT),
    "finetune": ("finetune", "model", "--data", "labels.jsonl", "--steps", "2", *OUT),
    "compress, recipe": ("compress", "model", "--recipe", "recipe.yaml", *TEXTS, *OUT),
    "compress, budget": ("compress", "model", *BUDGET),
    "compress, student": ("compress", "safe", "--student", "model", *BUDGET),
}


def constant_vectors(texts: Sequence[str]) -> Vectors:
    return np.ones((len(texts), 32), np.float32)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, pico_folders: Callable[[str], Path]) -> Path:
    """A model with code of its own, the same model without, and the files that the commands read."""
    root = tmp_path_factory.mktemp("trust")
    for name in ("model", "safe"):
        shutil.copytree(pico_folders("bert"), root / name)
    config = json.loads((root / "model" / "config.json").read_text())
    own = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    (root / "model" / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": own}))
    (root / "model" / "own.py").write_text(
        f"import pathlib\npathlib.Path({str(root / 'ran')!r}).touch()\nraise RuntimeError('stop')\n"
    )
    texts = pico.different_texts(200)
    rows = {
        "texts.txt": texts,
        "pairs.jsonl": [json.dumps({"query": text, "positive": text}) for text in texts],
        "labels.jsonl": [json.dumps({"text": text, "label": place % 3}) for place, text in enumerate(texts)],
        "recipe.yaml": ["steps: [{depth: {keep: 2}}]"],
    }
    for file, lines in rows.items():
        (root / file).write_text("\n".join(lines))
    with create_store(str(root / "index"), Wanted(model=str(root / "model"), dimensions=32)) as store:
        build_index(store, texts, constant_vectors)
    return root


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` loads a model in a new process, which would import torch for seconds."""

    @contextmanager
    def worker(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(ask=_RequestHandler(_loader, 0).answer)

    monkeypatch.setattr(rounds, "_worker", worker)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", COMMANDS)
def test_code_of_a_model_runs_on_request_only(
    name: str, place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for needed, command in {
        "made": ("depth", "safe", "--keep", "3", "-o", "made"),
        "graph": ("export", "safe", "-o", "graph"),
    }.items():
        if needed in COMMANDS[name] and not Path(needed).exists():
            assert run(*command)[0] == 0
    code, _, error = run(*COMMANDS[name])
    assert "pass --trust-remote-code" in error
    assert code == 2
    assert not Path("ran").exists()
    code, _, error = run(*COMMANDS[name], "--trust-remote-code")
    assert code != 0
    assert "stop" in error
    assert Path("ran").exists()
    Path("ran").unlink()
