"""Every recipe that comes with trundle runs, shortened, on a pico model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

import pico
from compressing import compress
from trundle.data.corpus import Corpus, read_corpus
from trundle.recipe import read_recipe, recipe_names

TRAINED = ("contrast.steps=2", "contrast.batch_size=4")
ALIGNED = ("align.steps=2", "align.texts=40")
PROMPT = 'contrast.query_prompt="ask:\\n"'
"""A pico model has room for 48 tokens."""
SHORT = {
    "half": ("bert", ("align.texts=40",)),
    "leaf": ("bert", ALIGNED),
    "leaf-paper": ("bert", ALIGNED),
    "l3prune": ("qwen2", ALIGNED),
    "l3prune-paper": ("llama", ("depth.pick=small", *TRAINED, PROMPT)),
    "nml": ("bert", ("width.steps=2", "width.texts=40")),
    "nml-paper": (
        "qwen2",
        ("width.steps=2", "width.batch_size=4", "width.accumulate=2", "contrast.accumulate=2", *TRAINED),
    ),
    "gaprune": ("bert", ("weights.samples=20", *TRAINED)),
    "gaprune-paper": ("bert", ("weights.samples=20", *TRAINED)),
    "vocabulary": ("bert", ("vocabulary.parameters=95%", *ALIGNED)),
    "vocabulary-paper": ("bert", ("vocabulary.fraction=80%", "vocabulary.clusters=4", "finetune.steps=2")),
}


def rows(about: str) -> str:
    texts = pico.different_texts(90)
    return "\n".join(
        json.dumps(
            {
                "query": f"{about} {text}",
                "positive": f"{text} and more",
                "negative": f"not {text}",
                "text": f"{about} {text}",
                "label": len(text) % 2,
            }
        )
        for text in texts
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "domain.jsonl").write_text(rows("small"), encoding="utf-8")
    (tmp_path / "general.jsonl").write_text(rows("large"), encoding="utf-8")
    return read_corpus([str(tmp_path / "domain.jsonl")], seed=0)


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_runs(
    name: str, corpus: Corpus, pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    family, changes = SHORT[name]
    if name.startswith("gaprune"):
        changes = (*changes, f"weights.general={tmp_path / 'general.jsonl'}")
    if name == "leaf-paper":
        changes = (*changes, f"align.teacher={pico_folders('mpnet')}")
    recipe = read_recipe(name, changes)
    run = compress(str(pico_folders(family)), recipe, output=tmp_path / "small", corpus=corpus)
    assert [step.call for step in run.steps] == list(recipe.calls)
    made = SentenceTransformer(
        str(tmp_path / "small"), device="cpu", trust_remote_code=name == "vocabulary-paper"
    )
    assert len(made.encode(pico.TEXTS)) == len(pico.TEXTS)


def test_layers_are_picked_with_the_prompts_of_the_training_that_follows(
    corpus: Corpus, pico_folders: Callable[[str], Path]
) -> None:
    plans = [
        compress(
            str(pico_folders("llama")),
            read_recipe("l3prune-paper", [f'contrast.query_prompt="{prompt}:\\n"']),
            corpus=corpus,
            dry_run=True,
        )
        .steps[0]
        .plan
        for prompt in ("ask", "ask", "find this")
    ]
    assert plans[0] == plans[1]
    assert plans[0]["losses"] != plans[2]["losses"]
