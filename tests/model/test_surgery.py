"""Surgery against transformers' own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

import pico
from trundle.errors import BadModel, ImpossibleCut
from trundle.model.anatomy import _BY_MODEL_TYPE, _family_of
from trundle.model.heads import reinitialised, with_linear_head
from trundle.model.layout import _shrunk, layout_of
from trundle.model.static import static_model, static_shape
from trundle.model.surgery import Cut, _cut_backbone, cut

FAMILIES = list(pico.CONFIGS)
IDS = torch.tensor([[5, 9, 17, 30, 22, 11], [8, 40, 33, 2, 3, 6]])


def states(backbone: Any, ids: torch.Tensor = IDS) -> Any:
    with torch.no_grad():
        mask = torch.ones_like(ids)
        caching = {"use_cache": False} if hasattr(backbone.config, "use_cache") else {}
        return backbone(input_ids=ids, attention_mask=mask, output_hidden_states=True, **caching)


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_the_first_blocks_gives_the_models_hidden_state(family: str) -> None:
    """A cut model's output is the whole model's hidden state at that depth, under the same final norm."""
    whole = pico.backbone(family)
    cut_model = _cut_backbone(whole, Cut(blocks=(0, 1)))
    inside = states(whole).hidden_states[2]
    norm = _family_of(whole.config.model_type).final_norm
    expected = inside if norm is None else whole.get_submodule(norm)(inside)
    torch.testing.assert_close(states(cut_model).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_blocks_equal_the_model_without_the_others(family: str) -> None:
    """Against a model whose block list was shortened by hand, which transformers runs as it is."""
    whole = pico.backbone(family)
    kept = (0, 2, 3)
    by_hand = copy.deepcopy(whole)
    row = _family_of(by_hand.config.model_type)
    parent, _, name = row.blocks.rpartition(".")
    blocks = by_hand.get_submodule(row.blocks)
    setattr(by_hand.get_submodule(parent), name, torch.nn.ModuleList(blocks[i] for i in kept))
    setattr(by_hand.config, row.layers, len(kept))
    if "layer_types" in row.per_layer:
        by_hand.config.layer_types = [whole.config.layer_types[i] for i in kept]
    ours = states(_cut_backbone(whole, Cut(blocks=kept))).last_hidden_state
    torch.testing.assert_close(ours, states(by_hand).last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_cutting_neurons_equals_zeroing_them(family: str) -> None:
    """A removed neuron is one whose output weights are zero."""
    whole = pico.backbone(family)
    layout = layout_of(whole)
    kept = tuple(tuple(range(block, layout.sizes["mlp"], 2)) for block in (0, 1, 0, 1))
    silenced = copy.deepcopy(whole)
    weights = dict(silenced.named_parameters())
    for parameter in layout.parameters:
        reads_neurons = getattr(parameter.member, "columns", None) == "mlp" and len(parameter.axes) == 2
        if reads_neurons and parameter.block is not None:
            gone = [n for n in range(layout.sizes["mlp"]) if n not in kept[parameter.block]]
            weights[parameter.name].data.index_fill_(parameter.axes.index("mlp"), torch.tensor(gone), 0.0)
    ours = states(_cut_backbone(whole, Cut(mlp=kept))).last_hidden_state
    torch.testing.assert_close(ours, states(silenced).last_hidden_state, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours, states(whole).last_hidden_state, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_permutation_of_neurons_changes_nothing(family: str) -> None:
    whole = pico.backbone(family)
    size = layout_of(whole).sizes["mlp"]
    shuffled = tuple(
        tuple(np.random.default_rng(block).permutation(size).tolist()) for block in range(pico.LAYERS)
    )
    ours = states(_cut_backbone(whole, Cut(mlp=shuffled))).last_hidden_state
    torch.testing.assert_close(ours, states(whole).last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_permutation_of_the_hidden_width_only_permutes_the_output(family: str) -> None:
    """Every place tied to the residual stream must move together, or this fails."""
    whole = pico.backbone(family)
    order = tuple(np.random.default_rng(1).permutation(layout_of(whole).sizes["hidden"]).tolist())
    ours = states(_cut_backbone(whole, Cut(hidden=order))).last_hidden_state
    expected = states(whole).last_hidden_state[..., list(order)]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if not _family_of(pico.CONFIGS[f][0]).rotary])
def test_a_permutation_inside_heads_changes_nothing_without_rotary_positions(family: str) -> None:
    whole = pico.backbone(family)
    order = tuple(np.random.default_rng(2).permutation(layout_of(whole).sizes["head"]).tolist())
    ours = states(_cut_backbone(whole, Cut(head=order))).last_hidden_state
    torch.testing.assert_close(ours, states(whole).last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if _family_of(pico.CONFIGS[f][0]).rotary])
def test_swapping_rotary_halves_in_queries_and_keys_shows_in_the_output(family: str) -> None:
    """Rotary positions tie dimensions to frequencies, so a permutation inside heads is not free there."""
    whole = pico.backbone(family)
    head = layout_of(whole).sizes["head"]
    ours = states(_cut_backbone(whole, Cut(head=tuple(reversed(range(head)))))).last_hidden_state
    assert not torch.allclose(ours, states(whole).last_hidden_state, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_vocabulary_rows_follow_their_ids(family: str) -> None:
    whole = pico.backbone(family)
    vocab = layout_of(whole).sizes["vocab"]
    kept = tuple(range(60)) if vocab > 60 else tuple(range(vocab))
    small = _cut_backbone(whole, Cut(vocab=kept))
    torch.testing.assert_close(states(small).last_hidden_state, states(whole).last_hidden_state)
    assert small.config.vocab_size == len(kept)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_has_the_predicted_shapes_and_runs(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILIES))
    whole = pico.backbone(family)
    layout = layout_of(whole)
    row = layout.family
    share = data.draw(st.sampled_from([1, 2, 4] if layout.sizes["head"] >= 16 or not row.rotary else [1, 2]))
    hidden = data.draw(st.permutations(range(layout.sizes["hidden"])))[: layout.sizes["hidden"] // share]
    head = data.draw(st.permutations(range(layout.sizes["head"])))[: layout.sizes["head"] // share]
    neurons = data.draw(st.integers(1, layout.sizes["mlp"]))
    mlp = tuple(
        tuple(data.draw(st.permutations(range(layout.sizes["mlp"])))[:neurons]) for _ in range(layout.layers)
    )
    others = data.draw(st.sets(st.integers(1, layout.layers - 1)))
    what = Cut(blocks=(0, *sorted(others)), hidden=tuple(hidden), head=tuple(head), mlp=mlp)
    small = _cut_backbone(whole, what)
    after = layout_of(small)
    predicted = _shrunk(layout, blocks=what.blocks, hidden=len(hidden), head=len(head), mlp=neurons)
    assert {p.name: after.shape(p) for p in after.parameters} == {
        p.name: predicted.shape(p) for p in predicted.parameters
    }
    assert states(small).last_hidden_state.isfinite().all()


def test_a_cut_model_shares_no_memory_with_the_original(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    original = pico_model("bert")
    small = cut(original, Cut(blocks=(0, 1)))
    theirs = {weight.data_ptr() for weight in original.parameters()}
    assert not theirs & {weight.data_ptr() for weight in small.parameters()}
    assert small.tokenizer is not original.tokenizer


def test_a_loaded_model_has_no_active_dropout(pico_folders: Callable[[str], Path]) -> None:
    """What sentence-transformers loads says of itself that it trains, while none of its modules does."""
    original = SentenceTransformer(str(pico_folders("bert")), device="cpu")
    assert original.training
    assert not original[0].model.training
    small = cut(original, Cut(blocks=(0, 1)))
    static_model(original, np.full(static_shape(original)[0], 0.01))  # looks through the same modules
    taught = with_linear_head(
        original, np.eye(32, dtype=np.float32), np.zeros(32, dtype=np.float32), normalise=True
    )
    for model in (original, small, taught, reinitialised(original, seed=0)):
        assert not any(module.training for module in model[0].model.modules())


def test_narrowing_reaches_pooling_and_dense(tmp_path: Any) -> None:
    base = pico.model("bert", str(tmp_path))
    pooling = Pooling(32, pooling_mode=("cls", "mean"))
    dense = Dense(64, 10, activation_function=torch.nn.Identity())
    model = SentenceTransformer(modules=[base[0], pooling, dense, Normalize()], device="cpu")
    kept = tuple(range(0, 32, 2))
    small = cut(model, Cut(hidden=kept, head=tuple(range(4))))
    assert small[1].embedding_dimension == 16
    assert small[2].linear.weight.shape == (10, 32)
    columns = [*kept, *(32 + k for k in kept)]
    assert torch.equal(small[2].linear.weight, dense.linear.weight[:, columns])
    assert small.encode(["two words"]).shape == (1, 10)
    assert model[2].linear.weight.shape == (10, 64)


def test_prompts_and_settings_are_copied(pico_model: Callable[[str], SentenceTransformer]) -> None:
    original = pico_model("bert")
    with_prompts = SentenceTransformer(
        modules=list(original), prompts={"query": "find: ", "document": ""}, device="cpu"
    )
    small = cut(with_prompts, Cut(blocks=(0,)))
    assert small.prompts["query"] == "find: "
    assert small.similarity_fn_name == with_prompts.similarity_fn_name
    assert small.max_seq_length == original.max_seq_length


@pytest.mark.parametrize(
    ("family", "what", "says"),
    [
        ("bert", Cut(blocks=()), "at least 1"),
        ("bert", Cut(blocks=(0, 9)), "layers 0 to 3"),
        ("bert", Cut(blocks=(1, 0)), "ascending order"),
        ("bert", Cut(blocks=(0, 0)), "ascending order"),
        ("modernbert", Cut(blocks=(1, 2)), "keep layer 0"),
        ("t5", Cut(blocks=(1, 2)), "keep layer 0"),
        ("electra", Cut(hidden=tuple(range(24)), head=tuple(range(6))), "24 wide like its token table"),
        ("bert", Cut(hidden=tuple(range(16))), "same share"),
        ("bert", Cut(hidden=(0, 0)), "different"),
        ("llama", Cut(head=(0, 1, 2)), "even"),
        ("bert", Cut(mlp=((0,),)), "one list per layer"),
        ("bert", Cut(mlp=((0,), (0, 1), (0,), (0,))), "different numbers"),
        ("bert", Cut(vocab=(0, 10**6)), "between 0"),
    ],
)
def test_impossible_cuts_give_one_sentence(family: str, what: Cut, says: str) -> None:
    with pytest.raises(ImpossibleCut, match=says):
        _cut_backbone(pico.backbone(family), what)


def test_tables_as_wide_as_the_model_are_narrowed_with_it() -> None:
    """ELECTRA-base has no matrix after its tables, ELECTRA-small has."""
    half = Cut(hidden=tuple(range(16)), head=tuple(range(4)))
    for width, expected in ((32, 16), (24, 24)):
        small = _cut_backbone(pico.backbone("electra", embedding_size=width), half)
        assert small.config.embedding_size == expected
        assert states(small).last_hidden_state.shape[-1] == 16


def test_deberta_with_matrices_of_its_own_for_distances() -> None:
    whole = pico.backbone("deberta", share_att_key=False)
    hidden, head = (tuple(np.random.default_rng(3).permutation(size).tolist()) for size in (32, 8))
    ours = states(_cut_backbone(whole, Cut(hidden=hidden, head=head))).last_hidden_state
    expected = states(whole).last_hidden_state[..., list(hidden)]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_head_cut_is_rejected_with_per_dimension_rope_lists() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    backbone = pico.backbone("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    with pytest.raises(ImpossibleCut, match="one factor per head dimension"):
        _cut_backbone(backbone, Cut(head=tuple(range(4))))


def test_a_per_layer_list_of_the_wrong_length_is_named() -> None:
    backbone = pico.backbone("qwen2")
    backbone.config.__dict__["layer_types"] = ["full_attention"] * 3
    with pytest.raises(BadModel, match="layer_types has 3 entries for 4 layers"):
        _cut_backbone(backbone, Cut(blocks=(0, 1)))


def test_weights_that_do_not_fit_the_config_are_named() -> None:
    backbone = pico.backbone("bert")
    backbone.config.intermediate_size = 40
    with pytest.raises(BadModel, match=r"intermediate.dense.weight has shape \(48, 32\)"):
        layout_of(backbone)


def test_every_model_type_of_the_table_has_a_pico_model() -> None:
    assert {model_type for model_type, _ in pico.CONFIGS.values()} == set(_BY_MODEL_TYPE)
