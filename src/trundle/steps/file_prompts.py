"""Prompts by data file: each source of tuples may come with its own instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import BeforeValidator

import trundle.model as body
import trundle.train as train
from trundle.errors import BadInput

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data import Example
    from trundle.train import Prompts

Given = str | dict[Literal["query", "document"], str]


def read_mapping(value: object) -> object:
    """What a person types on the command line for a mapping: YAML in braces."""
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError('write it in braces, as in {file: "prompt"}') from error


FilePrompts = Annotated[dict[str, Given], BeforeValidator(read_mapping)]
"""File → the prompt of its queries, or one for queries and one for documents."""


def prompts_by_file(
    model: SentenceTransformer, given: Mapping[str, Given], examples: Sequence[Example]
) -> dict[str, Prompts]:
    """The prompts of each source of these examples: those given for it, or the model's own."""
    own = body.prompts_by_role(model)
    files = {source: Path(source).name for source in dict.fromkeys(example.source for example in examples)}
    for name in given:
        if not any(_is_called(file, name) for file in files.values()):
            raise BadInput(
                f"there is no data file {name!r} to prompt; name one of {', '.join(sorted(files.values()))}"
            )
    found = {}
    for source, file in files.items():
        meant = next((prompt for name, prompt in given.items() if _is_called(file, name)), {})
        roles = own | ({"query": meant} if isinstance(meant, str) else dict(meant))
        found[source] = train.Prompts(query=roles["query"], document=roles["document"])
    for example in examples:
        prompt = found[example.source]
        if (
            example.query.strip() == prompt.query.strip()
            or example.positive.strip() == prompt.document.strip()
        ):
            raise BadInput(f"{example.source} has a text that is nothing but its prompt; leave the row out")
    return found


def _is_called(file: str, name: str) -> bool:
    return name in (file, file.split(".")[0], Path(file).stem)
