"""weights: zero or remove the weights that matter least for a domain (GAPrune).

The method reads two sets of samples, of your domain and of general data. From the gradients of each sample it
computes how important every MLP weight is to each source (Fisher information), and whether the gradients of
both sources point in the same direction (alignment). The resulting score (DAI) keeps what the domain needs
and removes what conflicts with it. Other scores are available for comparison.

`structure` chooses what is removed: single weights (the paper; not faster), MLP neurons (smaller and faster
everywhere), or two of each four weights (faster on GPUs that support it). `contrast` or `align` afterwards
recover quality, and zeros stay zero.

    - weights: {domain: finance.jsonl, general: general.jsonl, sparsity: 50%}
    - weights: {domain: finance.jsonl, general: general.jsonl, sparsity: 30%, structure: neuron}
    - weights: {sparsity: 50%, method: magnitude}

Paper: GAPrune: Gradient-Alignment Pruning for Domain-Aware Embeddings.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import HEAL_HELP, LENGTH_HELP, ExactFraction, Heal, Method, Options, Plan

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus

_WeightScore = Literal["gaprune", "magnitude", "random", "general-fisher", "domain-fisher", "wanda"]
_AlignedBy = Literal["row", "tensor"]
_FisherScale = Literal["mean", "largest", "raw"]
_Selection = Literal["global", "tensor", "row"]
_Structure = Literal["unstructured", "neuron", "2:4"]
_Name = Literal["domain", "general"]
_HALF = Fraction(1, 2)
_SOURCES_OF: dict[_WeightScore, tuple[_Name, ...]] = {
    "gaprune": ("domain", "general"),
    "magnitude": (),
    "random": (),
    "general-fisher": ("general",),
    "domain-fisher": ("domain",),
    "wanda": ("domain",),
}
"""The sources that each method needs."""


class _WeightsOptions(Options):
    """Which samples, how many weights, and in which structure."""

    domain: str | None = Field(
        None, description="Tuples or texts of your domain, in any form --data takes. Default: --data."
    )
    general: str | None = Field(
        None, description="General data, in any form --data takes; for gaprune and general-fisher."
    )
    sparsity: ExactFraction | None = Field(
        None, description="Share of the weights or neurons to remove, such as 50%; 0 changes nothing."
    )
    structure: _Structure = Field(
        "unstructured",
        description="Remove single weights, MLP neurons (faster everywhere), or two of each four (GPUs).",
    )
    method: _WeightScore = Field(
        "gaprune", description="How weights are scored; gaprune compares your domain with general data (DAI)."
    )
    selection: _Selection | None = Field(
        None, description="Among which weights the lowest scores are chosen. Default: global, for wanda row."
    )
    attention: bool = Field(False, description="Prune the matrices of attention as well as the MLPs.")
    samples: int = Field(
        5000, ge=2, description="Maximum number of tuples of each source to measure gradients on."
    )
    aligned_by: _AlignedBy = Field(
        "row", description="Compare the gradients of both sources per output neuron, or per matrix."
    )
    fisher: _FisherScale = Field(
        "mean", description="Divide Fisher information by its matrix's mean or maximum; raw as in the paper."
    )
    alpha: float = Field(0.2, allow_inf_nan=False, description="Weight of alignment in DAI.")
    beta: float = Field(
        0.0, allow_inf_nan=False, description="How much general importance lowers the score; 1 in the paper."
    )
    gamma: float = Field(0.5, allow_inf_nan=False, description="Weight of magnitude in DAI.")
    batch_size: int = Field(
        32, ge=2, description="Samples that are each other's negatives; more need more memory."
    )
    max_length: int | None = Field(None, ge=2, description=LENGTH_HELP)
    heal: Heal | None = Field(None, description=f"With neuron: {HEAL_HELP[0].lower()}{HEAL_HELP[1:]}")


_CALLED: dict[_WeightScore, str] = {
    "gaprune": "lowest DAI",
    "magnitude": "lowest magnitude",
    "random": "lowest random score",
    "general-fisher": "lowest Fisher information on general data",
    "domain-fisher": "lowest Fisher information on the domain",
    "wanda": "lowest magnitude times activation on the domain",
}
_AMONG: dict[_Selection, str] = {"global": "of all of them", "tensor": "in each matrix", "row": "in each row"}


class _WeightsPlan(Plan):
    """How many weights or neurons are removed; the samples decide which."""

    options: _WeightsOptions
    zeros: int
    weights: int
    neurons: int | None = None
    """Neurons kept in each layer, if neurons are removed."""
    of: int | None = None

    def __str__(self) -> str:
        options = self.options
        if not self.zeros and self.neurons == self.of:
            return "keep all weights: nothing to prune"
        lowest = _CALLED[options.method]
        if self.neurons is not None:
            kept = f"keep {self.neurons:,} of {self.of:,} MLP neurons in each layer"
            return f"{kept}; remove those with the {lowest}"
        where = "MLPs and attention" if options.attention else "the MLPs"
        share = f"{self.zeros:,} of {self.weights:,} weights of {where}"
        if options.structure == "2:4":
            return f"zero {share}: the two with the {lowest} of each four"
        return f"zero {share}: those with the {lowest} {_AMONG[_selection_of(options)]}"


def _selection_of(options: _WeightsOptions) -> _Selection:
    """The given selection, or the default: Wanda compares the inputs of one neuron, as in its paper."""
    return options.selection or ("row" if options.method == "wanda" else "global")


def _share(options: _WeightsOptions) -> Fraction:
    """The share to remove; rejects options that contradict each other."""
    share = options.sparsity
    if share is None:
        if options.structure != "2:4":
            raise ImpossibleCut("choose the share of weights to remove with sparsity, such as 50%")
        share = _HALF
    if not 0 <= share < 1:
        raise ImpossibleCut(f"sparsity must be at least 0 and under 1, such as 50%, not {share}")
    if options.structure == "2:4" and share not in (0, _HALF):
        raise ImpossibleCut("2:4 removes two of each four weights, which is 50%; leave sparsity out")
    if options.structure == "2:4" and options.selection is not None:
        raise ImpossibleCut("2:4 compares four weights at a time; leave selection out")
    if options.heal == "closed-form" and options.structure != "neuron":
        raise ImpossibleCut("only a model without the removed neurons is healed; leave heal out")
    if options.structure == "neuron":
        if options.attention:
            raise ImpossibleCut("only MLPs have neurons; leave attention out, or prune single weights")
        if options.selection is not None:
            raise ImpossibleCut("all layers have one MLP width; leave selection out")
    return share


def _check(options: _WeightsOptions, corpus: Corpus | None) -> None:
    given = {"domain": options.domain or corpus, "general": options.general}
    for name in _SOURCES_OF[options.method] if _share(options) else ():
        if given[name] is None:
            otherwise = ", or with --data FILE" if name == "domain" else "; domain-fisher does not need it"
            raise BadInput(f"pass the {name} data with --{name} FILE, in a recipe weights.{name}{otherwise}")


WEIGHTS = Method(
    name="weights",
    help="Zero or remove the weights that matter least for your domain.",
    options=_WeightsOptions,
    plans=_WeightsPlan,
    needs_texts=True,
    check=_check,
    reads=lambda options: tuple(file for file in (options.domain, options.general) if file is not None),
)
