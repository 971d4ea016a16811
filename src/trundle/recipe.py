"""A recipe is a list of methods with options, from YAML or Python, validated before anything heavy starts.

about: one line
steps:
  - depth: {keep: 3}
  - align: {texts: 4096}
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trundle.errors import BadInput, BadRecipe
from trundle.methods import METHODS
from trundle.methods.align import AlignOptions
from trundle.methods.contract import Method, Options

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus

_SHIPPED = files("trundle") / "recipes"
_ROW = "'- depth: {keep: 3}'"
_EXPECTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "pass a whole number"),
    **dict.fromkeys(("float_parsing", "float_type", "finite_number"), "pass a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "pass true or false"),
    "literal_error": "pass {expected}",
    "greater_than": "pass more than {gt:g}",
    "greater_than_equal": "pass {ge:g} or more",
    "less_than": "pass less than {lt:g}",
    "less_than_equal": "pass {le:g} or less",
    "value_error": "{error}",
}
"""What to do, by pydantic's type of an error."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One method with its options."""

    method: Method[Any, Any]
    options: Options

    def as_json(self) -> dict[str, Any]:
        """Returns the row of a recipe for this call."""
        return {self.method.name: self.options.model_dump(mode="json", exclude_defaults=True)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Methods in order."""

    name: str
    about: str
    calls: tuple[Call, ...]

    def check(self, corpus: Corpus | None) -> None:
        """Rejects what can be rejected before a model is loaded: options, and texts that a method lacks."""
        for call in self.calls:
            call.method.check(call.options, corpus)
        first = self.calls[0].options if self.calls else None
        if isinstance(first, AlignOptions) and first.teacher is None:  # nothing was cut before it
            raise BadInput("a student needs another model as its teacher; name it with --teacher")

    def as_json(self) -> dict[str, Any]:
        """Returns the recipe as it is written in YAML."""
        return {"about": self.about, "steps": [call.as_json() for call in self.calls]}


def recipe_names() -> list[str]:
    """Returns the names of the recipes that come with trundle."""
    names = [file.name for file in _SHIPPED.iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Returns a recipe: `name` is a built-in recipe or a YAML file, `changes` are `method.option=value`."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRecipe(f"the recipe {path} can't be read ({error}); check the path") from error
        return parse_recipe(text, name=path.stem, changes=changes)
    if str(name) not in recipe_names():
        instead = _instead(str(name), recipe_names())
        raise BadRecipe(f"there is no recipe {str(name)!r} and no such .yaml file; {instead}")
    text = (_SHIPPED / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_recipe(text, name=str(name), changes=changes)


def parse_recipe(text: str, *, name: str, changes: Sequence[str] = ()) -> Recipe:
    """Reads a recipe from YAML; rejects repeated and unknown keys. `changes` are `method.option=value`."""
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise BadRecipe(f"the recipe {name} is not valid YAML ({problem}); fix that line") from error
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list) or not content["steps"]:
        raise BadRecipe(f"the recipe {name} has no steps; write 'steps:' with rows like {_ROW}")
    unknown = set(content) - {"about", "steps"}
    if unknown:
        key = min(map(str, unknown))
        raise BadRecipe(f"the recipe {name} has an unknown key {key!r}; the keys are 'about' and 'steps'")
    rows = [_row(row, name) for row in content["steps"]]
    for change in changes:
        _change(rows, change, name)
    return make_recipe(rows, name=name, about=str(content.get("about", "")))


def make_recipe(rows: Iterable[tuple[str, Mapping[str, Any]]], *, name: str, about: str = "") -> Recipe:
    """Returns a recipe of methods in order, each given as its name and its options."""
    methods = [(METHODS[method], options) for method, options in rows]
    calls = tuple(Call(method=method, options=make_options(method, given)) for method, given in methods)
    _check_order(calls, name)
    return Recipe(name=name, about=about, calls=calls)


def _check_order(calls: Sequence[Call], name: str) -> None:
    """Rejects methods after one that gives no vectors, or after the last alignment if they change vectors."""
    for call in calls[:-1]:
        if not call.method.gives_vectors:
            last = call.method.name
            raise BadRecipe(
                f"the recipe {name} has methods after {last}, which gives labels; put {last} last"
            )
    entries = [number for number, call in enumerate(calls) if call.method.enters_space(call.options)]
    for call in calls[entries[-1] + 1 :] if entries else ():
        if call.method.gives_vectors:
            aligned, moved = calls[entries[-1]].method.name, call.method.name
            raise BadRecipe(
                f"the recipe {name} has {moved} after its last {aligned}, which moves the vectors out of the "
                f"teacher's space; put {moved} before {aligned}"
            )


def single(method: Method[Any, Any], options: Mapping[str, Any]) -> Recipe:
    """Returns a recipe of one method, which is what the method's own command runs."""
    return make_recipe([(method.name, options)], name=method.name, about=method.help)


def make_options(method: Method[Any, Any], given: Mapping[str, Any]) -> Options:
    """Validates the options `given` for `method` and returns them; the first error becomes one sentence."""
    known = method.options.model_fields
    for key in given:
        if key not in known:
            raise BadRecipe(f"{method.name} has no option {key!r}; {_instead(str(key), known)}")
    try:
        checked: Options = method.options.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:1])
        raise BadRecipe(f"{method.name}.{place} can't be {first['input']!r}; {_expected(first)}") from error
    return checked


def _expected(wrong: ErrorDetails) -> str:
    known = _EXPECTED.get(wrong["type"])
    return wrong["msg"].lower() if known is None else known.format(**wrong.get("ctx", {}))


def _row(row: object, name: str) -> tuple[str, dict[str, Any]]:
    if isinstance(row, str):
        row = {row: None}
    if not isinstance(row, dict) or len(row) != 1:
        raise BadRecipe(f"each row of the recipe {name} is one method with its options, such as {_ROW}")
    step, options = next(iter(row.items()))
    if step not in METHODS:
        raise BadRecipe(f"the recipe {name} has an unknown method {step!r}; {_instead(str(step), METHODS)}")
    if options is not None and not isinstance(options, dict):
        problem = f"must be 'option: value' pairs, not {options!r}"
        raise BadRecipe(f"the options of {step} in the recipe {name} {problem}")
    return step, dict(options or {})


def _change(rows: list[tuple[str, dict[str, Any]]], change: str, name: str) -> None:
    target, equals, value = change.partition("=")
    method, dot, option = target.partition(".")
    if not (equals and dot and option):
        raise BadRecipe(f"--set takes method.option=value, such as depth.keep=3, not {change!r}")
    meant = [options for called, options in rows if called == method]
    if not meant:
        raise BadRecipe(f"the recipe {name} does not use {method!r}; {_instead(method, dict(rows))}")
    try:
        wanted = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise BadRecipe(f"--set {change!r} has a value that can't be read; put it in quotes") from error
    for options in meant:
        options[option] = wanted


def _instead(wrong: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"


class _StrictLoader(yaml.SafeLoader):
    """YAML that rejects repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, str):
                raise yaml.YAMLError(f"the key {key!r} is not a string at {key_node.start_mark}")
            if key in seen:
                raise yaml.YAMLError(f"the key {key!r} occurs twice at {key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)
