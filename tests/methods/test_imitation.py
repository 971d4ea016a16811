"""The inner states of a model, and the losses on them."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
from sentence_transformers import SentenceTransformer

import pico
from trundle.errors import BadInput
from trundle.methods.align.imitation import _check_imitation, _Imitation, _Imitator, _Inside, _uniform_layers
from trundle.model.surgery import Cut, cut, transformer_of


def features(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return dict(model.preprocess(pico.TEXTS))


def hooks_of(model: SentenceTransformer) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_states_are_the_librarys_hidden_states(family, pico_model):
    model = copy.deepcopy(pico_model(family))
    inside = _Inside(model)
    given = features(model)
    backbone = transformer_of(model).model
    fields = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = backbone(**fields, output_hidden_states=True).hidden_states
    caught = inside.states
    assert len(caught) == pico.LAYERS + 1
    # Families with a final norm report their last state after it, which is not what a block gives.
    for ours, theirs in zip(caught[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(ours, theirs)
    heads = inside.heads(-1)
    sizes = inside._layout.sizes
    assert heads.query.shape[1:] == (sizes["heads"], given["input_ids"].shape[1], sizes["head"])
    assert heads.query.shape == heads.key.shape == heads.value.shape


def test_scores_are_the_ones_bert_turns_into_attention(pico_model):
    model = copy.deepcopy(pico_model("bert"))
    backbone = transformer_of(model).model
    backbone.set_attn_implementation("eager")
    inside = _Inside(model)
    given = features(model)
    with torch.no_grad():
        attention = backbone(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"], output_attentions=True
        ).attentions
    hidden = given["attention_mask"][:, None, None, :] == 0
    for block in range(pico.LAYERS):
        ours = inside.scores()[block].masked_fill(hidden, float("-inf")).softmax(dim=-1)
        torch.testing.assert_close(ours, attention[block])


@pytest.mark.parametrize("name", get_args(_Imitation))
@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "qwen2", "phi3", "gpt2"])
def test_the_loss_is_zero_for_the_teacher_and_positive_for_a_part_of_it(name, family, pico_model):
    teacher = pico_model(family)
    before = hooks_of(teacher)
    given = features(teacher)
    same = copy.deepcopy(teacher)
    imitator = _Imitator(name, same, teacher)
    assert float(imitator(given, same(dict(given))).detach()) == pytest.approx(0.0, abs=1e-5)
    imitator.close()

    shallow = cut(teacher, Cut(blocks=(0, 1)))
    imitator = _Imitator(name, shallow, teacher)
    loss = imitator(given, shallow(dict(given)))
    loss.backward()
    imitator.close()
    assert float(loss.detach()) > 1e-4
    assert any(
        weight.grad is not None and weight.grad.abs().sum() > 0 for weight in shallow[0].model.parameters()
    )
    assert all(weight.grad is None for weight in teacher.parameters())
    assert hooks_of(teacher) == before


def test_tinyberts_map_into_a_wider_teacher_is_trained(pico_model, tmp_path):
    teacher = pico_model("mpnet")
    half = cut(teacher, Cut(hidden=tuple(range(0, 32, 2)), head=tuple(range(0, 8, 2))))
    given = features(teacher)
    imitator = _Imitator("tinybert", half, teacher)
    optimizer = torch.optim.AdamW(imitator.trained.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = imitator(given, imitator.trained(dict(given)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    imitator.close()
    assert losses[-1] < losses[0] / 2
    untrained = _Imitator("tinybert", half, teacher)
    untrained.close()  # its hooks are on a model that other tests use
    assert (imitator._widen.weight - untrained._widen.weight).abs().max() > 1e-2


def test_uniform_layers_end_at_the_last():
    assert _uniform_layers(3, 12) == (4, 8, 12)


def test_incompatible_models_are_rejected(pico_model):
    teacher = pico_model("mpnet")
    half = cut(teacher, Cut(hidden=tuple(range(0, 32, 2)), head=tuple(range(0, 8, 2))))
    with pytest.raises(BadInput, match="tokenizers differ"):
        _check_imitation("minilm", pico_model("roberta"), teacher)
    with pytest.raises(BadInput, match="hidden width"):
        _check_imitation("distilbert", half, teacher)
    for loss in ("minilm", "tinybert"):
        _check_imitation(loss, half, teacher)
