"""The method contrast: what it changes, what it keeps, and what it rejects."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

import pico
from compressing import compress
from trundle.data.corpus import Corpus, read_corpus
from trundle.errors import BadInput, BadRecipe, UserError
from trundle.methods import METHODS
from trundle.methods.contract import Applied, Context
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _file_prompts, _frozen_copy, prepared
from trundle.model.heads import _attends_both_ways
from trundle.model.load import load
from trundle.model.save import save
from trundle.model.surgery import transformer_of
from trundle.recipe import make_options, parse_recipe
from trundle.records import Lineage

PicoModel = Callable[[str], SentenceTransformer]
SHORT = {"steps": 2, "batch_size": 4, "warmup": 0}
TOOL = METHODS["contrast"]


def write_tuples(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder / name)


def some_rows(count: int, about: str) -> list[dict[str, Any]]:
    words = " ".join(pico.TEXTS).split()
    return [
        {
            "query": f"{about} {i} {words[i % len(words)]}",
            "positive": f"{words[i % len(words)]} says more about {about} {i}",
            "negative": f"{words[(i + 7) % len(words)]} is another {about}",
        }
        for i in range(count)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    sources = [
        write_tuples(tmp_path, f"{name}.jsonl", some_rows(60, name)) for name in ("layers", "documents")
    ]
    return read_corpus(sources, seed=0)


def run(model: SentenceTransformer, corpus: Corpus | None, tmp_path: Path, **options: Any) -> Applied:
    context = Context(original=model, corpus=corpus, cache=tmp_path / "cache")
    plan = TOOL.plan(model, make_options(TOOL, SHORT | options), context)
    return TOOL.apply(model, plan, context)


def test_validation_tuples_are_neither_trained_on_nor_held_out(corpus: Corpus):
    learned = {text for e in corpus.examples() for text in (e.query, e.positive, *e.negatives)}
    measured = {text.text for text in corpus.held_out()}
    chosen_by = list(corpus.validation_examples())
    assert chosen_by
    assert not {example.query for example in chosen_by} & learned
    assert not {t for e in chosen_by for t in (e.query, e.positive, *e.negatives)} & measured


def test_training_brings_queries_closer_to_their_answers(
    pico_model: PicoModel, corpus: Corpus, tmp_path: Path
):
    for way in ("full", "lora"):
        applied = run(
            pico_model("bert", 1), corpus, tmp_path, train=way, steps=20, learning_rate=3e-3, batch_size=8
        )
        lines = [json.loads(line) for line in applied.files["contrast.jsonl"].splitlines()]
        found = [line["validation"] for line in lines if line["validation"] is not None]
        assert min(found) < 0.8 * found[0], way
        assert applied.facts["validation"] == min(found)
        assert applied.facts["sources"] == ["documents.jsonl", "layers.jsonl"]


def test_adapters_are_trained_on_a_frozen_base_in_half_precision(
    pico_model: PicoModel, corpus: Corpus, tmp_path: Path
):
    model = pico_model("qwen2")
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    half, same = (_frozen_copy(model, precision) for precision in ("bf16", "fp32"))
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in half.buffers()} == {torch.float32}
    for ours, theirs in zip(same.parameters(), model.parameters(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
    trained = run(model, corpus, tmp_path, precision="bf16", learning_rate=1e-2).model
    moved = set()
    for name, weight in trained.named_parameters():
        assert weight.dtype == torch.float32
        moved |= set() if torch.equal(weight, before[name]) else {name.rsplit(".", 2)[-2]}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_decoders_pooling_and_attention_survive_a_plain_load(
    pico_model: PicoModel, corpus: Corpus, tmp_path: Path
):
    asked: dict[str, Any] = {"pooling": "last", "attention": "bidirectional", "query_prompt": "question:\n"}
    asked |= {"pool_prompts": False}
    applied = run(pico_model("qwen2"), corpus, tmp_path, **asked)
    folder = save(applied.model, tmp_path / "saved", lineage=Lineage(source="x"), card="")
    plain = SentenceTransformer(str(folder), device="cpu")
    assert plain[1].pooling_mode == "lasttoken"
    assert not plain[1].include_prompt
    assert plain.tokenizer("a")["input_ids"][-1] == plain.tokenizer.eos_token_id
    assert _attends_both_ways(transformer_of(plain).model)
    assert plain.prompts["query"] == "question:\n"
    assert plain.max_seq_length == pico_model("qwen2").max_seq_length
    np.testing.assert_allclose(
        plain.encode_query(pico.TEXTS), applied.model.encode_query(pico.TEXTS), atol=1e-6
    )


def test_a_prompt_that_takes_the_first_word_out_of_pooling_is_rejected(
    pico_model: PicoModel, corpus: Corpus, tmp_path: Path
):
    with pytest.raises(BadInput, match="merges with the first word"):
        run(pico_model("qwen2"), corpus, tmp_path, query_prompt="question: ", pool_prompts=False)


def test_a_chat_is_the_whole_template_of_which_only_the_text_is_pooled(tmp_path: Path):
    folder = Path(pico.save_backbone("llama", str(tmp_path)))
    template = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}[end of it]\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    model, text, prompt = load(folder, device="cpu"), "quick brown foxes", "find an answer:\n"
    options = ContrastOptions(chat=True, pooling="mean", pool_prompts=False, query_prompt=prompt)
    options = options.model_copy(update={"prompts": {"layers": "same:\n"}})
    whole = model.tokenizer.apply_chat_template([{"role": "user", "content": prompt + text}], tokenize=False)
    tokens = model.tokenizer(whole, return_tensors="pt", return_offsets_mapping=True)
    places = tokens.pop("offset_mapping")[0]
    with torch.no_grad():
        states = transformer_of(model).model(**tokens).last_hidden_state[0]
    begin = whole.index(text)
    of_text = (places[:, 0] >= begin) & (places[:, 1] <= begin + len(text)) & (places[:, 1] > 0)
    found = prepared(prepared(model, options), options)  # the start is put there once
    np.testing.assert_allclose(found.encode_query(text), states[of_text].mean(dim=0).numpy(), atol=1e-5)
    assert found.prompts["document"] == "[user]\n"
    np.testing.assert_array_equal(found.encode(text), found.encode_document(text))
    assert _file_prompts(model, options) == {"layers": "[user]\nsame:\n"}


def test_prompts_change_what_is_learned_by_file(pico_model: PicoModel, corpus: Corpus, tmp_path: Path):
    model, corpus = pico_model("bert", 1), replace(corpus, validation_examples=lambda: iter(()))
    results = [
        run(model, corpus, tmp_path, steps=3, prompts=prompts).model.encode(pico.TEXTS)
        for prompts in (
            {},
            {"layers": "which layer: "},
            {"layers": {"query": "which layer: "}},
            '{layers.jsonl: "which layer: "}',
            {"layers": {"query": "which layer: ", "document": "layer: "}},
        )
    ]
    assert np.abs(results[0] - results[1]).max() > 1e-5
    np.testing.assert_array_equal(results[1], results[2])
    np.testing.assert_array_equal(results[1], results[3])
    assert np.abs(results[1] - results[4]).max() > 1e-5


def test_a_file_without_sampled_tuples_may_have_a_prompt(pico_model: PicoModel, tmp_path: Path):
    sources = [write_tuples(tmp_path, "many.jsonl", some_rows(400, "many"))]
    sources.append(write_tuples(tmp_path, "few.jsonl", some_rows(1, "few")))
    corpus = replace(read_corpus(sources, seed=0), validation_examples=lambda: iter(()))
    results = [
        run(pico_model("bert"), corpus, tmp_path, steps=1, tuples=4, prompts=prompts).model.encode(pico.TEXTS)
        for prompts in ({}, {"few": "which: "})
    ]
    np.testing.assert_array_equal(*results)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown file": (
        {"prompts": {"other": "x"}},
        "there is no data file 'other' to prompt; name one of documents",
    ),
    "too long": ({"max_length": 4000}, "the model takes at most 48 tokens"),
    "encoder": ({"attention": "bidirectional"}, "has bidirectional attention already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_options_are_rejected(pico_model: PicoModel, corpus: Corpus, tmp_path: Path, case: str):
    options, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        run(pico_model("bert"), corpus, tmp_path, **options)


def test_prompts_that_are_no_mapping_are_rejected():
    for bad in ("{a: ", "just text", {"a": 3}):
        with pytest.raises(BadRecipe, match=r"contrast\.prompts can't be"):
            make_options(TOOL, {"prompts": bad})


def test_an_odd_width_has_no_angle(tmp_path: Path, corpus: Corpus):
    model = pico.model("bert", str(tmp_path / "odd"), hidden_size=33, num_attention_heads=3)
    with pytest.raises(BadInput, match="33 is odd; use infonce or cosine"):
        run(model, corpus, tmp_path, objective="angle")


def test_no_data_and_no_tuples_are_rejected(pico_model: PicoModel, corpus: Corpus, tmp_path: Path):
    with pytest.raises(BadInput, match="pass them with --data"):
        run(pico_model("bert"), None, tmp_path)
    with pytest.raises(BadInput, match="there are no labelled tuples"):
        run(pico_model("bert"), replace(corpus, examples=lambda: iter(())), tmp_path)


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        ([{"query": "a", "negative": "b"}] * 3, {}, "no column known as the positive"),
        ([{"query": "a", "positive": None}] * 3, {}, "has no text in column 'positive'"),
        (some_rows(1, "one"), {}, "1 labelled tuple is too few to train on"),
        (
            [{"query": f"Find it:{' ' * i}", "positive": f"about {i}"} for i in range(40)],
            {"query_prompt": "Find it:"},
            "nothing but its prompt",
        ),
    ],
)
def test_bad_tuples_are_named(
    pico_model: PicoModel, tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], sentence: str
):
    corpus = read_corpus([write_tuples(tmp_path, "bad.jsonl", rows)], seed=0)
    with pytest.raises(BadInput, match=sentence):
        run(pico_model("bert"), corpus, tmp_path, **options)


def test_texts_longer_than_the_models_limit_are_truncated(pico_model: PicoModel, tmp_path: Path):
    rows = [{"query": f"{i} {'long ' * 400}", "positive": f"{i} {'text ' * 400}"} for i in range(40)]
    corpus = read_corpus([write_tuples(tmp_path, "long.jsonl", rows)], seed=1)
    assert run(pico_model("gpt2"), corpus, tmp_path).facts["steps"] == 2


def test_a_recipe_cuts_a_decoder_and_trains_it(tmp_path: Path):
    pico.save_backbone("llama", str(tmp_path / "lm"))
    source = write_tuples(tmp_path, "t.jsonl", some_rows(60, "layers"))
    recipe = parse_recipe(
        "steps: [depth: {keep: 2}, contrast: {steps: 2, batch_size: 4, mini_batch: 3}]", name="x"
    )
    run = compress(
        str(tmp_path / "lm"), recipe, output=tmp_path / "small", corpus=read_corpus([source], seed=0)
    )
    assert run.steps[-1].after.as_json() == run.after.as_json()
    plain = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert transformer_of(plain).model.config.num_hidden_layers == 2
    assert (tmp_path / "small" / "contrast.jsonl").is_file()
    assert not list((tmp_path / "small").glob("adapter*"))
