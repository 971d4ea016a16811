"""weights: set to zero, or cut out, the weights that matter least for a domain (GAPrune).

Two sets of samples are read, of your domain and of everything else. From the gradients of each sample come how important
every weight of the MLPs is to either side (Fisher information), and whether both sides pull it the same way (alignment).
Their score (DAI) keeps what the domain needs and drops what only gets in its way. Other methods are there to compare.

`structure` says what goes: single weights (the paper; smaller on disk, not faster), whole neurons (smaller and faster
everywhere), or two of each four (faster on GPUs that can). `contrast` or `align` afterwards heal, and zeros stay zeros.

    - weights: {domain: finance.jsonl, general: general.jsonl, sparsity: 50%}
    - weights: {domain: finance.jsonl, general: general.jsonl, sparsity: 30%, structure: neuron}
    - weights: {sparsity: 50%, method: magnitude}

Paper: GAPrune: Gradient-Alignment Pruning for Domain-Aware Embeddings.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from pydantic import Field

from trundle.methods.contract import ExactFraction, Method, Options, Plan

_Score = Literal["gaprune", "magnitude", "random", "general-fisher", "domain-fisher", "wanda"]
_AlignedBy = Literal["row", "tensor"]
_FisherScale = Literal["mean", "largest", "raw"]
_Selection = Literal["global", "tensor", "row"]

_Structure = Literal["unstructured", "neuron", "2:4"]


class WeightsOptions(Options):
    """By which samples, how many weights, and in which form."""

    domain: str | None = Field(
        None, description="Tuples or texts of your domain, in any form --data takes. Default: --data."
    )
    general: str | None = Field(
        None, description="Tuples or texts of everything else, in any form --data takes."
    )
    sparsity: ExactFraction | None = Field(
        None, description="Share of the weights, or neurons, that go, such as 50%; 0 changes nothing."
    )
    structure: _Structure = Field(
        "unstructured",
        description="What goes: single weights, whole MLP neurons (faster everywhere), two of each four (GPUs).",
    )
    method: _Score = Field("gaprune", description="What a weight is judged by.")
    selection: _Selection | None = Field(
        None,
        description="Among which weights the worst are looked for. Default: global, for wanda row.",
    )
    attention: bool = Field(False, description="Prune the matrices of attention, too, not the MLPs alone.")
    samples: int = Field(5000, ge=2, description="Tuples of each side whose gradients are taken.")
    aligned_by: _AlignedBy = Field(
        "row",
        description="Over what the two sides' gradients are compared: each output neuron, or a whole matrix.",
    )
    fisher: _FisherScale = Field(
        "mean",
        description="Fisher information relative to the mean or the largest of its matrix, or raw as in the paper.",
    )
    alpha: float = Field(0.2, allow_inf_nan=False, description="How much alignment counts in DAI.")
    beta: float = Field(
        0.0,
        allow_inf_nan=False,
        description="How much general importance is held against a weight; 1 in the paper.",
    )
    gamma: float = Field(0.5, allow_inf_nan=False, description="How much magnitude counts in DAI.")
    batch_size: int = Field(
        32, ge=2, description="Samples that are each other's rivals; more need more memory."
    )
    max_length: int | None = Field(
        None, ge=2, description="Tokens after which a text is cut. Default: up to 512."
    )
    take_over: bool = Field(
        True,
        description="With neurons: those that stay take over what the others gave, by least squares on your texts.",
    )


_HALF = Fraction(1, 2)
_NEEDS_DOMAIN: tuple[_Score, ...] = ("gaprune", "domain-fisher", "wanda")
_NEEDS_GENERAL: tuple[_Score, ...] = ("gaprune", "general-fisher")
_CALLED: dict[_Score, str] = {
    "gaprune": "lowest DAI",
    "magnitude": "lowest magnitude",
    "random": "worst luck",
    "general-fisher": "lowest Fisher information on general data",
    "domain-fisher": "lowest Fisher information on the domain",
    "wanda": "lowest magnitude times activation on the domain",
}
_AMONG: dict[_Selection, str] = {"global": "of all of them", "tensor": "in each matrix", "row": "in each row"}


class WeightsPlan(Plan):
    """How many weights or neurons go; which, the samples decide."""

    options: WeightsOptions
    zeros: int
    weights: int
    neurons: int | None = None
    """Neurons that stay in each layer, where whole ones go."""
    of: int | None = None

    def __str__(self) -> str:
        asked = self.options
        if not self.zeros and self.neurons == self.of:
            return "keep all weights: nothing to prune"
        where = "MLPs and attention" if asked.attention else "the MLPs"
        worst = _CALLED[asked.method]
        if self.neurons is not None:
            return f"keep {self.neurons:,} of {self.of:,} MLP neurons in each layer; those of the {worst} go"
        share = f"{self.zeros:,} of {self.weights:,} weights of {where}"
        if asked.structure == "2:4":
            return f"zero {share}: the two of the {worst} of each four"
        return f"zero {share}: those of the {worst} {_AMONG[_selection_of(asked)]}"


def _selection_of(options: WeightsOptions) -> _Selection:
    """Among which weights the worst are looked for: Wanda compares what enters the same neuron, as its paper does."""
    return options.selection or ("row" if options.method == "wanda" else "global")


WEIGHTS = Method(
    name="weights",
    help="Zero or cut the weights that matter least for your domain.",
    options=WeightsOptions,
    plans=WeightsPlan,
    needs_texts=True,
    reads=lambda options: tuple(side for side in (options.domain, options.general) if side is not None),
)
