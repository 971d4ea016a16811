"""Streamed sums against autograd's gradients of single samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import cosine_similarity, cross_entropy

import pico
from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.methods.training import Prompts
from trundle.methods.weights import gradients
from trundle.methods.weights.gradients import _batches_of, _measure_gradients, _measure_norms
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.matrices import prunable
from trundle.model.surgery import transformer_of

SAMPLES = [
    Example(query=text, positive=f"{text} again", negatives=(pico.TEXTS[number - 1],) if number % 2 else ())
    for number, text in enumerate(pico.TEXTS)
]
PROMPTS = {"": Prompts()}


def vectors(model: SentenceTransformer, texts: list[str]) -> torch.Tensor:
    return torch.cat([model(model.preprocess([text]))["sentence_embedding"] for text in texts])


def by_autograd(
    model: SentenceTransformer, names: list[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Each sample's own texts encoded with a gradient, one by one; the rivals' vectors given."""
    weights = [transformer_of(model).model.get_parameter(f"{name}.weight") for name in names]
    squares = {name: torch.zeros_like(weight) for name, weight in zip(names, weights, strict=True)}
    means = {name: torch.zeros_like(weight) for name, weight in zip(names, weights, strict=True)}
    for batch in _batches_of(SAMPLES, 3):
        for one in batch:
            own = [one.positive, *one.negatives[:1]]
            rivals = [
                text
                for other in batch
                if other is not one
                for text in [other.positive, *other.negatives[:1]]
                if text != one.query
            ]
            with torch.no_grad():
                given = vectors(model, rivals)
            asked, found = vectors(model, [one.query]), torch.cat([vectors(model, own), given])
            loss = cross_entropy(20 * cosine_similarity(asked, found)[None, :], torch.tensor([0]))
            for name, gradient in zip(names, torch.autograd.grad(loss, weights), strict=True):
                squares[name] += gradient.square() / len(SAMPLES)
                means[name] += gradient / len(SAMPLES)
    return squares, means


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2", "qwen3"])
def test_sums_are_those_of_single_samples(
    family: str,
    at_once: bool,
    pico_model: Callable[[str], SentenceTransformer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Formed one by one, as on a CPU, and together, as on a GPU."""
    monkeypatch.setattr(gradients, "_at_once", lambda _: at_once)
    monkeypatch.setattr(gradients, "_GPU_BYTES", 1 << 12)
    model = copy_of(pico_model(family)).eval()
    matrices = prunable(layout_of(transformer_of(model).model), attention=True)
    names = [matrix.name for matrix in matrices]
    squares, means = by_autograd(model, names)
    found = _measure_gradients(model, SAMPLES, names, prompts=PROMPTS, batch_size=3)
    # A fresh pico ModernBERT gives all texts nearly one vector: what is left of its gradients is mostly
    # rounding.
    near = 2e-2 if family == "modernbert" else 1e-4
    for matrix in matrices:
        scale = float(squares[matrix.name].max())
        torch.testing.assert_close(
            matrix.oriented(found.fisher[matrix.name]), squares[matrix.name], atol=near * scale, rtol=1e-3
        )
        torch.testing.assert_close(
            matrix.oriented(found.mean[matrix.name]), means[matrix.name], atol=near * scale**0.5, rtol=1e-3
        )


def test_the_model_is_not_changed(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = copy_of(pico_model("bert"))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    hooks = [
        len(module._forward_hooks) for module in model.modules()
    ]  # transformers may have some of its own
    _measure_gradients(model, SAMPLES, ["encoder.layer.0.output.dense"], prompts=PROMPTS)
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert all((weight == before[name]).all() for name, weight in model.state_dict().items())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_dropout_views_differ_and_repeat(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model, name = copy_of(pico_model("bert")), "encoder.layer.0.output.dense"
    twice = [Example(query=text, positive=text) for text in pico.TEXTS]
    one, two, other = (
        _measure_gradients(model, twice, [name], prompts=PROMPTS, dropout_seed=seed).fisher[name]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_non_finite_gradients_name_the_batch(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = copy_of(pico_model("bert"))
    with torch.no_grad():
        transformer_of(model).model.embeddings.word_embeddings.weight.fill_(float("nan"))
    with pytest.raises(BadInput, match=r"finance batch 1, which begins with 'the quick"):
        _measure_gradients(model, SAMPLES, ["encoder.layer.0.output.dense"], prompts=PROMPTS, label="finance")


def test_norms_are_those_of_all_real_tokens(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model, name = copy_of(pico_model("bert")).eval(), "encoder.layer.1.intermediate.dense"
    seen: list[torch.Tensor] = []
    handle = (
        transformer_of(model)
        .model.get_submodule(name)
        .register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0][0].detach()))
    )
    for one in SAMPLES:
        for text in (one.query, one.positive, *one.negatives[:1]):
            model(model.preprocess([text]))
    handle.remove()
    expected = torch.cat(seen).square().sum(dim=0).sqrt()
    torch.testing.assert_close(
        _measure_norms(model, SAMPLES, [name], prompts=PROMPTS)[name], expected, atol=1e-4, rtol=1e-4
    )


def test_batches_never_mix_sources_nor_leave_one_alone() -> None:
    samples = [Example(query=str(number), positive="x", source="ab"[number > 4]) for number in range(9)]
    sizes = [(len(batch), {one.source for one in batch}) for batch in _batches_of(samples, 2)]
    assert sizes == [(2, {"a"}), (3, {"a"}), (2, {"b"}), (2, {"b"})]
