"""The parameters of each model family: one table, one row per family.

A row names every parameter of the family and the *axes* it lies along. This determines all cuts (slice along
the axis that shrinks), all sizes (multiply the axes), and all tied tensors (those that share an axis).

    vocab, position, type, bucket   rows of lookup tables
    relative                        rows of a table of distances between tokens, each as wide as hidden
    embedding                       the width of the tables, if a matrix brings it to hidden
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
from dataclasses import dataclass, replace
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


class _Conv1D(Linear):
    """A matrix stored as (in, out), as in GPT-2."""


@dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm: every parameter lies along one axis."""

    along: str
    part: _Part = "norm"


@dataclass(frozen=True)
class _Table:
    """A lookup table, or a matrix that only a table is multiplied with: memory, but no work per token."""

    rows: str
    columns: str
    part: _Part = "embeddings"


_Member = Linear | Norm | _Table


def _axes_of(member: _Member, parameter: str) -> _Axes:
    if isinstance(member, Norm):
        return (member.along,)
    if parameter == "bias":
        return (member.rows,)
    stored = (member.rows, member.columns)
    return stored[::-1] if isinstance(member, _Conv1D) else stored


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
    projection: str | None = None
    """Path of the matrix from `embedding` to `hidden`; a model without it has tables as wide as hidden."""
    per_layer: tuple[str, ...] = ()
    """Config lists with one entry per block."""
    follows_head: tuple[str, ...] = ()
    """Config entries that must equal the head width, such as Gemma's attention scale."""
    final_norm: str | None = None
    """Path of the norm after the last block, if there is one."""
    causal: bool = False
    rotary: bool = False
    first_block_is_special: bool = False
    """ModernBERT's first block lacks a norm and T5's has the biases of all, so no other can replace it."""
    positions_after_pad: bool = False
    """Whether the first position is the id after the pad token's, so that this id must not change."""
    unfused_attention: str | None = None
    """Path inside a block of attention with a position bias, which the library does not fuse."""


def _attention(prefix: str, query: str, key: str, value: str, output: str) -> dict[str, _Member]:
    axes = {query: ("q", "hidden"), key: ("k", "hidden"), value: ("v", "hidden"), output: ("hidden", "o")}
    return {prefix + name: Linear(rows, columns, "attention") for name, (rows, columns) in axes.items()}


def _mlp(*into: str, out: str) -> dict[str, _Member]:
    members: dict[str, _Member] = {name: Linear("mlp", "hidden", "mlp") for name in into}
    return members | {out: Linear("hidden", "mlp", "mlp")}


def _norms(*names: str) -> dict[str, _Member]:
    return {name: Norm("hidden") for name in names}


def _embeddings(columns: str = "hidden", norm: str = "hidden") -> dict[str, _Member]:
    rows = {"word": "vocab", "position": "position", "token_type": "type", "task_type": "task"}
    tables: dict[str, _Member] = {
        f"embeddings.{name}_embeddings": _Table(axis, columns) for name, axis in rows.items()
    }
    return tables | {"embeddings.LayerNorm": Norm(norm, "embeddings")}


_POOLER: dict[str, _Member] = {"pooler.dense": Linear("hidden", "hidden", "pooler")}
_BERT_MLP = _mlp("intermediate.dense", out="output.dense") | _norms("output.LayerNorm")

_BERT = _Family(
    name="BERT",
    model_types=("bert", "ernie"),
    blocks="encoder.layer",
    outside=_embeddings() | _POOLER,
    inside=_attention("attention.", "self.query", "self.key", "self.value", "output.dense")
    | _norms("attention.output.LayerNorm")
    | _BERT_MLP,
)

_ROTARY_BERT = _Family(
    name="NomicBERT",
    model_types=("nomic_bert",),
    blocks="layers",
    head="head_dim",
    rotary=True,
    outside=_embeddings() | _POOLER,
    inside=_attention("self_attn.", "q_proj", "k_proj", "v_proj", "o_proj")
    | _mlp("mlp.gate_proj", "mlp.up_proj", out="mlp.down_proj")
    | _mlp("mlp.fc1", out="mlp.fc2")
    | _norms("post_attention_layernorm", "post_mlp_layernorm"),
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
    kv_heads="num_key_value_heads",
    head="head_dim",
    final_norm="norm",
    causal=True,
    rotary=True,
    outside={"embed_tokens": _Table("vocab", "hidden"), "norm": Norm("hidden")},
    inside=_LLAMA_BLOCK,
)

