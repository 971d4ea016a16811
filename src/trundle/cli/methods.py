"""A verb for each step, its flags made from the step's options class, so that nothing is written twice."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from trundle.cli.common import (
    _carry_out,
    _Data,
    _DryRun,
    _Force,
    _Json,
    _Model,
    _Output,
    _Pair,
    _Quiet,
    _Seed,
    _TrustRemoteCode,
    _Verbose,
)
from trundle.methods.contract import Method, never

_PLAIN = (bool, int, float, str)
_COMMON: dict[str, tuple[Any, Any]] = {
    "output": (_Output, None),
    "data": (_Data, None),
    "seed": (_Seed, 0),
    "dry_run": (_DryRun, False),
    "force": (_Force, False),
    "as_json": (_Json, False),
    "quiet": (_Quiet, False),
    "verbose": (_Verbose, False),
    "trust": (_TrustRemoteCode, False),
}
_PAIRED: dict[str, tuple[Any, Any]] = {"pair": (_Pair, False)}


def _step_verb(step: Method[Any, Any]) -> Callable[..., None]:
    """A function for typer whose parameters are the step's options and the flags all verbs share."""
    options = step.options.model_fields

    def verb(model: str, **given: Any) -> None:
        from trundle.recipe import single

        asked = {name: given.pop(name) for name in options}
        chosen = {name: _number(options[name], value) for name, value in asked.items() if value is not None}
        _carry_out(model, single(step, chosen), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_Model)]
    parameters += [
        inspect.Parameter(name, keyword, default=None, annotation=_flag(field))
        for name, field in options.items()
    ]
    parameters += [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in (
            _COMMON | (_PAIRED if step.enters_space is not never else {})
        ).items()
    ]
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    verb.__name__, verb.__doc__ = step.name, step.help
    return verb


def _flag(field: FieldInfo) -> Any:
    """The flag of one option; its own default is shown but not set, so that only what was given is passed on."""
    kind = _plain(field.annotation)
    default = "" if field.default in (None, "") or field.is_required() else f" [default: {field.default}]"
    told = "|".join(get_args(kind)) if get_origin(kind) is Literal else kind.__name__
    option = typer.Option(
        help=f"{field.description}{default}",
        show_default=False,
        metavar=None if kind is bool else f"<{told}>",
    )
    return Annotated[(bool if kind is bool else str) | None, option]


def _number(field: FieldInfo, value: Any) -> Any:
    """A number as one; what is none, or no choice, is left for the options class, which says in one sentence what to give."""
    kind = _plain(field.annotation)
    try:
        return kind(value) if kind in (int, float) else value
    except ValueError:
        return value


def _plain(annotation: Any) -> Any:
    """What a person gives; whatever is no plain value is text for the options class to read."""
    if get_origin(annotation) in (Union, types.UnionType):
        choices = [choice for choice in get_args(annotation) if choice is not type(None)]
        return _plain(choices[0]) if len(choices) == 1 else str
    if get_origin(annotation) is Literal or annotation in _PLAIN:
        return annotation
    return str
