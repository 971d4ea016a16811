"""The method vocabulary: kept tokens, maps against the original's rows, and errors."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import pico
from recorded_progress import RecordedProgress
from trundle.data.corpus import Corpus
from trundle.data.sampling import nearest
from trundle.data.texts import Text
from trundle.errors import BadInput, BadModel, ImpossibleCut
from trundle.methods import METHODS
from trundle.methods.contract import Applied, Context
from trundle.methods.vocabulary import _read_ranges, _VocabularyPlan, _write_ranges, scores
from trundle.methods.vocabulary.vocabulary import _tokens_left, list_sizes
from trundle.model.cost import cost
from trundle.model.load import load
from trundle.model.save import model_digest, save
from trundle.model.token_map import cut_with_map, has_token_map, read_vocabulary, token_vectors
from trundle.model.tokenizer import _least_likely, _tokenizer_content
from trundle.progress import SILENT
from trundle.recipe import make_options
from trundle.records import Lineage

Models = Callable[[str], SentenceTransformer]
TOOL = METHODS["vocabulary"]
FAMILIES = ("bert", "gpt2", "xlm-roberta")


def corpus(texts: Sequence[str], held_out: Sequence[str] = ()) -> Corpus:
    return Corpus(
        train=lambda: (Text(text=text) for text in texts),
        validation=lambda: iter(()),
        held_out=lambda: (Text(text=text) for text in held_out),
        facts=lambda: (),
    )


def run(
    model: SentenceTransformer, options: dict[str, Any], texts: Sequence[str] | None = pico.TEXTS
) -> tuple[_VocabularyPlan, Applied]:
    given_texts = None if texts is None else corpus(texts, held_out=pico.TEXTS[:3])
    context = Context(original=model, corpus=given_texts, seed=5)
    plan = TOOL.plan(model, make_options(TOOL, options), context)
    return plan, TOOL.apply(model, plan, context)


# scores


@given(st.sets(st.integers(0, 60)).map(lambda ids: tuple(sorted(ids))))
def test_ids_survive_being_written_as_ranges(ids: tuple[int, ...]) -> None:
    assert _read_ranges(_write_ranges(ids)) == ids


@settings(max_examples=50)
@given(st.integers(1, 1000), st.integers(2, 10**5), st.integers(0, 10**8), st.fractions(Fraction(1, 100), 1))
def test_a_share_of_parameters_is_never_exceeded(row: int, tokens: int, rest: int, share: Fraction) -> None:
    left = _tokens_left(row, tokens, rest, share)
    allowed = share * (row * tokens + rest)
    assert row * left + rest <= allowed < row * (left + 1) + rest


# the step


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("score", ["tfidf", "frequency", "attention", "cluster", "random"])
def test_every_score_meets_the_share_of_parameters(family: str, score: str, pico_model: Models) -> None:
    model = pico_model(family)
    plan, applied = run(model, {"parameters": "97%", "score": score})
    assert cost(applied.model).parameters <= Fraction(97, 100) * cost(model).parameters
    assert len(applied.model.tokenizer) == len(plan.kept)
    assert plan.coverage is not None
    assert 0 < plan.coverage <= 1
    assert applied.facts["tokens_per_text_after"] >= applied.facts["tokens_per_text_before"]


@pytest.mark.parametrize(("fraction", "kept"), [("75%", 300), ("5/7", 285), (0.9, 360)])
def test_a_share_of_the_tokens_is_exact(fraction: object, kept: int, pico_model: Models) -> None:
    plan, applied = run(pico_model("llama"), {"fraction": fraction, "score": "random"})
    assert plan.of == 400
    assert len(plan.kept) == len(applied.model.tokenizer) == kept


@pytest.mark.parametrize("score", ["cluster", "random"])
def test_scores_that_need_no_texts(score: str, pico_model: Models) -> None:
    plan, _ = run(pico_model("gpt2"), {"keep": 300, "score": score}, texts=None)
    assert len(plan.kept) == 300
    assert plan.coverage is None


@pytest.mark.parametrize("family", FAMILIES)
def test_seen_tokenises_its_texts_exactly_as_before(family: str, pico_model: Models) -> None:
    model = pico_model(family)
    texts = pico.TEXTS[:2]
    plan, applied = run(model, {"score": "seen"}, texts=texts)
    assert len(plan.kept) < plan.of
    assert plan.coverage == 1
    np.testing.assert_allclose(applied.model.encode(texts), model.encode(texts), atol=1e-6)


def test_tokens_are_counted_in_a_sample_of_all_texts_in_one_pass(pico_model: Models) -> None:
    texts = [*["the quick fox"] * 300, *["a small model"] * 300]
    passes: list[Sequence[str]] = []

    def train() -> Iterator[Text]:
        passes.append(texts)
        return (Text(text=text) for text in texts)

    model = pico_model("bert")
    for score in ("tfidf", "attention"):
        context = Context(original=model, corpus=replace(corpus(texts), train=train))
        plan = TOOL.plan(model, make_options(TOOL, {"keep": 150, "texts": 20, "score": score}), context)
        kept = {read_vocabulary(model).tokens[number] for number in plan.kept}
        assert {"quick", "model"} <= kept
        assert plan.texts == 20
        assert "of tokens in 20 texts" in str(plan)
    assert len(passes) == 2


def test_the_runs_of_a_search_count_tokens_once(pico_model: Models) -> None:
    model, opened, tokenising = pico_model("bert"), dict[str, Any](), RecordedProgress()
    for keep, seed, times in ((150, 0, 1), (120, 0, 1), (120, 1, 2)):
        context = Context(
            original=model, corpus=corpus(pico.TEXTS), seed=seed, opened=opened, progress=tokenising
        )
        options = make_options(TOOL, {"keep": keep})
        found = TOOL.plan(model, options, context)
        assert found.kept == TOOL.plan(model, options, replace(context, opened={}, progress=SILENT)).kept
        assert tokenising.tasks == [("tokenising texts", None)] * times


def test_attention_may_be_measured_in_a_model_trained_on_the_task(
    pico_model: Models, pico_folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def queries(of: SentenceTransformer) -> torch.Tensor:
        return next(weight for name, weight in of.named_parameters() if "query" in name).detach()

    def noted(of: SentenceTransformer, *rest: Any) -> Any:
        measured.append(float(queries(of).abs().sum()))
        return plain(of, *rest)

    measured: list[float] = []
    plain = scores._attention_scores
    monkeypatch.setattr(scores, "_attention_scores", noted)
    model, options = pico_model("bert"), {"keep": 150, "score": "attention"}
    tuned = copy.deepcopy(model)
    queries(tuned).mul_(8)
    tuned.save_pretrained(str(tmp_path / "tuned"))
    for more in ({}, {"scored_by": str(tmp_path / "tuned")}):
        run(model, options | more)
    assert measured[1] == pytest.approx(8 * measured[0])
    with pytest.raises(BadInput, match="tokenizers differ"):
        run(model, options | {"scored_by": str(pico_folders("gpt2"))})
    with pytest.raises(BadInput, match="add score: attention"):
        run(model, options | {"score": "tfidf", "scored_by": str(tmp_path / "tuned")})


def test_seen_counts_all_texts(pico_model: Models) -> None:
    plan, _ = run(pico_model("bert"), {"score": "seen", "texts": 1}, texts=pico.TEXTS)
    assert (plan.texts, plan.coverage) == (len(pico.TEXTS), 1)


def test_a_number_above_the_seen_tokens_is_filled_up(pico_model: Models) -> None:
    plan, _ = run(pico_model("gpt2"), {"keep": 390}, texts=["a"])
    assert len(plan.kept) == 390


def test_unseen_characters_can_be_removed(pico_model: Models) -> None:
    model = pico_model("bert")
    all_of_them, _ = run(model, {"score": "seen"}, texts=["the quick fox"])
    few, applied = run(model, {"score": "seen", "characters": "seen"}, texts=["the quick fox"])
    assert len(few.kept) < len(all_of_them.kept)
    tokens = set(applied.model.tokenizer.get_vocab())
    assert {"q", "##q", "x", "##x"} & set(model.tokenizer.get_vocab()) <= tokens
    assert "東" in model.tokenizer.get_vocab()
    assert "東" not in tokens


def test_unseen_characters_make_room_for_what_occurs(pico_model: Models) -> None:
    """By default characters displace no token that occurs, but ASCII and the texts' characters are kept."""
    model = pico_model("bert")
    before = model.tokenizer.get_vocab()
    texts = ["the quick brown fox"]
    least, _ = run(model, {"keep": 76, "characters": "all"}, texts=texts)
    assert before["東"] in least.kept
    plan, applied = run(model, {"keep": 76}, texts=texts)
    assert before["東"] not in plan.kept
    assert plan.characters_lost
    assert f"{plan.characters_lost} characters that never occur" in str(plan)
    assert all(number in plan.kept for token, number in before.items() if len(token) == 1 and token.isascii())
    assert applied.model.tokenizer.tokenize(texts[0]) == model.tokenizer.tokenize(texts[0])


