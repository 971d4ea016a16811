"""What a method is: options in, a plan that prints and replays, a model out.

A method's `__init__.py` holds its documentation, its Options and Plan classes and one `Method` record;
`NAME/NAME.py` holds `plan`, `forecast` and `apply`. The command line, recipes and the contract tests are
generated from the record.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, cast

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from trundle.cache import cache_folder
from trundle.embedder import LONGEST
from trundle.progress import SILENT, Progress

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data.corpus import Corpus
    from trundle.embedder import Embedder
    from trundle.model.cost import Cost
    from trundle.teacher.teacher import Teacher

Heal = Literal["closed-form", "none"]
"""Whether the weights that a cut leaves are fitted to the uncut model."""
Healing = Literal["closed-form", "if possible", "none"]
"""The same in a plan: by default a cut is healed if there are enough texts."""
ACCUMULATE_HELP = "Batches per optimizer step, whose gradients are averaged: large steps in little memory."
COMPILE_HELP = "Compile the layers first: takes up to a minute, then steps are faster on a GPU."
HEAL_HELP = "Fit what is left to the uncut model by least squares. Default: closed-form, if there are texts."
KEEP_ZEROS_HELP = "Keep zero weights zero. Default: if many are zero, as after pruning."
LENGTH_HELP = f"Truncate texts to this many tokens. Default: the model's limit, up to {LONGEST}."
MINUTES_HELP = "Train for at most this many minutes, even if steps or epochs are left."
PRECISION_HELP = "auto: bf16 if the hardware multiplies it (GPUs, AMX), else fp32."


class Options(BaseModel):
    """A method's options: frozen, keyword-only, unknown keys rejected, one line of help each."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Plan(BaseModel, ABC):
    """What a method has decided: prints as one line, serialises to JSON, and can be replayed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a method may use in addition to the model: the input of the run, the user's texts, a seed."""

    original: SentenceTransformer
    """The model the run started from."""
    source: str | None = None
    """The folder or hub name the original was loaded from, if any."""
    corpus: Corpus | None = None
    seed: int = 0
    cache: Path = field(default_factory=cache_folder)
    """Where teacher vectors and checkpoints are stored between runs."""
    trust_remote_code: bool = False
    pair: bool = False
    """Whether the result will be saved in one folder with the teacher whose vector space it shares."""
    fresh: bool = False
    """Whether to ignore the checkpoints of an interrupted run."""
    progress: Progress = SILENT
    models: Mapping[str, SentenceTransformer] = field(default_factory=dict)
    """Models that are loaded already, by name."""
    opened: dict[str, Any] = field(default_factory=dict)
    """Expensive objects that are needed again, by this method or by the next run of a search."""
    dry_run: bool = False
    """Whether only the sizes of the result matter."""
    deadline: float = math.inf
    """The time (`time.monotonic`) at which a training must end."""
    later: tuple[Options, ...] = ()
    """The options of the methods that follow, for a method that `looks_ahead`."""


@dataclass(frozen=True, kw_only=True)
class AdditionalModel:
    """A model that a method made in addition to its result, and the files for its folder."""

    model: SentenceTransformer
    files: Mapping[str, str | bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The model a method made, and what the run records about it."""

    model: SentenceTransformer
    space: Teacher | None = None
    """The teacher whose vector space the result is in, if it is not the original; it encodes any text."""
    teacher: SentenceTransformer | None = None
    """The same as a `SentenceTransformer`, if it is one."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    done: Callable[[], None] = lambda: None
    """Called when the result is saved; deletes what was stored in case of a failure."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files for the model's folder, such as training metrics."""
    additional: Mapping[str, AdditionalModel] = field(default_factory=dict)
    """Additional models by name; each is written to its own folder, named after the output and this name."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores of the result that the original does not have."""
    use: str = ""
    """Lines of Python that show how to use the model, if it does not return vectors."""
    evaluator: Callable[[Embedder], Mapping[str, float]] | None = None
    """Scores a model; used to compare the original with the final result."""


_O = TypeVar("_O", bound=Options)
_P = TypeVar("_P", bound=Plan)


def never(_options: Any) -> bool:
    """Return False: the default of `Method.enters_space` and `Method.looks_ahead`."""
    return False


@dataclass(frozen=True, kw_only=True)
class Method(Generic[_O, _P]):
    """One way to make a model smaller or better."""

    name: str
    help: str
    options: type[_O]
    plans: type[_P]
    additional: Callable[[_P], tuple[str, ...]] = lambda _: ()
    """The names of the additional models that `apply` will make."""
    needs_texts: bool = False
    """Whether it uses the user's texts; a dry run does not apply such a method."""
    enters_space: Callable[[_O], bool] = never
    """Whether the result, with these options, is in a teacher's vector space, so that they can be paired.
    All other methods that return vectors change them, and must come before it."""
    reads: Callable[[_O], tuple[str, ...]] = lambda _: ()
    """Files, folders or model names, other than the model and the texts, that its result depends on."""
    check: Callable[[_O, Corpus | None], None] = lambda _options, _corpus: None
    """Rejects options that contradict each other, and missing texts, before torch is imported."""
    looks_ahead: Callable[[_O], bool] = never
    """Whether its plan, with these options, depends on the methods that follow in the recipe."""
    gives_vectors: bool = True
    """Whether its result returns vectors for search; no method can follow one that returns something else."""

    def plan(self, model: SentenceTransformer, options: _O, context: Context) -> _P:
        """Decide what to do to `model`, and check that it is possible."""
        self.check(options, context.corpus)
        return cast("_P", self._code().plan(model, options, context))

    def forecast(self, model: SentenceTransformer, plan: _P) -> Cost:
        """Return the cost of the model after `apply`, by arithmetic alone."""
        return cast("Cost", self._code().forecast(model, plan))

    def apply(self, model: SentenceTransformer, plan: _P, context: Context) -> Applied:
        """Carry out `plan` and return the new model; `model` is not changed."""
        return cast("Applied", self._code().apply(model, plan, context))

    def reopen(self, applied: Applied, plan: _P, context: Context) -> Applied:
        """Restore what a stored result can't hold, such as the teacher; most methods have nothing."""
        code = self._code()
        return cast("Applied", code.reopen(applied, plan, context)) if hasattr(code, "reopen") else applied

    def _code(self) -> Any:
        """The method's implementation; imported on first use, because it imports torch."""
        return import_module(f"trundle.methods.{self.name}.{self.name}")


def _exact_fraction(value: object) -> object:
    """Read '30%', '1/3' and 0.3 as exact fractions: 0.9 is nine tenths, not the nearest binary number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    written = str(value).strip()
    try:
        return Fraction(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError("pass a share such as 30%, 1/3 or 0.3") from error


ExactFraction = Annotated[Fraction, BeforeValidator(_exact_fraction), PlainSerializer(str)]
"""A share as the user wrote it, kept exact."""

Given = str | dict[Literal["query", "document"], str]


def _read_mapping(value: object) -> object:
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError('write it in braces, as in {file: "prompt"}') from error


FilePrompts = Annotated[dict[str, Given], BeforeValidator(_read_mapping)]
"""File name → the prompt of its queries, or one prompt for queries and one for documents."""


def listed(value: object) -> object:
    """Read a string such as '0,1,5' as a list; other values are returned unchanged."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
