"""The parameters of each model family: one table, one row per family.

A row names every parameter of the family and the *axes* it lies along. This determines all cuts (slice along
the axis that shrinks), all sizes (multiply the axes), and all tied tensors (those that share an axis).

    vocab, position, type, bucket   rows of lookup tables
    hidden                          the width of the residual stream
    q, o                            heads × head width: rows of the query matrix, columns of the output matrix
    k, v                            key-value heads × head width
    head                            the width of one head (norms inside attention)
    heads                           the number of heads
    mlp                             the neurons between the two matrices of an MLP
    a+b                             two axes concatenated in a fused matrix

To add a family, write its row and add a pico config to the tests' table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trundle.errors import UnknownFamily

_Part = Literal["embeddings", "attention", "mlp", "norm", "pooler", "head"]
_Axes = tuple[str, ...]


@dataclass(frozen=True)
class Linear:
    """A matrix stored as (out, in), as in torch."""

    rows: str
    columns: str
    part: _Part


@dataclass(frozen=True)
class Conv1D:
    """A matrix stored as (in, out), as in GPT-2."""

    columns: str
    rows: str
    part: _Part


@dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm: every parameter lies along one axis."""

    along: str
    part: _Part = "norm"


@dataclass(frozen=True)
class _Table:
    """A lookup table: memory, but no matmul."""

    rows: str
    columns: str
    part: _Part = "embeddings"


_Member = Linear | Conv1D | Norm | _Table


def _axes_of(member: _Member, parameter: str) -> _Axes:
    if isinstance(member, Norm):
        return (member.along,)
    if parameter == "bias":
        return (member.rows,)
    stored = (member.rows, member.columns)
    return stored[::-1] if isinstance(member, Conv1D) else stored


@dataclass(frozen=True, kw_only=True)
class _Family:
    """One row: a family's names for its parameters and config entries."""

    name: str
    model_types: tuple[str, ...]
    blocks: str
    """Path of the list of blocks inside the backbone."""
    outside: Mapping[str, _Member]
    inside: Mapping[str, _Member]
    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    kv_heads: str | None = None
    head: str | None = None
    """Config entry of the head width; None if it is always hidden / heads."""
    mlp: str = "intermediate_size"
    vocab: str = "vocab_size"
    position: str | None = "max_position_embeddings"
    per_layer: tuple[str, ...] = ()
    """Config lists with one entry per block."""
    follows_head: tuple[str, ...] = ()
    """Config entries that must equal the head width, such as Gemma's attention scale."""
    final_norm: str | None = None
    """Path of the norm after the last block, if there is one."""
    causal: bool = False
    rotary: bool = False
    first_block_is_special: bool = False
    """ModernBERT's first block lacks a norm, so another block can't replace it."""
    positions_after_pad: bool = False
    """Whether the first position is the id after the pad token's, so that this id must not change."""
    unfused_attention: str | None = None
    """Path inside a block of attention with a position bias, which the library does not fuse."""
    extra_axes: Mapping[str, str] = field(default_factory=dict)
    """Axis → config entry, for axes that only this family has."""


def _attention(prefix: str, query: str, key: str, value: str, output: str) -> dict[str, _Member]:
    axes = {query: ("q", "hidden"), key: ("k", "hidden"), value: ("v", "hidden"), output: ("hidden", "o")}
    return {prefix + name: Linear(rows, columns, "attention") for name, (rows, columns) in axes.items()}


def _mlp(*into: str, out: str) -> dict[str, _Member]:
    members: dict[str, _Member] = {name: Linear("mlp", "hidden", "mlp") for name in into}
    return members | {out: Linear("hidden", "mlp", "mlp")}


def _norms(*names: str) -> dict[str, _Member]:
    return {name: Norm("hidden") for name in names}


_BERT_EMBEDDINGS: dict[str, _Member] = {
    "embeddings.word_embeddings": _Table("vocab", "hidden"),
    "embeddings.position_embeddings": _Table("position", "hidden"),
    "embeddings.LayerNorm": Norm("hidden", "embeddings"),
}
_POOLER: dict[str, _Member] = {"pooler.dense": Linear("hidden", "hidden", "pooler")}
_BERT_MLP = _mlp("intermediate.dense", out="output.dense") | _norms("output.LayerNorm")

_BERT = _Family(
    name="BERT",
    model_types=("bert",),
    blocks="encoder.layer",
    outside=_BERT_EMBEDDINGS | _POOLER | {"embeddings.token_type_embeddings": _Table("type", "hidden")},
    inside=_attention("attention.", "self.query", "self.key", "self.value", "output.dense")
    | _norms("attention.output.LayerNorm")
    | _BERT_MLP,
    extra_axes={"type": "type_vocab_size"},
)

_LLAMA_BLOCK = (
    _attention("self_attn.", "q_proj", "k_proj", "v_proj", "o_proj")
    | _mlp("mlp.gate_proj", "mlp.up_proj", out="mlp.down_proj")
    | _norms("input_layernorm", "post_attention_layernorm")
)
_HEAD_NORMS: dict[str, _Member] = {"self_attn.q_norm": Norm("head"), "self_attn.k_norm": Norm("head")}

