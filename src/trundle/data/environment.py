"""Queries and documents that every machine has: the docstrings of the installed Python packages.

The summary of a docstring is a query; the rest of it, after the name of what it documents, is the document to
retrieve. Packages are never imported. An environment always gives the same pairs in the same order.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path, PurePath

from trundle.data.sampling import _digest
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress

_QUERY_WORDS = range(3, 31)
_LEAST_DOCUMENT_WORDS = 8
_LONGEST_DOCUMENT = 800
_GENERIC = 3
"""A summary that this many names share is too generic to retrieve any of them."""

_SKIPPED_PACKAGE = "trundle"
_SKIPPED_FOLDER = re.compile(
    r"[_.].*|tests?|vendor(ed)?|extern(als?)?|third_party|(site|dist)-packages", re.IGNORECASE | re.DOTALL
)
_SKIPPED_FILE = re.compile(r"test_.*|.*_test|conftest|setup")
_SUMMARY = re.compile(rb'"""[^"]{10,400}?\n[ \t]*\n[ \t]*[^\s"]')
_BYTES_PER_SUMMARY = 4000
"""A file with fewer summaries than one in this many bytes is not worth parsing."""

_BAD_QUERY = re.compile(
    r"^[^\w(\"']|[\\{}|<>=]|https?:|[:;,]$|\b(and|are|as|by|for|from|if|in|is|of|or|that|the|to|where|with)$"
)
_LEGAL = re.compile(r"copyright|all rights reserved|permission is hereby", re.IGNORECASE)
_NOT_A_SUMMARY = re.compile(r"[\w.]+\(.*\)(\s*->.*)?|!!!.*|\.\..*", re.DOTALL)

_NOT_PROSE = re.compile(
    r"\.\. *(\[|_|\||(code|code-block|sourcecode|testcode|testsetup|doctest|plot|math|image|figure|ipython"
    r"|literalinclude|versionadded|versionchanged|deprecated|module|currentmodule|autosummary|toctree) *::).*"
    r"|:r?type\b.*"
)
_HEADING = re.compile(r"[#* ]*(Usage|Examples?|References)[:.* ]*", re.IGNORECASE)
_UNDERLINE = re.compile(r"([-=~^*#+_.`'\"])\1{2,}")
_MARKUP = (
    (re.compile(r":(?:\w+:)+`~?\.?([^`<]*?)(?: *<[^`]*>)?`"), r"\1"),  # :class:`~a.b <c>` → a.b
    (re.compile(r"`([^`<]+?) *<[^`>]*>`_+"), r"\1"),  # `words <address>`_ → words
    (re.compile(r"\[([^\][]*)\]\([^)\s]*\)"), r"\1"),  # [words](address) → words
    (re.compile(r"\[(`[^`]*`)\]"), r"\1"),  # [`name`] → `name`
    (re.compile(r"``([^`\n]*)``|`~?([^`\n]*)`_*"), r"\1\2"),  # `name`, ``code`` → the inside
    (re.compile(r"\*\*([^*\n]+)\*\*"), r"\1"),  # **bold** → bold
    (re.compile(r"\|(@?[A-Za-z][\w.]{3,}(?:\(\))?)\|"), r"\1"),  # |substituted| → substituted
    (re.compile(r"\.\. *([\w-]+) *::"), r"\1:"),  # .. note:: → note:
    (re.compile(r"</?(?:Tip|br|p|b|i|code|pre|a)\b[^<>]*>"), ""),
    (re.compile(r"\s+"), " "),
)
_FIELD = re.compile(r":(?:param|arg|argument|keyword|ivar|cvar)\b *([^:]*):")
_RETURNS = re.compile(r":(?:returns?|yields?):")
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Documented:
    """One documented name: its summary as a query, its name and description as the document."""

    package: str
    name: str
    query: str
    document: str


@dataclass(frozen=True, kw_only=True)
class _Package:
    name: str
    folder: Path
    files: tuple[PurePath, ...]
    """Its Python files, relative to `folder`."""


def installed_packages(path: Sequence[str] | None = None) -> list[_Package]:
    """List the packages of the running environment, or of the folders in `path`, by name."""
    found: dict[str, _Package] = {}
    for distribution in distributions() if path is None else distributions(path=list(path)):
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and name != _SKIPPED_PACKAGE and name not in found:
            files = tuple(PurePath(file) for file in distribution.files or () if file.suffix == ".py")
            found[name] = _Package(name=name, folder=Path(str(distribution.locate_file(""))), files=files)
    return [found[name] for name in sorted(found)]


def standard_library() -> _Package:
    """Return Python's standard library as a package called "python"."""
    folder = Path(sysconfig.get_path("stdlib"))
    top = [entry for entry in folder.iterdir() if _is_public_code(PurePath(entry.name))]
    files = (file for entry in top for file in (entry.rglob("*.py") if entry.is_dir() else (entry,)))
    relative = tuple(file.relative_to(folder) for file in files if file.suffix == ".py")
    return _Package(name="python", folder=folder, files=relative)


def environment_pairs(
    *, packages: Sequence[_Package] | None = None, limit_per_package: int = 700, progress: Progress = SILENT
) -> list[_Documented]:
    """Read pairs from packages, up to a limit of each, which keeps large packages from dominating."""
    if packages is None:
        packages = [*installed_packages(), standard_library()]
    found: list[_Documented] = []
    uses: Counter[str] = Counter()
    with progress.task("reading installed documentation", len(packages)) as advance:
        for package in packages:
            pairs = islice(_without_duplicates(_package_pairs(package, uses)), limit_per_package)
            found.extend(sorted(pairs, key=lambda pair: (pair.name, pair.query)))
            advance(1)
    return list(_without_duplicates(pair for pair in found if uses[_letters(pair.query)] < _GENERIC))


