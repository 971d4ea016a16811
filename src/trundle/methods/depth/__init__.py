"""depth: keep some layers of a model and drop the rest.

Say how many stay (`keep`, or `fraction` to drop: floor(L·(1−p)) of L stay, computed exactly), which ones (`blocks`), or let
the layer-loss curve say it (`pick`: the low point of the lower or of the upper half of the model, from one forward pass
over labelled tuples). Embeddings, pooling and, in pre-norm models, the final norm stay. A number of layers means evenly spaced ones
in an encoder, from two on with the last among them, which made the vectors; in a decoder the first ones (`order` says otherwise).

`keep: 0` leaves a static model, the fastest embedder there is: one vector a token, which starts as the model's own output for
that token alone, weighed by how frequent the token is in the texts of --data, or by its rank where there are none.

    - depth: {keep: 3}
    - depth: {fraction: 50%, order: first}
    - depth: {pick: small}
    - depth: {blocks: [0, 1, 2, 5, 8]}

Paper: Large Language Models Are Overparameterized Text Encoders (L³Prune).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trundle.methods.contract import ExactFraction, Method, Options, Plan, listed

_Blocks = Annotated[tuple[int, ...], BeforeValidator(listed)]


class DepthOptions(Options):
    """Which layers stay; exactly one of keep, fraction, pick and blocks says it."""

    keep: int | None = Field(
        None, strict=True, description="How many layers to keep; 0 leaves a static model, one vector a token."
    )
    fraction: ExactFraction | None = Field(
        None, description="Share of the layers to drop instead, such as 50%; in vocabulary it is what stays."
    )
    pick: Literal["small", "large"] | None = Field(
        None, description="Let the layer losses on tuples from --data choose: the low point of either half."
    )
    blocks: _Blocks | None = Field(None, description="The layers to keep, counted from 0, such as 0,1,2,5,8.")
    order: Literal["auto", "first", "spread"] = Field(
        "auto",
        description="Which ones keep and fraction keep: the first, or evenly spaced ones; auto: first in decoders.",
    )


class DepthPlan(Plan):
    """The layers that stay, and the curve that chose them where one did."""

    blocks: tuple[int, ...]
    of: int
    pick: Literal["small", "large"] | None = None
    losses: tuple[float, ...] = ()
    """The loss of each layer as the last one, where they were compared."""

    frequencies: Literal["texts", "rank"] = "rank"
    """Where a static model has its token frequencies from."""

    def __str__(self) -> str:
        if not self.blocks:
            known = "the texts" if self.frequencies == "texts" else "their rank"
            return f"keep none of {self.of} layers: static, tokens weighed by {known}"
        kept = f"keep {len(self.blocks)} of {self.of} layers: {', '.join(map(str, self.blocks))}"
        if self.pick is None:
            return f"keep all {self.of} layers: nothing to cut" if len(self.blocks) == self.of else kept
        loss = f"loss {self.losses[len(self.blocks) - 1]:.3f}, whole model {self.losses[-1]:.3f}"
        if len(self.blocks) == self.of:
            return f"{self.pick} is the whole model ({loss}): nothing to cut"
        return f"{self.pick} ({loss}): {kept}"


def _layers_left(layers: int, fraction: Fraction) -> int:
    """floor(L·(1−p)) without floating point: nine tenths of ten layers leave one, not none."""
    return math.floor(layers * (1 - fraction))


DEPTH = Method(
    name="depth",
    help="Keep some layers and drop the rest, down to none.",
    options=DepthOptions,
    plans=DepthPlan,
)
