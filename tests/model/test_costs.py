"""Predicted costs against numel, the saved file, and torch's FLOP counter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

import pico
from trundle.methods.depth.curve import list_savings
from trundle.model.cost import cost, predict
from trundle.model.heads import with_linear_head
from trundle.model.layout import _shrunk, layout_of
from trundle.model.save import weight_bytes
from trundle.model.surgery import Cut, cut

LENGTH = 24


def check_bytes(predicted: int, written: int, family: str) -> None:
    """The library writes some families with fewer, fused matrices, so that the file's header is shorter."""
    assert predicted == written or (family in ("nomic", "gte", "jina") and 0 < predicted - written < 2000)


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_predicted_parameters_and_bytes_are_exact(
    family: str, pico_model: Callable[[str], SentenceTransformer], pico_folders: Callable[[str], Path]
) -> None:
    model = pico_model(family)
    now = cost(model)
    assert now.parameters == sum(weight.numel() for weight in model.parameters())
    check_bytes(now.file_bytes, weight_bytes(pico_folders(family)), family)


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_flops_are_what_torch_counts(family: str, tmp_path: Path) -> None:
    """In eager attention every product is a plain matrix product that torch's counter sees."""
    model = pico.model(family, str(tmp_path))
    model[0].model.set_attn_implementation("eager")
    ids = torch.randint(4, 50, (1, LENGTH))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert cost(model, length=LENGTH).flops_per_token * LENGTH == counter.get_total_flops()


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_a_planned_cut_costs_what_the_built_one_does(
    family: str, pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    model = pico_model(family)
    sizes = layout_of(model[0].model).sizes
    hidden, head, mlp = sizes["hidden"] // 2, sizes["head"] // 2, 7
    planned = predict(model, blocks=(0, 2), hidden=hidden, head=head, mlp=mlp, vocab=50)
    built = cut(
        model,
        Cut(
            blocks=(0, 2),
            hidden=tuple(range(hidden)),
            head=tuple(range(head)),
            mlp=(tuple(range(mlp)),) * pico.LAYERS,
            vocab=tuple(range(50)),
        ),
    )
    assert planned.as_json() == cost(built).as_json()
    assert planned.parameters == sum(weight.numel() for weight in built.parameters())
    built.save_pretrained(str(tmp_path / "built"), create_model_card=False)
    check_bytes(planned.file_bytes, weight_bytes(tmp_path / "built"), family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planned_head_costs_what_the_built_one_does(dtype: torch.dtype, tmp_path: Path) -> None:
    """A nonlinear head stays below the new one, a linear one is replaced; the new one has the same dtype."""
    base = pico.model("bert", str(tmp_path / "backbone"))
    bent = Dense(32, 12, activation_function=torch.nn.Tanh())
    straight = Dense(12, 20, activation_function=torch.nn.Identity())
    model = SentenceTransformer(modules=[base[0], base[1], bent, straight], device="cpu").to(dtype)
    planned = predict(model, dense=(12, 30))
    built = with_linear_head(model, np.ones((30, 12), np.float32), np.ones(30, np.float32), normalise=True)
    assert planned.as_json() == cost(built).as_json()
    built.save_pretrained(str(tmp_path / "built"), create_model_card=False)
    assert planned.file_bytes == weight_bytes(tmp_path / "built")


def test_the_sizes_published_for_nested_students() -> None:
    """Qwen1.5-0.5B on the meta device: 464.0M, then 206.8M / 97.1M, with the MLP scaled 154.9M / 58.2M."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        layout = layout_of(AutoModel.from_config(config))

    def millions(**sizes: int) -> float:
        small = _shrunk(layout, **sizes)  # type: ignore[arg-type]
        return round(sum(small.numel(parameter) for parameter in small.parameters) / 1e6, 1)

    assert millions() == 464.0
    assert [millions(hidden=1024 // n, head=64 // n) for n in (2, 4)] == [206.8, 97.1]
    assert [millions(hidden=1024 // n, head=64 // n, mlp=2816 // n) for n in (2, 4)] == [154.9, 58.2]


def test_the_savings_list_what_would_remain(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("bert")
    menu = {(saving.name, saving.keeps): saving.after for saving in list_savings(model)}
    half = menu["depth", "2 of 4 layers"]
    built = cut(model, Cut(blocks=(0, 1)))
    assert half.parameters == sum(weight.numel() for weight in built.parameters())
    assert {step for step, _ in menu} == {"depth", "width", "vocabulary", "weights"}