def test_unseen_characters_stay_where_there_is_room(pico_model: Models) -> None:
    model = pico_model("bert")
    before = model.tokenizer.get_vocab()
    plan, _ = run(model, {"keep": len(before) - 2}, texts=["the quick brown fox"])
    assert before["東"] in plan.kept
    assert not plan.characters_lost
    assert "characters" not in str(plan)


def test_the_least_likely_piece_stays_even_unseen(pico_model: Models) -> None:
    """A Unigram tokenizer scores unknown characters by it, so other texts would be split differently."""
    model = pico_model("xlm-roberta")
    least = _least_likely(_tokenizer_content(model.tokenizer))
    piece = model.tokenizer.convert_ids_to_tokens(least)  # one of several that are equally unlikely
    texts = [text for text in ("the quick fox", "lazy", "3") if piece not in text]
    plan, _ = run(model, {"score": "seen", "characters": "seen"}, texts=texts)
    assert least in plan.kept
    assert plan.characters_lost


def test_byte_tokens_are_never_removed(pico_model: Models) -> None:
    _, applied = run(pico_model("gpt2"), {"score": "seen", "characters": "seen"}, texts=["a"])
    text = "anything at all: 東京 🙂"
    ids = applied.model.tokenizer(text)["input_ids"]
    assert applied.model.tokenizer.decode(ids) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_tokenised_as_before(family: str, pico_folders: Callable[[str], Path]) -> None:
    prompts = {"query": "documents are longer than: ", "document": "queries: "}
    model = SentenceTransformer(str(pico_folders(family)), device="cpu", prompts=prompts)
    _, applied = run(model, {"score": "seen"}, texts=["fox"])
    for prompt in prompts.values():
        assert applied.model.tokenizer.tokenize(prompt) == model.tokenizer.tokenize(prompt)
    assert applied.model.prompts == model.prompts


