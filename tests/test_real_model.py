"""The main job on a real model and real text: all-MiniLM-L6-v2 and the documentation of installed packages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from trundle.data import environment_pairs, split_by_package
from trundle.data.corpus import Corpus, as_texts
from trundle.evaluate import KnownItemTask, evaluate
from trundle.measure import cost
from trundle.model import load, weight_bytes
from trundle.pipeline import compress
from trundle.recipe import parse_recipe

CUT = "depth: {keep: 3}"
RECIPE = f"steps: [{CUT}, align: {{steps: 0}}]"


@pytest.fixture(scope="module")
def corpus_and_pairs() -> tuple[Corpus, list[tuple[str, str]]]:
    train, held_out = split_by_package(environment_pairs(limit_per_package=12), 0.3, seed=0)
    measured = held_out[:120]
    corpus = Corpus(
        train=lambda: as_texts(train[:400]),
        validation=lambda: iter(()),
        held_out=lambda: as_texts(measured),
        facts=lambda: (),
    )
    return corpus, [(pair.query, pair.document) for pair in measured]


def test_a_cut_and_mapped_model_searches_the_index_it_came_from(
    minilm: Path, corpus_and_pairs: tuple[Corpus, list[tuple[str, str]]], tmp_path: Path
) -> None:
    corpus, pairs = corpus_and_pairs
    healed = compress(str(minilm), parse_recipe(RECIPE, name="x"), output=tmp_path / "small", corpus=corpus)
    bare = compress(str(minilm), parse_recipe(f"steps: [{CUT}]", name="x"), output=None, corpus=corpus)
    task = KnownItemTask(name="documentation", pairs=pairs)
    original, *_ = evaluate(healed.original, [task])
    _, with_map = evaluate(healed.result, [task], documents=healed.original)
    _, without = evaluate(bare.result, [task], documents=bare.original)
    assert with_map.mode == without.mode == "asymmetric"
    assert without.score < with_map.score <= original.score + 0.02
    assert with_map.score > 0.6 * original.score
    assert healed.fidelity is not None
    assert bare.fidelity is not None
    assert healed.fidelity.agreement_asymmetric > bare.fidelity.agreement_asymmetric
    assert healed.fidelity.cosine > bare.fidelity.cosine


def test_the_folder_and_its_costs_are_what_was_promised(
    minilm: Path, corpus_and_pairs: tuple[Corpus, list[tuple[str, str]]], tmp_path: Path
) -> None:
    corpus, _ = corpus_and_pairs
    recipe = parse_recipe(RECIPE, name="x")
    dry = compress(str(minilm), recipe, output=None, corpus=corpus, dry_run=True)
    real = compress(str(minilm), recipe, output=tmp_path / "small", corpus=corpus)
    assert dry.after.as_json() == real.after.as_json()
    assert dry.after.file_bytes == weight_bytes(tmp_path / "small")
    plain = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert sum(weight.numel() for weight in plain.parameters()) == dry.after.parameters
    texts = ["a query", "a somewhat longer text, with a comma"]
    np.testing.assert_allclose(plain.encode(texts), real.result.text(texts), atol=1e-6)


def test_the_real_folder_is_counted_exactly(minilm: Path) -> None:
    now = cost(load(minilm))
    assert now.parameters == 22_713_216
    assert now.file_bytes == pytest.approx(weight_bytes(minilm), rel=0.01)
