from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from torch import nn

from trundle.model.heads import prompts_by_role
from trundle.model.save import model_digest


def test_a_copy_is_the_same_model_and_a_changed_one_is_not(pico_folders: Callable[[str], Path]) -> None:
    one, two = (SentenceTransformer(str(pico_folders("bert")), device="cpu") for _ in range(2))
    before = model_digest(one)
    one.encode(["using a model", "does not make it another"])
    assert model_digest(one) == before == model_digest(two)
    with torch.no_grad():
        list(two.parameters())[-1].add_(1e-3)
    assert model_digest(one) != model_digest(two)
    three = SentenceTransformer(str(pico_folders("bert")), device="cpu")
    three.max_seq_length = 5
    assert model_digest(one) != model_digest(three)
    four = SentenceTransformer(str(pico_folders("bert")), device="cpu")
    four[1].pooling_mode = "cls"
    assert model_digest(one) != model_digest(four)


def test_prompts_are_a_part_of_a_models_identity(pico_folders: Callable[[str], Path]) -> None:
    """In whatever order they are named."""
    folder = str(pico_folders("bert"))
    plain = SentenceTransformer(folder, device="cpu")
    asking, again, other = (
        SentenceTransformer(folder, device="cpu", prompts=prompts)
        for prompts in (
            {"query": "find: ", "document": "text: "},
            {"document": "text: ", "query": "find: "},
            {"query": "search: ", "document": "text: "},
        )
    )
    assert model_digest(asking) == model_digest(again)
    assert len({model_digest(model) for model in (plain, asking, other)}) == 3


def test_a_saved_model_is_the_same_one(pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = SentenceTransformer(str(pico_folders("bert")), device="cpu", prompts={"query": "find: "})
    model.save_pretrained(str(tmp_path / "saved"))
    assert model_digest(SentenceTransformer(str(tmp_path / "saved"), device="cpu")) == model_digest(model)


def test_settings_that_change_vectors_change_the_digest(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    plain = pico_model("bert")
    torch.manual_seed(0)
    line, bend = (Dense(32, 8, activation_function=activation) for activation in (nn.Identity(), nn.Tanh()))
    bend.load_state_dict(line.state_dict())
    one, two = (SentenceTransformer(modules=[*plain, dense], device="cpu") for dense in (line, bend))
    assert model_digest(one) != model_digest(two)


def test_prompts_are_those_the_library_uses(pico_model: Callable[[str], SentenceTransformer]) -> None:
    """Against encode_query, encode_document and encode themselves."""
    modules = list(pico_model("bert"))
    plain = pico_model("bert")
    for prompts, default in (
        ({"query": "find ", "passage": "text "}, None),
        ({"query": "find ", "document": "say "}, "document"),
        ({"other": "x "}, "other"),
        ({}, None),
    ):
        model = SentenceTransformer(
            modules=modules, prompts=dict(prompts), default_prompt_name=default, device="cpu"
        )
        found = prompts_by_role(model)
        for role, encode in (
            ("text", model.encode),
            ("query", model.encode_query),
            ("document", model.encode_document),
        ):
            torch.testing.assert_close(
                torch.tensor(encode(["a dog"])), torch.tensor(plain.encode([found[role] + "a dog"]))
            )
