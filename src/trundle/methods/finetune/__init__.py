"""finetune: train a model and a head on labelled texts or pairs, so that it names a class or gives a number.

The head is one linear layer on the pooled vectors, kept in the folder as a Dense module. What the model then gives
for a text is no vector to search with but a score for each class, whose names are in the backbone's config
(`id2label`), or one number. Two texts are read together, as one input. Everything is trained.

    - vocabulary: {parameters: 80%, oov: cluster}
    - finetune: {epochs: 3}

Paper: Words That Matter: Vocabulary Pruning in ModernBERT.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trundle.methods.contract import LONGEST, Method, Options, Plan

_EPOCHS = 3


class FinetuneOptions(Options):
    """From which rows, to which answers, and how."""

    kind: Literal["auto", "classes", "number"] = Field(
        "auto", description="What a label is; auto: a number where some label is a fraction, else a class."
    )
    epochs: int | None = Field(
        None, ge=1, description=f"How often each row is seen. Default: {_EPOCHS}, or what minutes allow."
    )
    steps: int | None = Field(None, ge=1, description="Optimizer steps, instead of epochs.")
    minutes: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Train for this long; with epochs or steps, whichever is reached first.",
    )
    rows: int | None = Field(None, ge=2, description="Use at most this many of the training rows.")
    batch_size: int = Field(32, ge=1, description="Rows per step.")
    learning_rate: float = Field(
        5e-5, gt=0, allow_inf_nan=False, description="The highest learning rate; it falls to zero."
    )
    warmup: int | None = Field(
        None, ge=0, description="Steps in which the learning rate rises. Default: a tenth of the run."
    )
    max_length: int | None = Field(
        None, ge=2, description=f"Tokens after which a text is cut in training. Default: up to {LONGEST}."
    )
    dropout: bool = Field(True, description="Train with the model's own dropout.")
    keep_zeros: bool | None = Field(
        None,
        description="Leave weights that are exactly zero as they are. Default: where many are, as after pruning.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 where the machine multiplies it (GPUs, AMX), fp32 elsewhere."
    )


class FinetunePlan(Plan):
    """What will be answered, and how it is learned."""

    options: FinetuneOptions
    labels: tuple[str, ...]
    """The names of the classes; none where the answer is a number."""
    pairs: bool
    inputs: int
    max_length: int

    @property
    def outputs(self) -> int:
        """How many scores there are."""
        return len(self.labels) or 1

    def __str__(self) -> str:
        asked = self.options
        what = f"one of {len(self.labels)} classes" if self.labels else "a number"
        times = [f"{asked.minutes:g} minutes"] if asked.minutes is not None else []
        if asked.steps is not None:
            times.insert(0, f"{asked.steps} steps")
        elif asked.epochs is not None or not times:
            times.insert(0, f"{asked.epochs or _EPOCHS} epochs")
        return (
            f"{what} for each {'pair of texts' if self.pairs else 'text'}, training for {' or '.join(times)}"
        )


FINETUNE = Method(
    name="finetune",
    help="Train the model and a head on labelled texts or pairs: classes, or a number.",
    options=FinetuneOptions,
    plans=FinetunePlan,
    needs_texts=True,
    gives_vectors=False,
)
