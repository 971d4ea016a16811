"""What a person can say about pruning weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trundle.measure.weight_names import AlignedBy, FisherScale, Method, Selection
from trundle.steps.contract import ExactFraction, Options

Structure = Literal["unstructured", "neuron", "2:4"]


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
    structure: Structure = Field(
        "unstructured",
        description="What goes: single weights, whole MLP neurons (faster everywhere), two of each four (GPUs).",
    )
    method: Method = Field("gaprune", description="What a weight is judged by.")
    selection: Selection | None = Field(
        None,
        description="Among which weights the worst are looked for. Default: global, for wanda row.",
    )
    attention: bool = Field(False, description="Prune the matrices of attention, too, not the MLPs alone.")
    samples: int = Field(5000, ge=2, description="Tuples of each side whose gradients are taken.")
    aligned_by: AlignedBy = Field(
        "row",
        description="Over what the two sides' gradients are compared: each output neuron, or a whole matrix.",
    )
    fisher: FisherScale = Field(
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