_QWEN2 = replace(_LLAMA, name="Qwen2", model_types=("qwen2",), per_layer=("layer_types",))

_T5_MLP = "DenseReluDense"

_FAMILIES: tuple[_Family, ...] = (
    _BERT,
    replace(
        _BERT, name="RoBERTa", model_types=("roberta", "xlm-roberta", "camembert"), positions_after_pad=True
    ),
    replace(
        _BERT,
        name="ELECTRA",
        model_types=("electra",),
        projection="embeddings_project",
        outside=_embeddings("embedding", "embedding")
        | {"embeddings_project": Linear("hidden", "embedding", "embeddings")},
    ),
    replace(
        _BERT,
        name="DeBERTa",
        model_types=("deberta-v2",),
        projection="embeddings.embed_proj",
        outside=_embeddings("embedding")
        | {
            "embeddings.embed_proj": Linear("hidden", "embedding", "embeddings"),
            "encoder.rel_embeddings": _Table("relative", "hidden", "attention"),
            "encoder.LayerNorm": Norm("hidden"),
        },
        inside=_attention("attention.", "self.query_proj", "self.key_proj", "self.value_proj", "output.dense")
        | {
            "attention.self.pos_key_proj": _Table("k", "hidden"),
            "attention.self.pos_query_proj": _Table("q", "hidden"),
        }
        | _norms("attention.output.LayerNorm")
        | _BERT_MLP,
    ),
    _ROTARY_BERT,
    replace(_ROTARY_BERT, name="GTE", model_types=("gte",)),
    replace(_ROTARY_BERT, name="Jina", model_types=("jina_embeddings_v3",)),
    _Family(
        name="T5",
        model_types=("t5", "mt5"),
        blocks="encoder.block",
        layers="num_layers",
        hidden="d_model",
        heads="num_heads",
        head="d_kv",
        mlp="d_ff",
        final_norm="encoder.final_layer_norm",
        first_block_is_special=True,
        outside={"shared": _Table("vocab", "hidden"), "encoder.final_layer_norm": Norm("hidden")},
        inside=_attention("layer.0.SelfAttention.", "q", "k", "v", "o")
        | {"layer.0.SelfAttention.relative_attention_bias": _Table("bucket", "heads", "attention")}
        | _mlp(*(f"layer.1.{_T5_MLP}.{name}" for name in ("wi", "wi_0", "wi_1")), out=f"layer.1.{_T5_MLP}.wo")
        | _norms("layer.0.layer_norm", "layer.1.layer_norm"),
    ),
    replace(
        _BERT,
        name="MPNet",
        model_types=("mpnet",),
        outside=_embeddings()
        | _POOLER
        | {"encoder.relative_attention_bias": _Table("bucket", "heads", "attention")},
        inside=_attention("attention.attn.", "q", "k", "v", "o") | _norms("attention.LayerNorm") | _BERT_MLP,
        positions_after_pad=True,
        unfused_attention="attention.attn",
    ),
    _Family(
        name="DistilBERT",
        model_types=("distilbert",),
        blocks="transformer.layer",
        layers="n_layers",
        hidden="dim",
        heads="n_heads",
        mlp="hidden_dim",
        outside=_embeddings(),
        inside=_attention("attention.", "q_lin", "k_lin", "v_lin", "out_lin")
        | _mlp("ffn.lin1", out="ffn.lin2")
        | _norms("sa_layer_norm", "output_layer_norm"),
    ),
    _Family(
        name="ModernBERT",
        model_types=("modernbert",),
        blocks="layers",
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
    replace(_LLAMA, name="EuroBERT", model_types=("eurobert",), causal=False),
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
        final_norm="ln_f",
        causal=True,
        outside={
            "wte": _Table("vocab", "hidden"),
            "wpe": _Table("position", "hidden"),
            "ln_f": Norm("hidden"),
        },
        inside={
            "attn.c_attn": _Conv1D("q+k+v", "hidden", "attention"),
            "attn.c_proj": _Conv1D("hidden", "o", "attention"),
            "mlp.c_fc": _Conv1D("mlp", "hidden", "mlp"),
            "mlp.c_proj": _Conv1D("hidden", "mlp", "mlp"),
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
