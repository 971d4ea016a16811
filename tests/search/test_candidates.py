"""The search space: sizes equal those of the methods, and dominated candidates are not tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from compressing import compress
from pico import TEXTS
from trundle.data.corpus import read_corpus
from trundle.errors import ImpossibleCut
from trundle.methods.contract import Context
from trundle.methods.vocabulary import VOCABULARY, _VocabularyOptions
from trundle.model.cost import cost
from trundle.model.load import load
from trundle.model.token_map import cut_with_map, read_vocabulary
from trundle.recipe import parse_recipe
from trundle.search import candidates
from trundle.search.candidates import _edge, _list_candidates, _promise, _smallest
from trundle.search.limits import _Budget

WIDTH = 32


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pico models have a few hundred tokens in all."""
    monkeypatch.setattr(candidates, "_FEWEST_TOKENS", 120)


@pytest.mark.usefixtures("few_tokens")
def test_predicted_sizes_equal_those_of_the_methods(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = pico_folders("bert")
    found = _list_candidates(load(folder), str(folder), dimensions=WIDTH, precisions=["float32"])
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{text} {number}" for text in TEXTS for number in range(30)))
    cut = [
        each
        for each in found
        if each.layers == 2 and each.neurons == 24 and each.tokens < each.whole.sizes["vocab"]
    ]
    static = [each for each in found if not each.layers]
    wanted = [*cut[:2], static[0], static[-1]]
    assert len(wanted) == 4
    for number, each in enumerate(wanted):
        steps = [*each.steps(), {"align": {"steps": 0}}]
        run = compress(
            str(folder),
            parse_recipe(json.dumps({"steps": steps}), name="a candidate"),
            output=tmp_path / str(number),
            corpus=read_corpus([str(texts)], seed=0),
        )
        assert run.after.parameters == each.cost.parameters
        assert run.after.file_bytes == each.cost.file_bytes == each.bytes


@pytest.mark.usefixtures("few_tokens")
def test_the_edge_fits_and_has_no_dominated_candidate(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    model = pico_model("bert")
    found = _list_candidates(model, "pico", dimensions=WIDTH, precisions=["int8"])
    limit = _Budget(parameters=int(0.6 * cost(model).parameters))
    kept = _edge(found, limit, {"pico": lambda _: 1.0})
    assert kept
    assert all(each.cost.parameters <= (limit.parameters or 0) for each in kept)
    fitting = [each for each in found if each.cost.parameters <= (limit.parameters or 0)]
    for each in kept:
        better = [
            other
            for other in fitting
            if other.kept != each.kept and all(a >= b for a, b in zip(other.kept, each.kept, strict=True))
        ]
        assert not better
    # Whatever fits is beaten or equalled by something on the edge.
    for each in fitting:
        assert any(all(a >= b for a, b in zip(best.kept, each.kept, strict=True)) for best in kept)


def test_names_and_steps_say_only_what_changes(pico_model: Callable[[str], SentenceTransformer]) -> None:
    found = _list_candidates(pico_model("bert"), "pico", dimensions=WIDTH, precisions=["int8"])
    whole = next(each for each in found if set(each.kept) == {Fraction(1)})
    assert whole.name == "4 of 4 layers, int8"
    assert whole.untouched
    assert whole.cost.parameters == cost(pico_model("bert")).parameters
    backbone = _list_candidates(
        pico_model("bert"), "pico", dimensions=WIDTH, precisions=["int8"], is_teacher=False
    )
    same = next(each for each in backbone if each.kept == whole.kept)
    assert same.steps() == []
    assert same.cost.parameters == whole.cost.parameters + WIDTH * WIDTH + WIDTH
    assert _smallest(found).bytes == min(each.bytes for each in found)


def test_a_vocabulary_counts_by_what_it_covers(pico_model: Callable[[str], SentenceTransformer]) -> None:
    found = _list_candidates(pico_model("bert"), "pico", dimensions=WIDTH, precisions=["int8"])
    whole = next(each for each in found if set(each.kept) == {Fraction(1)})
    assert _promise(whole, lambda _: 1.0) == 1.0
    assert _promise(whole, lambda _: 0.5) < _promise(whole, lambda _: 0.9) < 1.0


def test_int4_ranks_after_a_vocabulary_that_covers_nearly_all(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    whole, rounded = (
        _list_candidates(pico_model("bert"), "pico", dimensions=WIDTH, precisions=[precision])[0]
        for precision in ("int8", "int4")
    )
    assert whole.kept[:-1] == rounded.kept[:-1]
    assert _promise(whole, lambda _: 0.99) > _promise(rounded, lambda _: 1.0)
    assert _promise(whole, lambda _: 0.9) < _promise(rounded, lambda _: 1.0)


def test_bits_of_the_token_table_go_before_tokens(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("bert")
    found = {
        precision: _list_candidates(model, "pico", dimensions=WIDTH, precisions=[precision])
        for precision in ("int8", "int8+int4_tokens", "int4")
    }
    whole, table, matrices = (each[0] for each in found.values())
    assert whole.kept > table.kept > matrices.kept
    assert (whole.untouched, table.untouched, matrices.untouched) == (True, True, False)
    assert _promise(whole, lambda _: 1.0) > _promise(table, lambda _: 1.0) > _promise(matrices, lambda _: 1.0)
    assert _promise(table, lambda _: 1.0) > _promise(whole, lambda _: 0.99)


def test_tokens_that_no_text_becomes_leave_nothing_to_heal(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    whole = _list_candidates(pico_model("bert"), "pico", dimensions=WIDTH, precisions=["int4"])[0]
    some = whole.tokens - 5
    for tokens, options in ((some, {"keep": some, "heal": "none"}), (some - 1, {"keep": some - 1})):
        assert replace(whole, tokens=tokens, reachable=some).steps() == [{"vocabulary": options}]


def test_the_depth_of_a_decoder_is_left_to_the_linear_map(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    for family, options in (("bert", {}), ("llama", {"heal": "none"})):
        whole = _list_candidates(pico_model(family), "pico", dimensions=WIDTH, precisions=["int4"])[0]
        assert replace(whole, layers=1).steps() == [{"depth": {"keep": 1} | options}]


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "gpt2"])
def test_no_vocabulary_is_proposed_that_its_method_rejects(
    family: str,
    pico_model: Callable[[str], SentenceTransformer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(candidates, "_FEWEST_TOKENS", 1)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    model = pico_model(family)
    context = Context(original=model, source=None, corpus=read_corpus([str(texts)], seed=0))
    found = _list_candidates(model, "pico", dimensions=WIDTH, precisions=["int8"])
    least = min(each.tokens for each in found)
    assert least < read_vocabulary(model).size
    assert len(VOCABULARY.plan(model, _VocabularyOptions(keep=least), context).kept) <= least
    with pytest.raises(ImpossibleCut, match="must be kept"):
        VOCABULARY.plan(model, _VocabularyOptions(keep=least - 1), context)


def test_mapped_tokens_are_not_cut_again(
    pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "_FEWEST_TOKENS", 1)
    whole = pico_model("bert")
    kept = range(150)
    mapped = cut_with_map(whole, kept, [min(number, 149) for number in range(read_vocabulary(whole).size)])
    found = _list_candidates(mapped, "pico", dimensions=WIDTH, precisions=["int8"])
    assert {each.tokens for each in found} == {150}


def test_a_narrow_candidate_is_mapped_on_its_training_texts(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    found = _list_candidates(pico_model("bert"), "pico", dimensions=WIDTH, precisions=["int8"])
    narrow = next(each for each in found if each.width != 1 and each.layers == 4 and each.neurons == 48)
    assert narrow.steps() == [{"width": {"extract": "1/2"}}]
    assert narrow.steps(texts=2000) == [{"width": {"extract": "1/2", "texts": 2000}}]


@pytest.mark.usefixtures("few_tokens")
def test_tokens_fill_the_budget(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("bert")
    listed = partial(_list_candidates, model, "pico", dimensions=WIDTH, precisions=["int8"])
    sizes = {each.tokens: each.bytes for each in listed() if each.kept[0] == each.kept[2] == each.width == 1}
    *_, few, many = sorted(sizes)
    limit = (sizes[few] + sizes[many]) // 2
    found = _edge(listed(budget=_Budget(bytes=limit)), _Budget(bytes=limit), {"pico": lambda _: 1.0})
    whole = [each for each in found if each.kept[0] == each.kept[2] == each.width == 1]
    assert any(few < each.tokens < many and each.bytes > 0.98 * limit for each in whole)
    assert all(each.bytes <= limit for each in found)