def test_config_ids_follow_their_tokens(pico_folders: Callable[[str], Path]) -> None:
    """Special tokens at the end of the vocabulary, several end tokens, and one that no config should name."""
    model = SentenceTransformer(str(pico_folders("llama")), device="cpu")
    tokenizer, config = model.tokenizer, model[0].model.config
    last = len(tokenizer) - 1
    tokenizer.backend_tokenizer.add_special_tokens([tokenizer.convert_ids_to_tokens(last)])
    config.eos_token_id, config.decoder_start_token_id = [3, last], last - 1
    plan, applied = run(model, {"score": "seen"}, texts=["a"])
    assert last in plan.kept
    assert last - 1 not in plan.kept
    small = applied.model[0].model.config
    assert small.eos_token_id == [plan.kept.index(3), plan.kept.index(last)]
    assert small.decoder_start_token_id is None
    assert small.pad_token_id == plan.kept.index(0)
    assert small.vocab_size == len(plan.kept)


def test_positions_do_not_move_with_the_pad_token(pico_folders: Callable[[str], Path]) -> None:
    """RoBERTa counts positions from its pad token's id: with unused tokens before it, they must stay, too."""
    model = SentenceTransformer(str(pico_folders("roberta")), device="cpu")
    model[0].model.config.pad_token_id = 9
    model[0].model.embeddings.padding_idx = 9
    plan, applied = run(model, {"score": "seen"}, texts=pico.TEXTS[:2])
    assert plan.kept[:10] == tuple(range(10))
    np.testing.assert_allclose(applied.model.encode(pico.TEXTS[:2]), model.encode(pico.TEXTS[:2]), atol=1e-6)


