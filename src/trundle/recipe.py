"""A recipe is a list of steps, from YAML or Python, refused before anything heavy starts if it makes no sense.

about: one line
steps:
  - depth: {keep: 3}
  - align: {texts: 4096}
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trundle.errors import BadRecipe
from trundle.methods import METHODS
from trundle.methods.contract import Method, Options

_SHIPPED = files("trundle") / "recipes"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One step with its options."""

    step: Method[Any, Any]
    options: Options

    def as_json(self) -> dict[str, Any]:
        """The row of a recipe that says this call."""
        return {self.step.name: self.options.model_dump(mode="json", exclude_defaults=True)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Steps in order."""

    name: str
    about: str
    calls: tuple[Call, ...]

    def as_json(self) -> dict[str, Any]:
        """The recipe as YAML would say it."""
        return {"about": self.about, "steps": [call.as_json() for call in self.calls]}


def recipe_names() -> list[str]:
    """The recipes that come with trundle."""
    return sorted(
        file.name.removesuffix(".yaml") for file in _SHIPPED.iterdir() if file.name.endswith(".yaml")
    )


def read_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name or a YAML file, with `step.option=value` changes applied."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRecipe(f"the recipe {path} can't be read ({error}); check the path") from error
        return parse_recipe(text, name=path.stem, changes=changes)
    if str(name) not in recipe_names():
        raise BadRecipe(
            f"there is no recipe {str(name)!r}; {_instead(str(name), recipe_names())}, or give a .yaml file"
        )
    return parse_recipe(
        (_SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), name=str(name), changes=changes
    )


def parse_recipe(text: str, *, name: str, changes: Sequence[str] = ()) -> Recipe:
    """Read YAML strictly: no key twice, none unknown."""
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise BadRecipe(
            f"the recipe {name} is not valid YAML ({' '.join(str(error).split())}); mend that line"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list) or not content["steps"]:
        raise BadRecipe(
            f"the recipe {name} has no steps; write 'steps:' with a list such as '- depth: {{keep: 3}}'"
        )
    unknown = set(content) - {"about", "steps"}
    if unknown:
        raise BadRecipe(
            f"the recipe {name} has an unknown key {min(map(str, unknown))!r}; it may have 'about' and 'steps'"
        )
    rows = [_row(row, name) for row in content["steps"]]
    for change in changes:
        _change(rows, change, name)
    calls = tuple(
        Call(step=METHODS[step], options=_make_options(METHODS[step], options)) for step, options in rows
    )
    _check_order(calls, name)
    return Recipe(name=name, about=str(content.get("about", "")), calls=calls)


def _check_order(calls: Sequence[Call], name: str) -> None:
    """What moves the vectors after the last alignment would lead out of the space again."""
    for call in calls[:-1]:
        if not call.step.gives_vectors:
            raise BadRecipe(
                f"the recipe {name} goes on after {call.step.name}, which ends in answers instead of vectors; "
                f"put {call.step.name} last"
            )
    entries = [number for number, call in enumerate(calls) if call.step.enters_space(call.options)]
    for call in calls[entries[-1] + 1 :] if entries else ():
        if call.step.gives_vectors:
            healed, moved = calls[entries[-1]].step.name, call.step.name
            raise BadRecipe(
                f"the recipe {name} has {moved} after its last {healed}, which leads out of the teacher's space again; "
                f"put {moved} before {healed}"
            )


def single(step: Method[Any, Any], options: Mapping[str, Any]) -> Recipe:
    """A recipe of one step: what a step's own verb runs."""
    return Recipe(
        name=step.name, about=step.help, calls=(Call(step=step, options=_make_options(step, options)),)
    )


def _make_options(step: Method[Any, Any], given: Mapping[str, Any]) -> Options:
    """Check options against the step's class; the first thing wrong becomes one sentence."""
    known = step.options.model_fields
    for key in given:
        if key not in known:
            raise BadRecipe(f"{step.name} has no option {key!r}; {_instead(str(key), known)}")
    try:
        checked: Options = step.options.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:1])
        raise BadRecipe(f"{step.name}.{place} can't be {first['input']!r}; {_mend(first)}") from error
    return checked


def _mend(wrong: ErrorDetails) -> str:
    """What to give instead, in our words."""
    limits = wrong.get("ctx", {})
    match wrong["type"]:
        case "int_parsing" | "int_type" | "int_from_float":
            return "give a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "give a number"
        case "bool_parsing" | "bool_type":
            return "say true or false"
        case "literal_error":
            return f"give {limits['expected']}"
        case "greater_than":
            return f"give more than {limits['gt']:g}"
        case "greater_than_equal":
            return f"give {limits['ge']:g} or more"
        case "less_than":
            return f"give less than {limits['lt']:g}"
        case "less_than_equal":
            return f"give {limits['le']:g} or less"
        case "value_error":
            return str(limits["error"])
    return wrong["msg"].lower()


def _row(row: object, name: str) -> tuple[str, dict[str, Any]]:
    if isinstance(row, str):
        row = {row: None}
    if not isinstance(row, dict) or len(row) != 1:
        raise BadRecipe(
            f"each step of the recipe {name} is one name with its options, such as '- depth: {{keep: 3}}'"
        )
    step, options = next(iter(row.items()))
    if step not in METHODS:
        raise BadRecipe(f"the recipe {name} has an unknown step {step!r}; {_instead(str(step), METHODS)}")
    if options is not None and not isinstance(options, dict):
        raise BadRecipe(
            f"the options of {step} in the recipe {name} must be 'option: value' pairs, not {options!r}"
        )
    return step, dict(options or {})


def _change(rows: list[tuple[str, dict[str, Any]]], change: str, name: str) -> None:
    target, equals, value = change.partition("=")
    step, dot, option = target.partition(".")
    if not (equals and dot and option):
        raise BadRecipe(f"--set takes step.option=value, such as depth.keep=3, not {change!r}")
    meant = [options for called, options in rows if called == step]
    if not meant:
        raise BadRecipe(f"the recipe {name} has no step {step!r}; {_instead(step, dict(rows))}")
    try:
        wanted = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise BadRecipe(f"--set {change!r} has a value that can't be read; put it in quotes") from error
    for options in meant:
        options[option] = wanted


def _instead(wrong: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"there is {', '.join(known)}"


class _StrictLoader(yaml.SafeLoader):
    """YAML without silent repeats."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, str):
                raise yaml.YAMLError(f"the key {key!r} is not a word at {key_node.start_mark}")
            if key in seen:
                raise yaml.YAMLError(f"the key {key!r} stands twice at {key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)
