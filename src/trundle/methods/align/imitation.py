"""Losses on the inner states of both models, for comparison with LEAF: DistilBERT's, MiniLM's and TinyBERT's.

Each is added to LEAF's distance. Hooks record the queries, keys and values as their matrices return them
(before rotary positions or norms of heads), and the states between blocks. The teacher encodes every batch
as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional

from trundle.errors import BadInput
from trundle.methods.training import check_same_tokens
from trundle.model.anatomy import terms
from trundle.model.layout import layout_of
from trundle.model.surgery import transformer_of


def _distilbert(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """DistilBERT: 1 − cosine of the last hidden states, averaged over the real tokens of the batch."""
    _same_shape("hidden states", student, teacher)
    return _mean_where(1 - functional.cosine_similarity(student.float(), teacher.float(), dim=-1), mask)


class _Heads(NamedTuple):
    """Queries, keys and values of a layer, each of shape (texts, heads, tokens, width of a head)."""

    query: Tensor
    key: Tensor
    value: Tensor


def _minilm(student: _Heads, teacher: _Heads, mask: Tensor) -> Tensor:
    """MiniLM: attention and value relations of the last layer; the number of heads must be equal."""
    attention = _relation_divergence((student.query, student.key), (teacher.query, teacher.key), mask)
    values = _relation_divergence((student.value, student.value), (teacher.value, teacher.value), mask)
    return attention + values


def _relation_divergence(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """KL(teacher ‖ student) of each token's relations: mean over heads and tokens, then texts."""
    ours, theirs = _relations(*student, mask), _relations(*teacher, mask)
    _same_shape("attention heads", ours, theirs)
    real = mask.bool()
    pairs = real[:, None, :, None] & real[:, None, None, :]
    per_pair = (theirs.exp() * (theirs - ours)).masked_fill(~pairs, 0.0)
    per_text = per_pair.sum(dim=(1, 2, 3)) / (ours.shape[1] * real.sum(dim=1).clamp(min=1))
    return per_text.mean()