_LLAMA = _Family(
    name="Llama",
    model_types=("llama", "mistral"),
    blocks="layers",
    position=None,
    kv_heads="num_key_value_heads",
    head="head_dim",
    final_norm="norm",
    causal=True,
    rotary=True,
    outside={"embed_tokens": _Table("vocab", "hidden"), "norm": Norm("hidden")},
    inside=_LLAMA_BLOCK,
)

_QWEN2 = replace(_LLAMA, name="Qwen2", model_types=("qwen2",), per_layer=("layer_types",))

_FAMILIES: tuple[_Family, ...] = (
    _BERT,
    replace(
        _BERT, name="RoBERTa", model_types=("roberta", "xlm-roberta", "camembert"), positions_after_pad=True
    ),
    _Family(
        name="MPNet",
        model_types=("mpnet",),
        blocks="encoder.layer",
        outside=_BERT_EMBEDDINGS
        | _POOLER
        | {"encoder.relative_attention_bias": _Table("bucket", "heads", "attention")},
        inside=_attention("attention.attn.", "q", "k", "v", "o") | _norms("attention.LayerNorm") | _BERT_MLP,
        positions_after_pad=True,
        unfused_attention="attention.attn",
        extra_axes={"bucket": "relative_attention_num_buckets"},
    ),
    _Family(
        name="DistilBERT",
        model_types=("distilbert",),
        blocks="transformer.layer",
        layers="n_layers",
        hidden="dim",
        heads="n_heads",
        mlp="hidden_dim",
        outside=_BERT_EMBEDDINGS,
        inside=_attention("attention.", "q_lin", "k_lin", "v_lin", "out_lin")
        | _mlp("ffn.lin1", out="ffn.lin2")
        | _norms("sa_layer_norm", "output_layer_norm"),
    ),
    _Family(
        name="ModernBERT",
        model_types=("modernbert",),
        blocks="layers",
        position=None,
        per_layer=("layer_types",),
        final_norm="final_norm",
        rotary=True,
        first_block_is_special=True,
        outside={
            "embeddings.tok_embeddings": _Table("vocab", "hidden"),
            "embeddings.norm": Norm("hidden", "embeddings"),
            "final_norm": Norm("hidden"),
        },
        inside={
            "attn.Wqkv": Linear("q+k+v", "hidden", "attention"),
            "attn.Wo": Linear("hidden", "o", "attention"),
            "mlp.Wi": Linear("mlp+mlp", "hidden", "mlp"),
            "mlp.Wo": Linear("hidden", "mlp", "mlp"),
        }
        | _norms("attn_norm", "mlp_norm"),
    ),
    _LLAMA,
    _QWEN2,
    replace(_QWEN2, name="Qwen3", model_types=("qwen3",), inside=_LLAMA_BLOCK | _HEAD_NORMS),
    replace(
        _QWEN2,
        name="Gemma 3",
        model_types=("gemma3_text",),
        follows_head=("query_pre_attn_scalar",),
        inside=_LLAMA_BLOCK | _HEAD_NORMS | _norms("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    replace(
        _LLAMA,
        name="Phi-3",
        model_types=("phi3",),
        inside={
            "self_attn.qkv_proj": Linear("q+k+v", "hidden", "attention"),
            "self_attn.o_proj": Linear("hidden", "o", "attention"),
            "mlp.gate_up_proj": Linear("mlp+mlp", "hidden", "mlp"),
            "mlp.down_proj": Linear("hidden", "mlp", "mlp"),
        }
        | _norms("input_layernorm", "post_attention_layernorm"),
    ),
    _Family(
        name="GPT-2",
        model_types=("gpt2",),
        blocks="h",
        layers="n_layer",
        hidden="n_embd",
        heads="n_head",
        mlp="n_inner",
        position="n_positions",
        final_norm="ln_f",
        causal=True,
        outside={
            "wte": _Table("vocab", "hidden"),
            "wpe": _Table("position", "hidden"),
            "ln_f": Norm("hidden"),
        },
        inside={
            "attn.c_attn": Conv1D("hidden", "q+k+v", "attention"),
            "attn.c_proj": Conv1D("o", "hidden", "attention"),
            "mlp.c_fc": Conv1D("hidden", "mlp", "mlp"),
            "mlp.c_proj": Conv1D("mlp", "hidden", "mlp"),
        }
        | _norms("ln_1", "ln_2"),
    ),
)

_BY_MODEL_TYPE: dict[str, _Family] = {kind: family for family in _FAMILIES for kind in family.model_types}


def _family_of(model_type: str) -> _Family:
    """Return the row of a `config.model_type`; the error for an unknown one says what a row needs."""
    if model_type not in _BY_MODEL_TYPE:
        known = ", ".join(sorted(_BY_MODEL_TYPE))
        use = "it can still teach (--teacher) and be trained as it is (trundle align)"
        raise UnknownFamily(
            f"trundle can't cut models of type {model_type!r}, only {known}; {use}, or add its row to "
            "trundle/model/anatomy.py"
        )
    return _BY_MODEL_TYPE[model_type]


def _pinned_ids(family: _Family, config: object) -> range:
    """The token ids that can't be renumbered; MPNet's code always uses 1 as the pad token."""
    pad = getattr(config, "pad_token_id", None) or 0
    return range(max(pad, 1) + 1) if family.positions_after_pad else range(0)


def terms(axis: str) -> Iterator[str]:
    """Yield the plain axes of a fused axis, in order."""
    yield from axis.split("+")
