"""finetune: train a model and a head on labelled texts or pairs, so that it predicts a class or a number.

The head is one linear layer on the pooled vectors, saved as a Dense module. The model then returns no
vectors to search with, but a score for each class, whose names are in the backbone's config (`id2label`),
or one number. The two texts of a pair are one input. All weights are trained.

    - vocabulary: {parameters: 80%, oov: cluster}
    - finetune: {epochs: 3}

Paper: Words That Matter: Vocabulary Pruning in ModernBERT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trundle.errors import BadInput
from trundle.methods import contract
from trundle.methods.contract import Method, Options, Plan
from trundle.progress import process_count

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus

_EPOCHS = 3


class _FinetuneOptions(Options):
    """The rows, the kind of label and the training."""

    kind: Literal["auto", "classes", "number"] = Field(
        "auto", description="Kind of labels; auto: numbers if one is a fraction, otherwise classes."
    )
    epochs: int | None = Field(None, ge=1, description=f"Epochs. Default: {_EPOCHS}, or what minutes allow.")
    steps: int | None = Field(None, ge=1, description="Optimizer steps, instead of epochs.")
    minutes: float | None = Field(None, gt=0, allow_inf_nan=False, description=contract.MINUTES_HELP)
    rows: int | None = Field(None, ge=2, description="Use at most this many of the training rows.")
    batch_size: int = Field(32, ge=1, description="Rows per step.")
    learning_rate: float = Field(5e-5, gt=0, allow_inf_nan=False, description="Peak learning rate.")
    warmup: int | None = Field(
        None, ge=0, description="Warm-up steps of the rate. Default: a tenth of the run."
    )
    max_length: int | None = Field(None, ge=2, description=contract.LENGTH_HELP)
    dropout: bool = Field(True, description="Train with the model's dropout.")
    keep_zeros: bool | None = Field(None, description=contract.KEEP_ZEROS_HELP)
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description=contract.PRECISION_HELP)


class _FinetunePlan(Plan):
    """The classes, the size of the head, and the options."""

    options: _FinetuneOptions
    labels: tuple[str, ...]
    """The names of the classes; empty if the labels are numbers."""
    pairs: bool
    inputs: int
    max_length: int

    @property
    def outputs(self) -> int:
        """The number of scores."""
        return len(self.labels) or 1

    def __str__(self) -> str:
        options = self.options
        what = f"one of {len(self.labels)} classes" if self.labels else "a number"
        times = [f"{options.minutes:g} minutes"] if options.minutes is not None else []
        if options.steps is not None:
            times.insert(0, f"{options.steps} steps")
        elif options.epochs is not None or not times:
            times.insert(0, f"{options.epochs or _EPOCHS} epochs")
        inputs = "pair of texts" if self.pairs else "text"
        return f"{what} for each {inputs}, training for {' or '.join(times)}"


def _check(options: _FinetuneOptions, corpus: Corpus | None) -> None:
    if process_count() > 1:
        raise BadInput("finetune runs in one process only; start it without torchrun or accelerate launch")
    if options.steps is not None and options.epochs is not None:
        raise BadInput("steps and epochs both set the length of the training; pass one of them")
    if corpus is None:
        raise BadInput("finetune trains on labelled texts; pass them with --data")
    next(corpus.labelled("train"), None)  # rejects a file without labels


FINETUNE = Method(
    name="finetune",
    help="Train on labelled texts or pairs to predict a class or number.",
    options=_FinetuneOptions,
    plans=_FinetunePlan,
    needs_texts=True,
    check=_check,
    gives_vectors=False,
)
