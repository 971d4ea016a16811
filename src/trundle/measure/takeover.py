"""When MLP neurons go, those that stay can take over most of what they gave: by least squares, over the texts at hand.

A matrix reads the neurons a and gives W·a + b. With fewer neurons k it shall give nearly the same: W′·k + b′, where W′ and b′
are what a regression of W·a on k finds. All it needs are the second moments of the neurons, with a one among them for b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.measure.reading import read_through
from trundle.model.surgery import transformer_of
from trundle.progress import SILENT, Progress

RIDGE = 1e-4
"""Of the mean moment: keeps neurons apart that never differ."""
MOST_BYTES = 1 << 31


def measure_moments(
    model: SentenceTransformer, texts: Sequence[str], modules: Sequence[str], *, progress: Progress = SILENT
) -> Iterator[tuple[str, Tensor]]:
    """By module: the mean products of all pairs of its inputs and a one, over the tokens of texts; as many at a time as fit."""
    backbone = transformer_of(model).model
    for group in _groups(backbone, modules):
        sums, count = _sums(model, backbone, texts, group, progress)
        for name in group:
            yield name, sums.pop(name).div_(count)


def taken_over(
    weight: Tensor, moments: Tensor, kept: Sequence[int], *, shifts: bool
) -> tuple[Tensor, Tensor]:
    """The weight for the kept inputs, as (out, in), and what its bias gains; without a bias that is nothing."""
    ones = moments.shape[0] - 1
    inputs = torch.tensor([*kept, ones] if shifts else kept, device=moments.device)
    between = moments[inputs][:, inputs].clone()
    between.diagonal()[: len(kept)].add_(RIDGE * moments.diagonal()[:ones].mean().clamp_min(RIDGE))
    wanted = moments[inputs][:, :ones] @ weight.to(moments).T
    solved = torch.linalg.solve(between, wanted).T
    gain = solved[:, -1] if shifts else torch.zeros(len(weight), dtype=solved.dtype, device=solved.device)
    return solved[:, : len(kept)], gain


def _groups(backbone: nn.Module, modules: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name in modules:
        size = 8 * (_inputs_of(backbone.get_submodule(name)) + 1) ** 2
        if group and held + size > MOST_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def _inputs_of(module: nn.Module) -> int:
    return module.in_features if isinstance(module, nn.Linear) else len(module.get_parameter("weight"))


def _sums(
    model: SentenceTransformer,
    backbone: nn.Module,
    texts: Sequence[str],
    modules: Sequence[str],
    progress: Progress,
) -> tuple[dict[str, Tensor], int]:
    """The products of each module's inputs, summed over all tokens, and how many tokens these were."""
    sums: dict[str, Tensor] = {}
    masks: list[Tensor] = []
    counts: list[int] = []

    def tell(real: Tensor) -> None:
        masks[:] = [real]
        counts.append(int(real.sum()))

    def listen(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            states = inputs[0].flatten(0, -2)[masks[0]].float()
            states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
            found = states.T @ states
            found = found.cpu().double() if found.device.type == "mps" else found.double()
            sums[name] = sums[name].add_(found) if name in sums else found

        return hook

    hooks = [backbone.get_submodule(name).register_forward_pre_hook(listen(name)) for name in modules]
    try:
        read_through(model, texts, tell, label="what neurons share", progress=progress)
    finally:
        for hook in hooks:
            hook.remove()
    return sums, sum(counts)