def test_rows_without_a_token_are_removed_first(pico_folders: Callable[[str], Path]) -> None:
    """Some models have more rows than tokens, to round the number up."""
    model = SentenceTransformer(str(pico_folders("qwen2")), device="cpu")
    model[0].model.resize_token_embeddings(448, mean_resizing=False)
    plan, applied = run(model, {"keep": 420})
    assert plan.of == 448
    assert plan.kept == tuple(range(400))
    np.testing.assert_allclose(applied.model.encode(pico.TEXTS), model.encode(pico.TEXTS), atol=1e-6)


def test_tokens_that_no_text_becomes_are_removed_first(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """BERT's [unused1] is split at its brackets before it is looked up."""
    folder = Path(shutil.copytree(pico_folders("bert"), tmp_path / "model"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    first = next(
        number for token, number in vocab.items() if len(token.removeprefix("##")) > 2 and number > 9
    )
    content["model"]["vocab"] = {
        "[unused1]" if number == first else token: number for token, number in vocab.items()
    }
    file.write_text(json.dumps(content), encoding="utf-8")
    model = SentenceTransformer(str(folder), device="cpu")
    assert first not in model.tokenizer("the [unused1] token")["input_ids"]
    assert read_vocabulary(model).unreachable() == {first}
    plan, _ = run(model, {"keep": len(vocab) - 1}, texts=["a"])
    assert set(range(len(vocab))) - set(plan.kept) == {first}


@pytest.mark.parametrize("oov", ["decompose", "cluster", "unk"])
@pytest.mark.parametrize("keep", [150, 240])
def test_token_ids_may_have_gaps(
    oov: str, keep: int, pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Some tokenizers count on from a round number, and no token has the ids before it."""
    folder = Path(shutil.copytree(pico_folders("bert"), tmp_path / "model"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: number + 20 * (number > 100) for token, number in vocab.items()}
    file.write_text(json.dumps(content), encoding="utf-8")
    model = SentenceTransformer(str(folder), device="cpu")
    model[0].model.resize_token_embeddings(len(vocab) + 20, mean_resizing=False)
    with torch.no_grad():
        model[0].model.get_input_embeddings().weight[101:121] = torch.nan
    options = {"keep": keep, "oov": oov} | ({"clusters": 5} if oov == "cluster" else {})
    plan, applied = run(model, options)
    assert len(plan.kept) == min(keep, len(vocab))
    assert not set(plan.kept) & set(range(101, 121))
    assert np.isfinite(applied.model.encode(pico.TEXTS)).all()
    context = Context(original=model, corpus=corpus(pico.TEXTS[:4], held_out=pico.TEXTS[4:]))
    assert list_sizes(model, context).rows[1].coverage == 1


def test_listed_sizes_equal_those_of_the_method(pico_model: Models) -> None:
    model = pico_model("gpt2")
    context = Context(original=model, corpus=corpus(pico.TEXTS[:4], held_out=pico.TEXTS[4:]))
    sizes = list_sizes(model, context)
    keeps = [row.keep for row in sizes.rows]
    assert keeps == sorted(keeps, reverse=True)
    assert sizes.rows[0].keep == len(model.tokenizer)
    assert sizes.rows[0].coverage == sizes.rows[1].coverage == 1
    for row in sizes.rows:
        assert row.lengths is not None
        plan = TOOL.plan(model, make_options(TOOL, {"keep": row.keep}), context)
        if plan.coverage is not None:
            assert (len(plan.kept), plan.coverage) == (row.keep, row.coverage)
            assert row.lost == plan.lost[: len(row.lost)]
            assert TOOL.forecast(model, plan).as_json() == row.after.as_json()
            facts = TOOL.apply(model, plan, context).facts
            assert facts["tokens_per_text_after"] == round(row.lengths.after, 3)
    assert sizes.as_json()["sizes"][-1]["why"] == "the least"
    with pytest.raises(BadInput, match="measured on texts"):
        list_sizes(model, Context(original=model))


# maps


@pytest.mark.parametrize(
    ("family", "oov"),
    [
        *((family, "cluster") for family in FAMILIES),
        *((family, "unk") for family in (*FAMILIES, "mpnet", "modernbert", "llama")),
    ],
)
def test_maps_give_what_the_original_gives_for_the_mapped_tokens(
    family: str, oov: str, pico_model: Models, tmp_path: Path
) -> None:
    """The reference is the full model with the removed ids replaced by hand."""
    model = pico_model(family)
    plan, applied = run(model, {"keep": 60, "oov": oov, **({"clusters": 5} if oov == "cluster" else {})})
    small = applied.model
    assert has_token_map(small)
    assert len(plan.kept) == 60
    vocabulary = read_vocabulary(model)
    ends = [vocabulary.unknown] if oov == "unk" else list(plan.representatives)
    places = nearest(token_vectors(model, range(vocabulary.size)), token_vectors(model, ends))
    stands_for = [n if n in plan.kept else ends[places[n]] for n in range(vocabulary.size)]
    features = model.preprocess(pico.TEXTS)
    features["input_ids"] = torch.tensor(stands_for)[features["input_ids"]]
    with torch.no_grad():
        expected = model(features)["sentence_embedding"].numpy()
    np.testing.assert_allclose(small.encode(pico.TEXTS), expected, atol=1e-5)

    # a save and both ways of loading give the same vectors; same plan, same bytes
    one = save(small, tmp_path / "one", lineage=Lineage(source="x"), card="")
    np.testing.assert_allclose(
        load(one, device="cpu").encode(pico.TEXTS), small.encode(pico.TEXTS), atol=1e-6
    )
    plain = SentenceTransformer(str(one), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(plain.encode(pico.TEXTS), small.encode(pico.TEXTS), atol=1e-6)
    replayed = TOOL.plans.model_validate_json(plan.model_dump_json())
    assert replayed == plan
    again = TOOL.apply(model, replayed, Context(original=model)).model
    assert model_digest(again) == model_digest(small) == model_digest(plain)
    assert TOOL.forecast(model, plan).as_json() == cost(small).as_json()


@pytest.mark.parametrize("oov", ["cluster", "unk"])
def test_maps_report_the_share_of_mapped_tokens_in_held_out_texts(oov: str, pico_model: Models) -> None:
    """Counted by hand, token by token."""
    model, told = pico_model("xlm-roberta"), RecordedProgress()
    texts = [*pico.TEXTS[:3], "東京 ☃"]

    context = Context(original=model, corpus=corpus(pico.TEXTS, texts), seed=5, progress=told)
    plan = TOOL.plan(model, make_options(TOOL, {"keep": 60, "oov": oov, "clusters": 5}), context)
    facts = TOOL.apply(model, plan, context).facts
    vocabulary = read_vocabulary(model)
    ids = [n for text in texts for n in vocabulary.backend.encode(text, add_special_tokens=False).ids]
    gone = sum(number not in plan.kept for number in ids) / len(ids)
    unknown = ids.count(vocabulary.unknown) / len(ids)
    assert gone > 0
    assert unknown > 0
    assert facts["tokens_per_text_after"] == facts["tokens_per_text_before"] == len(ids) / len(texts)
    assert facts["unknown_share_before"] == pytest.approx(unknown, abs=1e-6)
    assert facts["unknown_share_after"] == pytest.approx(unknown + gone * (oov == "unk"), abs=1e-6)
    assert facts["stand_in_share"] == pytest.approx(gone * (oov == "cluster"), abs=1e-6)
    assert f"{gone if oov == 'cluster' else 0:.2%} replaced" in told.lines[-1]


def test_a_traced_graph_contains_the_map(pico_model: Models) -> None:
    model = pico_model("bert")
    _, applied = run(model, {"keep": 60, "oov": "unk"})
    features = applied.model[0].preprocess(pico.TEXTS[:2])
    ids, mask = features["input_ids"], features["attention_mask"]

    class Vectors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = applied.model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.body({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
            return out

    with torch.no_grad():
        graph = torch.export.export(Vectors().eval(), (ids, mask))
        traced = graph.module()(ids, mask)
    assert any("token_map" in name for name in graph.state_dict)
    np.testing.assert_allclose(traced.numpy(), applied.model.encode(pico.TEXTS[:2]), atol=1e-6)


def test_without_trundle_the_folder_names_the_missing_module(
    pico_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, applied = run(pico_model("bert"), {"keep": 60, "oov": "unk"})
    folder = save(applied.model, tmp_path / "mapped", lineage=Lineage(source="x"), card="")
    assert (
        json.loads((folder / "modules.json").read_text())[0]["type"]
        == "trundle.model.token_map.MappedTransformer"
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(folder), device="cpu")
    monkeypatch.setitem(sys.modules, "trundle.model.token_map", None)  # as if it could not be found
    with pytest.raises(ImportError, match="trundle"):
        SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)


def test_a_damaged_map_is_rejected(pico_model: Models, tmp_path: Path) -> None:
    _, applied = run(pico_model("bert"), {"keep": 60, "oov": "unk"})
    folder = save(applied.model, tmp_path / "mapped", lineage=Lineage(source="x"), card="")
    np.save(folder / "token_map.npy", np.array([10**6], dtype=np.int32))
    with pytest.raises(BadModel, match="beyond the model's vocabulary"):
        load(folder)
    (folder / "token_map.npy").unlink()
    with pytest.raises(BadModel, match=r"no token_map\.npy"):
        load(folder)


def test_mapped_models_can_be_cut_and_aligned_but_not_mapped_twice(pico_model: Models) -> None:
    model = pico_model("bert")
    _, applied = run(model, {"keep": 60, "oov": "unk"})
    depth, align = METHODS["depth"], METHODS["align"]
    shallow = depth.apply(
        applied.model, depth.plans(blocks=(0, 1), of=pico.LAYERS), Context(original=model)
    ).model
    assert has_token_map(shallow)
    context = Context(original=model, corpus=corpus([f"{text} {n}" for n in range(3) for text in pico.TEXTS]))
    plan = align.plan(shallow, make_options(align, {"steps": 0}), context)
    assert has_token_map(align.apply(shallow, plan, context).model)
    for oov in ("unk", "decompose"):
        with pytest.raises(ImpossibleCut, match="mapped already"):
            run(shallow, {"keep": 50, "oov": oov})
    with pytest.raises(ImpossibleCut, match="mapped already"):
        cut_with_map(shallow, range(50), range(50))


# bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "choose how much to keep"),
        ({"keep": 100, "parameters": "90%"}, "leave one of them out"),
        ({"fraction": "50%", "parameters": "90%"}, "fraction and parameters exclude each other"),
        ({"keep": 100, "fraction": "50%"}, "leave one of them out"),
        ({"keep": 100, "score": "seen"}, "leave keep out"),
        ({"fraction": "50%", "score": "seen"}, "leave fraction out"),
        ({"fraction": "0%"}, "share of tokens to keep must be over 0 and at most 1"),
        ({"fraction": "1%"}, "keep at least 76"),
        ({"parameters": "0%"}, "over 0 and at most 1"),
        ({"parameters": "150%"}, "over 0 and at most 1"),
        ({"keep": 10}, "keep at least 76, which is 87.8% of the parameters"),
        ({"parameters": "50%"}, "keep at least 76"),
        ({"keep": 9999}, "it can't keep 9,999; keep fewer"),
        ({"keep": 40, "oov": "cluster"}, "keep at least 5"),
    ],
)
def test_impossible_options_say_what_is_possible(
    options: dict[str, Any], says: str, pico_model: Models
) -> None:
    with pytest.raises(ImpossibleCut, match=says):
        run(pico_model("bert"), options)


@pytest.mark.parametrize("texts", [None, pico.TEXTS])
@pytest.mark.parametrize("oov", ["decompose", "cluster", "unk"])
def test_the_least_is_checked_with_and_without_texts(
    texts: Sequence[str] | None, oov: str, pico_model: Models
) -> None:
    with pytest.raises(ImpossibleCut, match="keep at least"):
        run(pico_model("bert"), {"keep": 3, "score": "random", "oov": oov}, texts=texts)


def test_characters_that_occur_are_only_known_with_texts(pico_model: Models) -> None:
    options = {"keep": 20, "score": "random", "characters": "seen"}
    with pytest.raises(BadInput, match="characters: seen needs texts"):
        run(pico_model("bert"), options, texts=None)
    with pytest.raises(ImpossibleCut, match="keep at least"):
        run(pico_model("bert"), options)


def test_the_least_that_is_named_is_possible(pico_model: Models) -> None:
    plan, _ = run(pico_model("bert"), {"keep": 76})
    assert len(plan.kept) == 76


def test_no_texts_are_rejected(pico_model: Models) -> None:
    with pytest.raises(BadInput, match="pass them with --data"):
        run(pico_model("bert"), {"keep": 100}, texts=None)
    with pytest.raises(BadInput, match="no text to count"):
        run(pico_model("bert"), {"keep": 100}, texts=[])


def test_texts_of_unknown_tokens_are_rejected(pico_model: Models) -> None:
    with pytest.raises(BadInput, match="a language the model knows"):
        run(pico_model("bert"), {"keep": 100}, texts=["Привет мир", "Как дела"])


def test_a_tokenizer_larger_than_its_model_is_rejected(pico_folders: Callable[[str], Path]) -> None:
    model = SentenceTransformer(str(pico_folders("llama")), device="cpu")
    model.tokenizer.add_tokens(["<too far>"])
    with pytest.raises(BadModel, match="use the model's own tokenizer"):
        run(model, {"keep": 300})


def test_a_special_token_without_embedding_is_removed(pico_folders: Callable[[str], Path]) -> None:
    """Gemma 3's tokenizer has one for images."""
    model = SentenceTransformer(str(pico_folders("llama")), device="cpu")
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    texts = pico.TEXTS[:2]
    _, applied = run(model, {"score": "seen"}, texts=texts)
    assert "<image>" not in applied.model.tokenizer.get_vocab()
    np.testing.assert_allclose(applied.model.encode(texts), model.encode(texts), atol=1e-6)


def test_mapping_to_unk_needs_an_unknown_token(pico_folders: Callable[[str], Path]) -> None:
    model = SentenceTransformer(str(pico_folders("gpt2")), device="cpu")
    model.tokenizer.unk_token = None
    with pytest.raises(ImpossibleCut, match="no unknown token"):
        run(model, {"keep": 300, "oov": "unk"})


def test_keeping_more_tokens_than_there_are_changes_nothing(pico_model: Models) -> None:
    model = pico_model("bert")
    plan, applied = run(model, {"parameters": 1}, texts=None)
    assert "nothing to cut" in str(plan)
    np.testing.assert_array_equal(applied.model.encode(pico.TEXTS), model.encode(pico.TEXTS))
