"""The main workflow on a real model and real texts: all-MiniLM-L6-v2 and installed documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from compressing import compress
from trundle.data.corpus import Corpus, as_texts
from trundle.data.environment import _Documented, environment_pairs, installed_packages, split_by_package
from trundle.evaluate.scoring import evaluate
from trundle.evaluate.tasks import KnownItemTask
from trundle.model.cost import cost
from trundle.model.load import load
from trundle.model.save import weight_bytes
from trundle.recipe import parse_recipe

BARE = "steps: [depth: {keep: 5, heal: none}]"
RECIPE = "steps: [depth: {keep: 5}, align: {steps: 0}]"
PAIRS = 50
"""Few, and short ones: one thread reads a dozen complete documents a second."""
PACKAGES = 40


def shortened(pair: _Documented) -> _Documented:
    return replace(pair, document=pair.document[:100])


def test_a_cut_and_mapped_model_searches_the_index_it_came_from(minilm: Path, tmp_path: Path) -> None:
    found = environment_pairs(packages=installed_packages()[:PACKAGES], limit_per_package=12)
    train, held_out = split_by_package(found, 0.3, seed=0)
    assert min(len(train) / 3, len(held_out)) >= PAIRS
    train, measured = ([shortened(pair) for pair in part] for part in (train[: 3 * PAIRS], held_out[:PAIRS]))
    corpus = Corpus(
        train=lambda: as_texts(train),
        validation=lambda: iter(()),
        held_out=lambda: as_texts(measured),
        facts=lambda: (),
    )
    recipe = parse_recipe(RECIPE, name="x")
    healed = compress(str(minilm), recipe, output=tmp_path / "small", corpus=corpus)
    bare = compress(str(minilm), parse_recipe(BARE, name="x"), output=None, corpus=corpus)
    task = KnownItemTask(name="documentation", pairs=[(pair.query, pair.document) for pair in measured])
    original, *_ = evaluate(healed.original, [task])
    _, with_map = evaluate(healed.result, [task], documents=healed.original)
    _, without = evaluate(bare.result, [task], documents=bare.original)
    assert with_map.mode == without.mode == "asymmetric"
    assert without.score < with_map.score
    assert with_map.score > 0.6 * original.score
    assert healed.fidelity is not None
    assert bare.fidelity is not None
    assert healed.fidelity.agreement_asymmetric > bare.fidelity.agreement_asymmetric
    assert healed.fidelity.cosine > bare.fidelity.cosine

    # The folder and its costs are what was promised.
    assert healed.after.file_bytes == weight_bytes(tmp_path / "small")
    plain = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert sum(weight.numel() for weight in plain.parameters()) == healed.after.parameters
    texts = ["a query", "a somewhat longer text, with a comma"]
    np.testing.assert_allclose(plain.encode(texts), healed.result.text(texts), atol=1e-5)


def test_the_real_folder_is_counted_exactly(minilm: Path) -> None:
    now = cost(load(minilm))
    assert now.parameters == 22_713_216
    assert now.file_bytes == pytest.approx(weight_bytes(minilm), rel=0.01)
