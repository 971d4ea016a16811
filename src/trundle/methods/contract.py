"""What every step is: options in, a plan that prints and replays, a model out.

A step file says what it does in its docstring, lists its options in one class, decides in `plan`, acts in `apply`, and
ends with one `Step` record. The command line, recipes and the contract matrix are made from that record alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from trundle.cache import cache_folder
from trundle.progress import SILENT, Progress

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data.corpus import Corpus
    from trundle.embedder import Embedder
    from trundle.model.cost import Cost

LONGEST = 512
"""Tokens a text is cut to in training and measuring, where the model does not take fewer: the papers' own limit."""


class Options(BaseModel):
    """A step's options: frozen, by keyword, unknown ones refused, each with one line of help."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Plan(BaseModel, ABC):
    """What a step has decided: prints as one line, survives JSON, and leads to the same model when replayed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a step may use besides the model: the model that came in the door, the user's texts, a seed."""

    original: SentenceTransformer
    source: str | None = None
    """The folder or hub name the original was opened from, where it was."""
    corpus: Corpus | None = None
    seed: int = 0
    cache: Path = field(default_factory=cache_folder)
    """Where teacher vectors and unfinished trainings are kept between runs."""
    trust_remote_code: bool = False
    pair: bool = False
    """Whether the result will be put into one folder with the teacher whose space it is in."""
    fresh: bool = False
    """Whether nothing is taken over from a run that was stopped."""
    progress: Progress = SILENT
    opened: dict[str, Any] = field(default_factory=dict)
    """Costly things opened in `plan` that `apply` needs again, such as a teacher."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A further model, and the files that belong into its folder."""

    model: SentenceTransformer
    files: Mapping[str, str | bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The model a step made, and what is worth keeping of how it went."""

    model: SentenceTransformer
    space: Embedder | None = None
    """Whose vector space the model is in now, where that is another one's than the original's."""
    teacher: SentenceTransformer | None = None
    """The same one as a model, where it is one."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    done: Callable[[], None] = lambda: None
    """Called when the result is safe on disk: what was only kept in case of a failure may go."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files to keep in the model's folder, such as a training's metrics."""
    besides: Mapping[str, Beside] = field(default_factory=dict)
    """Further models the step made; each leaves in a folder of its own, named after the output and its name here."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores of the result alone, where the original has no such."""
    use: str = ""
    """The lines of Python that ask the model, where it gives something else than vectors."""
    judge: Callable[[Embedder], Mapping[str, float]] | None = None
    """Scores by which the original and the end result are to be compared, where the step knows such."""


_O = TypeVar("_O", bound=Options)
_P = TypeVar("_P", bound=Plan)


def never(_options: Any) -> bool:
    """For a step that leads into no space, whatever its options."""
    return False


@dataclass(frozen=True, kw_only=True)
class Method(Generic[_O, _P]):
    """One way to make a model smaller or better."""

    name: str
    help: str
    options: type[_O]
    plans: type[_P]
    besides: Callable[[_P], tuple[str, ...]] = lambda _: ()
    """The names of the further models that `apply` will make."""
    needs_texts: bool = False
    """Whether it learns from the user's texts; such a step is not applied in a dry run."""
    enters_space: Callable[[_O], bool] = never
    """Whether it leads, with these options, into a teacher's vector space, so that the two models can be paired. Any other
    step that gives vectors moves them, and has to come before it."""
    reads: Callable[[_O], tuple[str, ...]] = lambda _: ()
    """Files, folders or names of models, besides the model and the texts, that its result depends on."""
    gives_vectors: bool = True
    """Whether what its result gives for a text can be searched with; after a step that gives something else comes none."""

    def plan(self, model: SentenceTransformer, options: _O, context: Context) -> _P:
        """Decides what to do to `model`, and checks that it can be done."""
        made: _P = self._code().plan(model, options, context)
        return made

    def forecast(self, model: SentenceTransformer, plan: _P) -> Cost:
        """Returns what the model will cost after `apply`, by arithmetic alone."""
        cost: Cost = self._code().forecast(model, plan)
        return cost

    def apply(self, model: SentenceTransformer, plan: _P, context: Context) -> Applied:
        """Carries out `plan` and returns the new model; `model` stays as it is."""
        applied: Applied = self._code().apply(model, plan, context)
        return applied

    def reopen(self, applied: Applied, plan: _P, context: Context) -> Applied:
        """Restores what a stored result can't hold, such as the teacher; most methods have nothing to restore."""
        code = self._code()
        restored: Applied = code.reopen(applied, plan, context) if hasattr(code, "reopen") else applied
        return restored

    def _code(self) -> Any:
        """The module that does the work; imported on first use, because it imports torch."""
        return import_module(f"trundle.methods.{self.name}.{self.name}")


def _exact_fraction(value: object) -> object:
    """Read '30%', '1/3' and 0.3 as the exact fraction a person means: 0.9 is nine tenths, not its binary neighbour."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    written = str(value).strip()
    try:
        return Fraction(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError("give a share such as 30%, 1/3 or 0.3") from error


ExactFraction = Annotated[Fraction, BeforeValidator(_exact_fraction), PlainSerializer(str)]
"""A share given by a person, kept exact."""

Given = str | dict[Literal["query", "document"], str]


def _read_mapping(value: object) -> object:
    """What a person types on the command line for a mapping: YAML in braces."""
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError('write it in braces, as in {file: "prompt"}') from error


FilePrompts = Annotated[dict[str, Given], BeforeValidator(_read_mapping)]
"""File → the prompt of its queries, or one for queries and one for documents."""


def listed(value: object) -> object:
    """Read '0,1,5' as a list, as a person types it."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