def _relations(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Log-softmax of left·rightᵀ/√width over real tokens; padding is finite, as −∞ makes NaN gradients."""
    scores = left.float() @ right.float().transpose(-1, -2) / math.sqrt(left.shape[-1])
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask.bool()[:, None, None, :], lowest).log_softmax(dim=-1)


def _tinybert(
    student_states: Sequence[Tensor],
    teacher_states: Sequence[Tensor],
    student_scores: Sequence[Tensor],
    teacher_scores: Sequence[Tensor],
    mask: Tensor,
    *,
    layers: Sequence[int],
    widen: Callable[[Tensor], Tensor] = lambda state: state,
) -> Tensor:
    """TinyBERT: mean squared errors of hidden states and of scores before softmax, over the teacher's layers.

    States start with the embeddings, which are not compared (LEAF, equations 9 and 10). The student's layer
    i + 1 imitates the teacher's layers[i], counted from 1. `widen` maps the student's states into the
    teacher's width (W in equation 9).
    """
    real = mask.bool()
    pairs = real[:, None, :, None] & real[:, None, None, :]
    loss = torch.zeros((), device=mask.device)
    for state, layer in zip(student_states[1:], layers, strict=True):
        loss = loss + _squared_error("hidden states", widen(state), teacher_states[layer], real[:, :, None])
    for scores, layer in zip(student_scores, layers, strict=True):
        loss = loss + _squared_error("attention heads", scores, teacher_scores[layer - 1], pairs)
    return loss / len(teacher_scores)


def _uniform_layers(student: int, teacher: int) -> tuple[int, ...]:
    return tuple(-(-layer * teacher // student) for layer in range(1, student + 1))


def _squared_error(what: str, student: Tensor, teacher: Tensor, where: Tensor) -> Tensor:
    _same_shape(what, student, teacher)
    keep = where.expand_as(student)
    # Padding may hold −∞ scores: it is replaced before the subtraction, so that no NaN enters the gradient.
    error = student.float().masked_fill(~keep, 0.0) - teacher.float().masked_fill(~keep, 0.0)
    return _mean_where(error.square(), keep)


def _mean_where(values: Tensor, where: Tensor) -> Tensor:
    keep = where.bool()
    return values.masked_fill(~keep, 0.0).sum() / keep.sum().clamp(min=1)


def _same_shape(what: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        shapes = f"{tuple(student.shape)} and {tuple(teacher.shape)}"
        raise BadInput(f"the {what} have different shapes, {shapes}; choose another loss or student")


_Imitation = Literal["distilbert", "minilm", "tinybert"]
_Outputs = Mapping[str, Any]
"""What a SentenceTransformer's forward pass returns."""


def _check_imitation(name: _Imitation, student: SentenceTransformer, teacher: SentenceTransformer) -> None:
    check_same_tokens(student, teacher, f"the loss {name}", "use loss: leaf")
    ours, theirs = (layout_of(transformer_of(model).model).sizes for model in (student, teacher))
    needed = {"distilbert": ("hidden",), "minilm": ("heads",), "tinybert": ("heads",)}
    words = {"hidden": "hidden width", "heads": "number of attention heads"}
    for axis in needed[name]:
        if ours[axis] != theirs[axis]:
            sizes = f"{ours[axis]} and {theirs[axis]}"
            raise BadInput(f"the loss {name} needs the same {words[axis]}, not {sizes}; use loss: leaf")


class _Imitator:
    """Runs the teacher on each batch that the student has encoded, and compares their inner states."""

    def __init__(
        self, name: _Imitation, student: SentenceTransformer, teacher: SentenceTransformer, *, seed: int = 0
    ) -> None:
        _check_imitation(name, student, teacher)
        self._name, self._teacher = name, teacher
        self._ours, self._theirs = _Inside(student), _Inside(teacher)
        self.trained: nn.Module = student
        """What is trained: the student, together with TinyBERT's map if the widths differ."""
        self._widen: nn.Module = nn.Identity()
        ours, theirs = self._ours.hidden, self._theirs.hidden
        if name == "tinybert" and ours != theirs:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                self._widen = nn.Linear(ours, theirs, bias=False).to(student.device)
            self.trained = _WithMap(student, self._widen)

    def __call__(self, features: Mapping[str, Any], outputs: _Outputs) -> Tensor:
        mask, ours, theirs = features["attention_mask"], self._ours, self._theirs
        with torch.no_grad():
            reference = self._teacher.eval()(dict(features))
        if self._name == "distilbert":
            return _distilbert(outputs["token_embeddings"], reference["token_embeddings"], mask)
        if self._name == "minilm":
            return _minilm(ours.heads(-1), theirs.heads(-1), mask)
        layers = _uniform_layers(ours.layers, theirs.layers)
        scores = ours.scores(), theirs.scores()
        return _tinybert(ours.states, theirs.states, *scores, mask, layers=layers, widen=self._widen)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class _WithMap(nn.Module):
    """A student and the map of its hidden states, which are trained together."""

    def __init__(self, student: SentenceTransformer, widen: nn.Module) -> None:
        super().__init__()
        self.student, self.widen = student, widen

    def forward(self, features: dict[str, Any]) -> _Outputs:
        outputs: _Outputs = self.student(features)
        return outputs


class _Inside:
    """Records what a backbone computes in its forward pass, block by block."""

    def __init__(self, model: SentenceTransformer) -> None:
        backbone = transformer_of(model).model
        self._layout = layout_of(backbone)
        self.layers, self.hidden = self._layout.layers, self._layout.sizes["hidden"]
        self.states: list[Tensor] = []
        """The embeddings, then the output of each block."""
        self._projected: list[dict[str, Tensor]] = [{} for _ in range(self.layers)]
        blocks: Any = backbone.get_submodule(self._layout.family.blocks)
        self._hooks = [blocks[0].register_forward_pre_hook(self._before, with_kwargs=True)]
        for number, block in enumerate(blocks):
            self._hooks.append(block.register_forward_hook(self._after))
            for path, member in self._layout.family.inside.items():
                axes = tuple(terms(getattr(member, "rows", "")))
                if member.part == "attention" and set(axes) & {"q", "k", "v"}:
                    matrix = block.get_submodule(path)
                    self._hooks.append(matrix.register_forward_hook(self._projection(number, axes)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def heads(self, block: int) -> _Heads:
        """Queries, keys and values of a block; shared key-value heads are repeated for every query head."""
        sizes, found = self._layout.sizes, {}
        for axis, flat in self._projected[block].items():
            split = flat.reshape(*flat.shape[:-1], -1, sizes["head"]).transpose(1, 2)
            found[axis] = split.repeat_interleave(sizes["heads"] // split.shape[1], dim=1)
        return _Heads(query=found["q"], key=found["k"], value=found["v"])

    def scores(self) -> list[Tensor]:
        """Attention scores of each block before the softmax, without what positions add."""
        blocks = [self.heads(block) for block in range(self.layers)]
        return [heads.query @ heads.key.mT / math.sqrt(heads.query.shape[-1]) for heads in blocks]

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.states = [args[0] if args else kwargs["hidden_states"]]
        self._projected = [{} for _ in range(self.layers)]

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.states.append(output[0] if isinstance(output, tuple) else output)

    def _projection(self, number: int, axes: tuple[str, ...]) -> Callable[..., None]:
        sizes = [self._layout.sizes[axis] for axis in axes]

        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            made = dict(zip(axes, torch.split(output, sizes, dim=-1), strict=True))
            if made.keys().isdisjoint(self._projected[number]):  # DeBERTa runs it again, on distances
                self._projected[number] |= made

        return hook
