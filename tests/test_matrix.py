"""The contract matrix: every step × every family, on pico models.

Each step shrinks what it says; its result survives a save and a plain sentence-transformers load with the
same vectors; at zero strength it is the identity; its plan survives JSON and replays; same seed, same bytes.
A new step adds a row to CASES, and one named `step: …` for each variant; a new family adds a row to the pico
table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import pico
from trundle.data.corpus import Corpus
from trundle.data.examples import Example, LabelledRow
from trundle.data.texts import Text
from trundle.methods import METHODS
from trundle.methods.contract import Context, Method
from trundle.model.cost import cost
from trundle.model.save import save
from trundle.model.surgery import Cut, _cut_backbone, transformer_of
from trundle.recipe import make_options
from trundle.records import Lineage

TEXTS = [Text(text=f"{text} {number}", kind=None) for number in range(6) for text in pico.TEXTS]
CORPUS = Corpus(
    train=lambda: iter(TEXTS),
    validation=lambda: iter(TEXTS[:12]),
    held_out=lambda: iter(()),
    examples=lambda: (Example(query=text.text, positive=text.text[::-1]) for text in TEXTS),
    labelled=lambda _: (
        LabelledRow(texts=(text.text, text.text[::-1]), label=len(text.text) % 3) for text in TEXTS
    ),
    facts=lambda: (),
)

GENERAL = Path(os.environ["TRUNDLE_CACHE"]) / "general.jsonl"
"""What is not the domain: weights compares the two."""
GENERAL.write_text(
    "".join(
        json.dumps({"query": f"{number} {text}", "positive": f"about {text} {number}"}) + "\n"
        for number in range(8)
        for text in pico.TEXTS
    ),
    encoding="utf-8",
)
PRUNED = {"general": str(GENERAL), "samples": 6, "batch_size": 6}
TRAINED = {"texts": 20, "steps": 1, "batch_size": 8}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Options that change the model, and options at zero strength that must not."""

    options: dict[str, Any]
    identity: dict[str, Any] | None
    shrinks: bool


CASES = {
    "depth": Case(options={"keep": 2}, identity={"keep": pico.LAYERS}, shrinks=True),
    "vocabulary": Case(options={"parameters": "97%"}, identity={"fraction": "100%"}, shrinks=True),
    "depth: spread": Case(
        options={"keep": 2, "order": "spread", "heal": "none"}, identity=None, shrinks=True
    ),
    "depth: blocks": Case(options={"blocks": "0,1,3"}, identity={"blocks": "0,1,2,3"}, shrinks=True),
    "depth: pick": Case(options={"pick": "small"}, identity=None, shrinks=True),
    "depth: static": Case(options={"keep": 0}, identity=None, shrinks=True),
    "weights": Case(options=PRUNED | {"sparsity": "50%"}, identity={"sparsity": 0}, shrinks=False),
    "weights: neuron": Case(
        options=PRUNED | {"sparsity": "30%", "structure": "neuron"}, identity=None, shrinks=True
    ),
    "weights: 2:4": Case(
        options=PRUNED | {"structure": "2:4", "attention": True}, identity=None, shrinks=False
    ),
    "align: static": Case(options=TRAINED, identity=None, shrinks=False),
    "align": Case(options=TRAINED, identity=None, shrinks=False),
    "width": Case(
        options=TRAINED | {"widths": "1/2", "mlp": True, "result": "1/2"},
        identity={"extract": 1},
        shrinks=True,
    ),
    "width: importance": Case(
        options={"extract": "1/2", "select": "importance", "mlp": True, "texts": 40},
        identity=None,
        shrinks=True,
    ),
    "contrast": Case(
        options={"steps": 1, "batch_size": 4, "mini_batch": 3, "warmup": 0, "gradient_checkpointing": True},
        identity=None,
        shrinks=False,
    ),
    "finetune": Case(options={"steps": 1, "batch_size": 4}, identity=None, shrinks=False),
}

CUTS = ("depth", "vocabulary", "width")
"""The steps of every family. Training, pruning and healing know no more of a family than its layout."""
MATRIX = [
    pytest.param(step, family, id=f"{step}-{family}")
    for step in CASES
    for family in (pico.CONFIGS if step in CUTS else pico.LAYOUTS)
]
IDENTITIES = [cell for cell in MATRIX if CASES[cell.values[0]].identity is not None]


