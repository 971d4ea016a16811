"""Real text that every machine has: the documentation of the Python packages installed on it.

A docstring's summary is a query; the rest of it, after the name of what it documents, is the document to find. The
packages are read as text and never imported. The same environment always gives the same pairs in the same order.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path, PurePath

from trundle.errors import BadInput
from trundle.progress import SILENT, Progress

_QUERY_WORDS = range(3, 31)
_LEAST_DOCUMENT_WORDS = 8
_LONGEST_DOCUMENT = 800
_GENERIC = 3
"""A summary that this many things share says too little to find any of them."""

_OURSELVES = "trundle"
_SKIPPED_FOLDERS = frozenset(
    (
        "test",
        "tests",
        "vendor",
        "vendored",
        "extern",
        "external",
        "externals",
        "third_party",
        "site-packages",
        "dist-packages",
    )
)
_SUMMARY = re.compile(rb'"""[^"]{10,400}?\n[ \t]*\n[ \t]*[^\s"]')
_BYTES_PER_SUMMARY = 4000
"""A file with fewer summaries than one in so many bytes costs more to parse than it gives."""
_SKIPPED_FILE = re.compile(r"test_.*|.*_test|conftest|setup")

_BAD_QUERY = re.compile(
    r"^[^\w(\"']|[\\{}|<>=]|https?:|[:;,]$|\b(and|are|as|by|for|from|if|in|is|of|or|that|the|to|where|with)$"
)
_LEGAL = re.compile(r"copyright|all rights reserved|permission is hereby", re.IGNORECASE)
_NOT_A_SUMMARY = re.compile(r"[\w.]+\(.*\)(\s*->.*)?|!!!.*|\.\..*", re.DOTALL)

_NOT_PROSE = re.compile(
    r"\.\. *(\[|_|\||(code|code-block|sourcecode|testcode|testsetup|doctest|plot|math|image|figure|ipython|literalinclude"
    r"|versionadded|versionchanged|deprecated|module|currentmodule|autosummary|toctree) *::).*|:r?type\b.*"
)
_HEADING = re.compile(r"[#* ]*(Usage|Examples?|References)[:.* ]*", re.IGNORECASE)
_UNDERLINE = re.compile(r"([-=~^*#+_.`'\"])\1{2,}")
_FIELD = re.compile(r":(?:param|arg|argument|keyword|ivar|cvar)\b *([^:]*):")
_RETURNS = re.compile(r":(?:returns?|yields?):")
_INLINE = (
    (re.compile(r":(?:\w+:)+`~?\.?([^`<]*?)(?: *<[^`]*>)?`"), r"\1"),  # :class:`~a.b <c>` → a.b
    (re.compile(r"`([^`<]+?) *<[^`>]*>`_+"), r"\1"),  # `words <address>`_ → words
    (re.compile(r"\[([^\][]*)\]\([^)\s]*\)"), r"\1"),  # [words](address) → words
    (re.compile(r"\[(`[^`]*`)\]"), r"\1"),  # [`name`] → `name`
    (re.compile(r"``([^`\n]*)``|`~?([^`\n]*)`_*"), r"\1\2"),  # `name`, ``code`` → the inside
    (re.compile(r"\*\*([^*\n]+)\*\*"), r"\1"),  # **loud** → loud
    (re.compile(r"\|(@?[A-Za-z][\w.]{3,}(?:\(\))?)\|"), r"\1"),  # |substituted| → substituted
    (re.compile(r"\.\. *([\w-]+) *::"), r"\1:"),  # .. note:: → note:
    (re.compile(r"</?(?:Tip|br|p|b|i|code|pre|a)\b[^<>]*>"), ""),
    (re.compile(r"\s+"), " "),
)
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Documented:
    """One documented thing: its summary as a query, its name and description as the document."""

    package: str
    name: str
    query: str
    document: str


@dataclass(frozen=True, kw_only=True)
class _Package:
    """A package on disk: its Python files, relative to the folder that imports start from."""

    name: str
    folder: Path
    files: tuple[PurePath, ...]


def installed_packages(path: Sequence[str] | None = None) -> list[_Package]:
    """The packages installed in the running environment, or in the folders of `path`, by name."""
    found: dict[str, _Package] = {}
    for distribution in distributions() if path is None else distributions(path=list(path)):
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and name != _OURSELVES and name not in found:
            files = tuple(PurePath(file) for file in distribution.files or () if file.suffix == ".py")
            found[name] = _Package(name=name, folder=Path(str(distribution.locate_file(""))), files=files)
    return [found[name] for name in sorted(found)]


def standard_library() -> _Package:
    """The library that comes with Python, as a package called "python"."""
    folder = Path(sysconfig.get_path("stdlib"))
    top = [entry for entry in folder.iterdir() if _is_public_code(PurePath(entry.name))]
    files = (file for entry in top for file in (entry.rglob("*.py") if entry.is_dir() else (entry,)))
    return _Package(
        name="python",
        folder=folder,
        files=tuple(file.relative_to(folder) for file in files if file.suffix == ".py"),
    )


def environment_pairs(
    *,
    packages: Sequence[_Package] | None = None,
    limit_per_package: int = 700,
    progress: Progress = SILENT,
) -> list[Documented]:
    """Queries and documents from the installed packages, at most `limit_per_package` of each package.

    The limit keeps the giants from drowning the rest. What is taken of a giant is spread over its files by a hash
    of their names, and the files beyond the limit are not read at all.
    """
    if packages is None:
        packages = [*installed_packages(), standard_library()]
    found: list[Documented] = []
    shared: Counter[str] = Counter()
    with progress.task("reading installed documentation", len(packages)) as advance:
        for package in packages:
            pairs = islice(_unrepeated(_counted(_package_pairs(package), shared)), limit_per_package)
            found.extend(sorted(pairs, key=lambda pair: (pair.name, pair.query)))
            advance(1)
    return list(_unrepeated(pair for pair in found if shared[_words(pair.query)] < _GENERIC))