def split_by_package(
    pairs: Sequence[_Documented], share: float, seed: int
) -> tuple[list[_Documented], list[_Documented]]:
    """Split pairs into pairs to train on and held-out pairs of other packages, at least one package each."""
    sizes = Counter(pair.package for pair in pairs)
    if not 0 < share < 1:
        raise BadInput(f"a share of {share} can't be held out; pass a number between 0 and 1")
    if len(sizes) < 2:
        raise BadInput("pairs of one package can't be split; install more packages, or pass other data")
    remaining = share * len(pairs)
    held: set[str] = set()
    for package in sorted(sizes, key=lambda package: _digest(f"{seed}:{package}", 16)):
        if sizes[package] <= remaining:
            held.add(package)
            remaining -= sizes[package]
    if not held:
        held.add(min(sizes, key=lambda package: (sizes[package], package)))
    train = [pair for pair in pairs if pair.package not in held]
    return train, [pair for pair in pairs if pair.package in held]


def _letters(text: str) -> str:
    """A text reduced to its letters, so that copies with other numbers and punctuation are equal."""
    return " ".join(_WORD.findall(text.lower()))


def _without_duplicates(pairs: Iterable[_Documented]) -> Iterator[_Documented]:
    seen: set[str] = set()
    for pair in pairs:
        keys = {"query " + _letters(pair.query), _letters(pair.document.partition(": ")[2])}
        if not keys & seen:
            yield pair
        seen |= keys


def _is_public_code(file: PurePath) -> bool:
    folders = file.parts[:-1] if file.suffix == ".py" else file.parts
    return not (any(map(_SKIPPED_FOLDER.fullmatch, folders)) or _SKIPPED_FILE.fullmatch(file.stem))


def _package_pairs(package: _Package, uses: Counter[str]) -> Iterator[_Documented]:
    files = [file for file in package.files if _is_public_code(file)]
    for file in sorted(files, key=lambda file: _digest(file.as_posix(), 16)):
        try:
            source = (package.folder / file).read_bytes()
        except OSError:
            continue
        if len(_SUMMARY.findall(source)) * _BYTES_PER_SUMMARY < len(source):
            continue
        for name, docstring in _docstrings(source, file):
            if (pair := _documented(package.name, name, docstring)) is not None:
                uses[_letters(pair.query)] += 1
                yield pair


def _docstrings(source: bytes, file: PurePath) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    # A private file holds what its folder offers: KMeans in cluster/_kmeans.py is called cluster.KMeans.
    private = file.stem.startswith("_")
    module = ".".join(file.parts[:-1] if private else (*file.parts[:-1], file.stem))
    if module:
        if (not private or file.stem == "__init__") and (docstring := ast.get_docstring(tree)):
            yield module, docstring
        yield from _docstrings_inside(tree, module)


def _docstrings_inside(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.If, ast.Try)):
            yield from _docstrings_inside(child, name)
        elif isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if child.name.startswith("_"):
                continue
            if docstring := ast.get_docstring(child):
                yield f"{name}.{child.name}", docstring
            if isinstance(child, ast.ClassDef):
                yield from _docstrings_inside(child, f"{name}.{child.name}")


def _documented(package: str, name: str, docstring: str) -> _Documented | None:
    paragraphs = docstring.split("\n\n")
    while paragraphs and _NOT_A_SUMMARY.fullmatch(paragraphs[0].strip()):
        paragraphs.pop(0)
    query = _prose("".join(paragraphs[:1]))
    if _BAD_QUERY.search(query) or len(query.split()) not in _QUERY_WORDS:
        return None
    document = _prose("\n\n".join(paragraphs[1:]))
    too_short = len(_letters(document).split()) < _LEAST_DOCUMENT_WORDS
    if too_short or _LEGAL.search(query) or _LEGAL.search(document):
        return None
    if len(document := f"{name}: {document}") > _LONGEST_DOCUMENT:
        document = document[:_LONGEST_DOCUMENT].rpartition(" ")[0]
    return _Documented(package=package, name=name, query=query, document=document)


def _prose(text: str) -> str:
    prose = "\n".join(_prose_lines(text.split("\n")))
    for pattern, replacement in _MARKUP:
        prose = pattern.sub(replacement, prose)
    return prose.strip()


def _prose_lines(lines: Iterable[str]) -> Iterator[str]:
    block: int | None = None
    fenced = doctest = False
    for line in lines:
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        if bare.startswith("```"):
            fenced = not fenced
            continue
        doctest = bool(bare) and (doctest or bare.startswith(">>>"))
        if block is not None and bare and indent <= block:
            block = None
        if fenced or doctest or block is not None or not bare:
            continue
        if _NOT_PROSE.fullmatch(bare):
            block = indent
        elif not _UNDERLINE.fullmatch(bare) and not _HEADING.fullmatch(bare):
            if bare.endswith("::") and not bare.startswith(".."):
                block, bare = indent, bare.removesuffix(":")
            yield _RETURNS.sub("Returns:", _FIELD.sub(r"\1:", bare.lstrip("#")))
