"""depth: keep some layers of a model and remove the others.

Choose how many layers to keep (`keep`), the share to remove (`drop`: floor(L·(1−p)) of L layers are kept,
computed exactly), which ones (`blocks`), or let the layer-loss curve choose (`pick`: the minimum in the lower
or the upper half of the model, from one forward pass over labelled tuples; if `contrast` follows in a recipe,
on the model with its prompts, pooling, attention and length). Embeddings, pooling and the final norm of
pre-norm models are kept. In an encoder a number of layers means evenly spaced ones, from two on including the
last layer, which produces the vectors; in a decoder it means the first ones (`order` overrides this).

If there are texts, the layers that are left are fitted to the whole model by least squares, each one to stand
for the removed ones that follow it (`heal: none` leaves them as they were).

`keep: 0` makes a static model, the fastest kind of embedder: one vector per token, initialised with the
model's output for that token alone and weighted by the frequency of the token in the texts of --data, or by
its rank without texts.

    - depth: {keep: 3}
    - depth: {drop: 50%, order: first}
    - depth: {pick: small}
    - depth: {blocks: [0, 1, 2, 5, 8]}

Paper: Large Language Models Are Overparameterized Text Encoders (L³Prune).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import HEAL_HELP, ExactFraction, Heal, Healing, Method, Options, Plan, listed

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus

_SCALE = 20.0
_Blocks = Annotated[tuple[int, ...], BeforeValidator(listed)]


class _DepthOptions(Options):
    """Which layers to keep; exactly one of keep, drop, pick and blocks is set."""

    keep: int | None = Field(
        None,
        strict=True,
        description="How many layers to keep; 0 makes a static model, with one vector per token.",
    )
    drop: ExactFraction | None = Field(
        None, description="Share of the layers to remove instead, such as 50%."
    )
    pick: Literal["small", "large"] | None = Field(
        None,
        description="Use the layer losses on tuples from --data: the minimum of the lower or upper half.",
    )
    scale: float = Field(
        _SCALE, gt=0, allow_inf_nan=False, description="With pick: multiplier of cosines in the layer losses."
    )
    blocks: _Blocks | None = Field(None, description="The layers to keep, counted from 0, such as 0,1,2,5,8.")
    order: Literal["auto", "first", "spread"] = Field(
        "auto", description="With keep or drop: the first or spaced layers; auto: first only in decoders."
    )
    heal: Heal | None = Field(None, description=HEAL_HELP)


class _DepthPlan(Plan):
    """The layers to keep, and the losses that chose them, if any."""

    blocks: tuple[int, ...]
    of: int
    pick: Literal["small", "large"] | None = None
    losses: tuple[float, ...] = ()
    """The loss of the model when it ends after each layer, if they were compared."""

    frequencies: Literal["texts", "rank"] = "rank"
    """The source of a static model's token frequencies."""
    heal: Healing = "none"

    def __str__(self) -> str:
        if not self.blocks:
            source = "frequency in the texts" if self.frequencies == "texts" else "rank"
            return f"keep none of {self.of} layers: static, tokens weighted by {source}"
        kept = f"keep {len(self.blocks)} of {self.of} layers: {', '.join(map(str, self.blocks))}"
        if self.pick is None:
            return f"keep all {self.of} layers: nothing to cut" if len(self.blocks) == self.of else kept
        loss = f"loss {self.losses[len(self.blocks) - 1]:.3f}, full model {self.losses[-1]:.3f}"
        if len(self.blocks) == self.of:
            return f"{self.pick} is the full model ({loss}): nothing to cut"
        return f"{self.pick} ({loss}): {kept}"


def _layers_left(layers: int, drop: Fraction) -> int:
    """floor(L·(1−p)) without floating point: removing nine tenths of ten layers leaves one, not none."""
    return math.floor(layers * (1 - drop))


def _check(options: _DepthOptions, corpus: Corpus | None) -> None:
    ways = [name for name in ("keep", "drop", "pick", "blocks") if getattr(options, name) is not None]
    if not ways:
        raise ImpossibleCut("choose how many layers to keep: pass keep, drop, pick or blocks")
    if len(ways) > 1:
        raise ImpossibleCut(f"{ways[0]} and {ways[1]} exclude each other; leave one of them out (or null)")
    if options.order != "auto" and ways[0] in ("pick", "blocks"):
        raise ImpossibleCut(f"order applies to keep and drop only; leave it out with {ways[0]}")
    if options.drop is not None and not 0 <= options.drop < 1:
        raise ImpossibleCut(f"drop must be at least 0 and under 1, not {options.drop}")
    if options.pick is not None:
        if corpus is None:
            raise BadInput("pick compares the layers on tuples of query and positive; pass them with --data")
        next(corpus.examples(), None)  # rejects a file without tuples


DEPTH = Method(
    name="depth",
    help="Keep some layers and remove the others, down to none.",
    options=_DepthOptions,
    plans=_DepthPlan,
    check=_check,
    looks_ahead=lambda options: options.pick is not None,
)
