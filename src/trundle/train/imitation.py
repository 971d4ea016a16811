"""Losses that look inside both models, as something to compare LEAF's with: DistilBERT's, MiniLM's and TinyBERT's.

Each is added to LEAF's distance. What the losses need from inside is caught by hooks at places the anatomy names:
queries, keys and values as they leave their matrices (before rotary positions or norms of heads), and the states between
blocks. The teacher computes along with the student, so this costs what the teacher costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.model.anatomy import terms
from trundle.model.identity import tokenizer_text
from trundle.model.layout import Layout, layout_of
from trundle.model.surgery import transformer_of
from trundle.train.losses import Heads, distilbert, minilm, tinybert, uniform_layers

Imitation = Literal["distilbert", "minilm", "tinybert"]

Outputs = Mapping[str, Any]
"""What a SentenceTransformer's forward gives."""


def check_imitation(name: Imitation, student: SentenceTransformer, teacher: SentenceTransformer) -> None:
    """Refuse a pair of models the loss has no meaning for."""
    check_same_tokens(student, teacher, f"the loss {name}", "use loss: leaf")
    ours, theirs = _layout(student), _layout(teacher)
    needed = {"distilbert": ("hidden",), "minilm": ("heads",), "tinybert": ("hidden", "heads")}
    words = {"hidden": "hidden width", "heads": "number of attention heads"}
    for axis in needed[name]:
        if ours.sizes[axis] != theirs.sizes[axis]:
            raise BadInput(
                f"the loss {name} needs the same {words[axis]} in both models, and the student has {ours.sizes[axis]} "
                f"where its teacher has {theirs.sizes[axis]}; use loss: leaf"
            )


def check_same_tokens(
    student: SentenceTransformer, teacher: SentenceTransformer, what: str, instead: str
) -> None:
    """Refuse two models that cut texts into other tokens."""
    if tokenizer_text(student) != tokenizer_text(teacher):
        raise BadInput(
            f"{what} needs both models to read the same tokens, and their tokenizers differ; {instead}"
        )


class Imitator:
    """A teacher that computes along, and the loss between what is caught inside the two models."""

    def __init__(self, name: Imitation, student: SentenceTransformer, teacher: SentenceTransformer) -> None:
        check_imitation(name, student, teacher)
        self._loss: Callable[[Outputs, Outputs, Tensor], Tensor] = getattr(self, f"_{name}")
        self._teacher = teacher
        self._ours = Inside(student)
        self._theirs = Inside(teacher)

    def __call__(self, features: Mapping[str, Any], outputs: Outputs) -> Tensor:
        """The loss of a batch that the student has just computed."""
        with torch.no_grad():
            reference = self._teacher.eval()(dict(features))
        return self._loss(outputs, reference, features["attention_mask"])

    def close(self) -> None:
        """Leave both models as they were."""
        self._ours.close()
        self._theirs.close()

    def _distilbert(self, ours: Outputs, theirs: Outputs, mask: Tensor) -> Tensor:
        return distilbert(ours["token_embeddings"], theirs["token_embeddings"], mask)

    def _minilm(self, ours: Outputs, theirs: Outputs, mask: Tensor) -> Tensor:  # noqa: ARG002
        return minilm(self._ours.heads(-1), self._theirs.heads(-1), mask)

    def _tinybert(self, ours: Outputs, theirs: Outputs, mask: Tensor) -> Tensor:  # noqa: ARG002
        layers = uniform_layers(self._ours.layers, self._theirs.layers)
        return tinybert(
            self._ours.states,
            self._theirs.states,
            [self._ours.scores(block) for block in range(self._ours.layers)],
            [self._theirs.scores(block) for block in range(self._theirs.layers)],
            mask,
            layers=layers,
        )


class Inside:
    """What a backbone computed in its last forward pass, block by block."""

    def __init__(self, model: SentenceTransformer) -> None:
        backbone = transformer_of(model).model
        self._layout = layout_of(backbone)
        self.layers = self._layout.layers
        self._states: list[Tensor] = []
        self._projected: list[dict[str, Tensor]] = [{} for _ in range(self.layers)]
        blocks: Any = backbone.get_submodule(self._layout.family.blocks)
        self._hooks = []
        for number, block in enumerate(blocks):
            self._hooks.append(block.register_forward_pre_hook(self._before(number), with_kwargs=True))
            self._hooks.append(block.register_forward_hook(self._after))
            for path, member in self._layout.family.inside.items():
                axes = tuple(terms(getattr(member, "rows", "")))
                if member.part == "attention" and set(axes) & {"q", "k", "v"}:
                    matrix = block.get_submodule(path)
                    self._hooks.append(matrix.register_forward_hook(self._projection(number, axes)))

    def close(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()

    @property
    def states(self) -> list[Tensor]:
        """The embeddings, then what each block gave."""
        return self._states

    def heads(self, block: int) -> Heads:
        """Queries, keys and values of a block; shared key-value heads are repeated for each head that uses them."""
        sizes = self._layout.sizes
        found = {
            axis: _by_head(flat, sizes["head"], sizes["heads"])
            for axis, flat in self._projected[block].items()
        }
        return Heads(query=found["q"], key=found["k"], value=found["v"])

    def scores(self, block: int) -> Tensor:
        """How much each token looks at each other, before the softmax and without what positions add."""
        heads = self.heads(block)
        return heads.query @ heads.key.transpose(-1, -2) / math.sqrt(heads.query.shape[-1])

    def _before(self, number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if number == 0:
                self._states = [args[0] if args else kwargs["hidden_states"]]

        return hook

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._states.append(output[0] if isinstance(output, tuple) else output)

    def _projection(self, number: int, axes: tuple[str, ...]) -> Callable[..., None]:
        sizes = [self._layout.sizes[axis] for axis in axes]

        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            self._projected[number] |= dict(zip(axes, torch.split(output, sizes, dim=-1), strict=True))

        return hook


def _by_head(flat: Tensor, width: int, heads: int) -> Tensor:
    split = flat.reshape(*flat.shape[:-1], -1, width).transpose(1, 2)
    return split.repeat_interleave(heads // split.shape[1], dim=1)


def _layout(model: SentenceTransformer) -> Layout:
    return layout_of(transformer_of(model).model)