def context_for(
    step: str, family: str, pico_model: Callable[..., SentenceTransformer]
) -> tuple[SentenceTransformer, Context]:
    """The model that a method gets: only depth needs many layers, and ModernBERT has two kinds of them.

    align trains what another method cut, so it gets one layer fewer.
    """
    layers = pico.LAYERS if tool_of(step) is METHODS["depth"] else 2
    model = pico_model(family, layers)
    context = Context(original=model, corpus=CORPUS, seed=3)
    if tool_of(step) is not METHODS["align"]:
        return model, context
    plan = METHODS["depth"].plans(blocks=() if step == "align: static" else (0,), of=layers)
    return METHODS["depth"].apply(model, plan, Context(original=model)).model, context


def tool_of(case: str) -> Method[Any, Any]:
    return METHODS[case.partition(":")[0]]


def weights_of(model: SentenceTransformer) -> dict[str, Any]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def test_every_step_has_a_case() -> None:
    assert {tool_of(case).name for case in CASES} == set(METHODS)


@pytest.mark.parametrize(("step", "family"), MATRIX)
def test_contract(
    step: str, family: str, pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    case, tool = CASES[step], tool_of(step)
    given, context = context_for(step, family, pico_model)
    untouched = weights_of(given)
    cut_only = {} if family in pico.LAYOUTS or step == "width" else {"heal": "none"}
    plan = tool.plan(given, make_options(tool, case.options | cut_only), context)
    result = tool.apply(given, plan, replace(context, cache=tmp_path / "cache one")).model

    # shrinks what it says, and what it says is what is there
    assert cost(result).parameters == sum(weight.numel() for weight in result.parameters())
    assert tool.forecast(given, plan).as_json() == cost(result).as_json()
    assert (cost(result).parameters < cost(given).parameters) is case.shrinks

    folder = save(result, tmp_path / "one", lineage=Lineage(source=family), card="")

    # what keeps its size has changed all the same, and the given model is as it was
    vectors = result.encode(pico.TEXTS)
    assert case.shrinks or not np.array_equal(vectors, given.encode(pico.TEXTS))
    assert all((weight == untouched[name]).all() for name, weight in given.state_dict().items())

    # save → plain load → same vectors
    reloaded = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(reloaded.encode(pico.TEXTS), vectors, atol=1e-6)

    # the plan survives JSON and replays; same seed, same bytes
    replayed = tool.plans.model_validate_json(plan.model_dump_json())
    assert replayed == plan
    assert str(replayed).strip()
    again = tool.apply(given, replayed, replace(context, cache=tmp_path / "cache two")).model
    save(again, tmp_path / "two", lineage=Lineage(source=family), card="")
    first, second = (
        sorted(p for p in (tmp_path / name).rglob("*") if p.is_file()) for name in ("one", "two")
    )
    assert [p.relative_to(tmp_path / "one") for p in first] == [
        p.relative_to(tmp_path / "two") for p in second
    ]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


@pytest.mark.parametrize(("step", "family"), IDENTITIES)
def test_zero_strength_is_the_identity(
    step: str, family: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    case, tool = CASES[step], tool_of(step)
    assert case.identity is not None
    given, context = context_for(step, family, pico_model)
    result = tool.apply(given, tool.plan(given, make_options(tool, case.identity), context), context).model
    np.testing.assert_array_equal(result.encode(pico.TEXTS), given.encode(pico.TEXTS))


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_plain_transformers_opens_the_backbone(family: str, tmp_path: Path) -> None:
    small = _cut_backbone(pico.backbone(family), Cut(blocks=(0, 1, 3)))
    small.save_pretrained(tmp_path)
    reloaded, info = type(small).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert reloaded.config.num_hidden_layers == 3
    assert len(transformer_layers(reloaded)) == 3
    for name, weight in small.named_parameters():
        assert (dict(reloaded.named_parameters())[name] == weight).all()


def transformer_layers(backbone: Any) -> Any:
    from trundle.model.anatomy import _family_of

    return backbone.get_submodule(_family_of(backbone.config.model_type).blocks)


def test_align_brings_a_cut_model_closer_to_its_teacher(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    small, context = context_for("align", "bert", pico_model)
    original, tool = context.original, METHODS["align"]
    aligned = tool.apply(small, tool.plan(small, make_options(tool, {"steps": 0}), context), context).model

    def similarity(model: SentenceTransformer) -> float:
        return float(np.mean(np.sum(model.encode(pico.TEXTS) * original.encode(pico.TEXTS), axis=1)))

    assert similarity(aligned) > similarity(small)
    assert transformer_of(aligned).model.config.num_hidden_layers == 1
