"""Prompts by data file: each source of tuples may come with its own instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import BeforeValidator

import trundle.model as body
import trundle.train as train
from trundle.errors import BadInput

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data import Corpus, Example
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


def check_prompted(given: Mapping[str, Given], corpus: Corpus) -> None:
    """Refuse a prompt for a file that is not there. All tuples are looked at: of a small file none may be drawn."""
    unmet, files = list(given), set[str]()
    for example in chain(corpus.examples(), corpus.validation_examples(), corpus.held_out_examples()):
        if not unmet:
            return
        file = Path(example.source).name
        if file not in files:
            files.add(file)
            unmet = [name for name in unmet if not _is_called(file, name)]
    if unmet:
        raise BadInput(
            f"there is no data file {unmet[0]!r} to prompt; name one of {', '.join(sorted(files))}"
        )


def prompts_by_file(
    model: SentenceTransformer, given: Mapping[str, Given], examples: Sequence[Example]
) -> dict[str, Prompts]:
    """The prompts of each source of these examples: those given for it, or the model's own."""
    own = body.prompts_by_role(model)
    files = {source: Path(source).name for source in dict.fromkeys(example.source for example in examples)}
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