def split_by_package(
    pairs: Sequence[Documented], share: float, seed: int
) -> tuple[list[Documented], list[Documented]]:
    """Pairs to train on and pairs held out; no package is on both sides, so nothing leaks.

    Packages are taken in an order drawn from the seed, each that still fits into the share; where none fits, the
    smallest is held out.
    """
    sizes = Counter(pair.package for pair in pairs)
    if not 0 < share < 1:
        raise BadInput(f"a share of {share} can't be held out; give a number between 0 and 1")
    if len(sizes) < 2:
        raise BadInput(
            "pairs of one package can't be split by package; install more packages, or give other data"
        )
    room = share * len(pairs)
    held: set[str] = set()
    for package in sorted(sizes, key=lambda package: _digest(f"{seed}:{package}")):
        if sizes[package] <= room:
            held.add(package)
            room -= sizes[package]
    if not held:
        held.add(min(sizes, key=lambda package: (sizes[package], package)))
    train = [pair for pair in pairs if pair.package not in held]
    return train, [pair for pair in pairs if pair.package in held]


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _words(text: str) -> str:
    """A text reduced to its letters, so that copies with other numbers and marks count as the same."""
    return " ".join(_WORD.findall(text.lower()))


def _counted(pairs: Iterable[Documented], shared: Counter[str]) -> Iterator[Documented]:
    """Note in `shared` how often each query goes by."""
    for pair in pairs:
        shared[_words(pair.query)] += 1
        yield pair


def _unrepeated(pairs: Iterable[Documented]) -> Iterator[Documented]:
    """Leave out a pair whose query or whose description has been seen, whatever it is the description of."""
    seen: set[bytes] = set()
    for pair in pairs:
        keys = {_digest("query " + _words(pair.query)), _digest(_words(pair.document.partition(": ")[2]))}
        if not keys & seen:
            yield pair
        seen |= keys


def _is_public_code(file: PurePath) -> bool:
    """Whether a file is part of what its package offers: not a test, not a copy of another package."""
    folders = file.parts[:-1] if file.suffix == ".py" else file.parts
    return not (
        any(folder.startswith(("_", ".")) or folder.lower() in _SKIPPED_FOLDERS for folder in folders)
        or _SKIPPED_FILE.fullmatch(file.stem)
    )


def _package_pairs(package: _Package) -> Iterator[Documented]:
    files = [file for file in package.files if _is_public_code(file)]
    for file in sorted(files, key=lambda file: _digest(file.as_posix())):
        try:
            source = (package.folder / file).read_bytes()
        except OSError:
            continue
        if len(_SUMMARY.findall(source)) * _BYTES_PER_SUMMARY >= len(source):
            for name, docstring in _docstrings(source, file):
                pair = _documented(package.name, name, docstring)
                if pair is not None:
                    yield pair


def _docstrings(source: bytes, file: PurePath) -> Iterator[tuple[str, str]]:
    """Every public name of a source file with its docstring; a file that does not parse has none.

    A private file in a public folder mostly holds what the folder offers: `cluster/_kmeans.py` is read, and its
    `KMeans` is called `cluster.KMeans`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    private = file.stem.startswith("_")
    module = ".".join(file.parts[:-1] if private else (*file.parts[:-1], file.stem))
    if module:
        yield from _below(tree, module, named=not private or file.stem == "__init__")


def _below(node: ast.AST, name: str, *, named: bool) -> Iterator[tuple[str, str]]:
    if named and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring:
            yield name, docstring
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if not child.name.startswith("_"):
                yield from _below(child, f"{name}.{child.name}", named=True)
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _below(child, name, named=False)


def _documented(package: str, name: str, docstring: str) -> Documented | None:
    """A docstring as a pair, or None where its summary makes no good query or there is too little beside it."""
    paragraphs = docstring.split("\n\n")
    while paragraphs and _NOT_A_SUMMARY.fullmatch(paragraphs[0].strip()):
        paragraphs.pop(0)
    query = _plain(_prose(paragraphs[:1]))
    if _BAD_QUERY.search(query) or len(query.split()) not in _QUERY_WORDS:
        return None
    document = _plain(_prose(paragraphs[1:]))
    if (
        len(_words(document).split()) < _LEAST_DOCUMENT_WORDS
        or _LEGAL.search(query)
        or _LEGAL.search(document)
    ):
        return None
    document = f"{name}: {document}"
    if len(document) > _LONGEST_DOCUMENT:
        document = document[:_LONGEST_DOCUMENT].rpartition(" ")[0]
    return Documented(package=package, name=name, query=query, document=document)


def _plain(text: str) -> str:
    """Text without the marks of reStructuredText and Markdown."""
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return text.strip()


def _prose(paragraphs: Iterable[str]) -> str:
    """What is meant to be read as sentences: no code, no results of code, no underlines, no footnotes."""
    return "\n".join(_prose_lines("\n\n".join(paragraphs).split("\n")))


def _prose_lines(lines: Iterable[str]) -> Iterator[str]:
    block: int | None = None
    fenced = doctest = False
    for line in lines:
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
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
            continue
        if _UNDERLINE.fullmatch(bare) or _HEADING.fullmatch(bare):
            continue
        if bare.endswith("::") and not bare.startswith(".."):
            block = indent
            bare = bare.removesuffix(":")
        yield _RETURNS.sub("Returns:", _FIELD.sub(r"\1:", bare.lstrip("#")))
