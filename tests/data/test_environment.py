from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path, PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_progress import RecordedProgress
from trundle.data.environment import (
    _LONGEST_DOCUMENT,
    _Documented,
    _documented,
    _Package,
    environment_pairs,
    installed_packages,
    split_by_package,
    standard_library,
)
from trundle.errors import BadInput

ENOUGH = "It says at some length what the thing does and why anybody would want it."


def install(site: Path, name: str, files: dict[str, str]) -> None:
    """A package as pip leaves it: files, metadata and a record of the files."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA"]))
    for file, source in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def module(*functions: tuple[str, str]) -> str:
    return "\n".join(f'def {name}():\n    """{docstring}"""\n' for name, docstring in functions)


def names(site: Path) -> list[str]:
    return [pair.name for pair in environment_pairs(packages=installed_packages([str(site)]))]


def pairs_of(sizes: dict[str, int]) -> list[_Documented]:
    return [
        _Documented(package=package, name=f"{package}.f{n}", query=f"{package} {n}", document="d")
        for package, size in sizes.items()
        for n in range(size)
    ]


def test_a_small_environment(tmp_path: Path) -> None:
    source = f'''"""Tools for folding paper boats.

{ENOUGH} Module."""
import nothing_that_exists

class Boat:
    """A boat made of one sheet.

    {ENOUGH} Class.
    """

    def float(self):
        """Put the boat on water.

        {ENOUGH} Method.
        """

        def inner():
            """Never reached by the reader.

            {ENOUGH} Inner.
            """

    def _sink(self):
        """Private matters of the boat.

        {ENOUGH} Private.
        """

if True:
    async def fold(paper):
        """Fold a sheet into a boat.

        {ENOUGH} Function.
        """
'''
    install(tmp_path, "Paper_Boats", {"boats/__init__.py": source})
    pairs = environment_pairs(packages=installed_packages([str(tmp_path)]))
    assert [(pair.package, pair.name, pair.query) for pair in pairs] == [
        ("paper-boats", "boats", "Tools for folding paper boats."),
        ("paper-boats", "boats.Boat", "A boat made of one sheet."),
        ("paper-boats", "boats.Boat.float", "Put the boat on water."),
        ("paper-boats", "boats.fold", "Fold a sheet into a boat."),
    ]
    assert pairs[1].document == f"boats.Boat: {ENOUGH} Class."
    assert "boats" not in sys.modules


def test_only_public_code_that_is_the_packages_own_is_read(tmp_path: Path) -> None:
    files = {
        "p/open.py": "a",
        "p/_hidden_file.py": "b",
        "p/_private/c.py": "c",
        "p/tests/d.py": "d",
        "p/test_e.py": "e",
        "p/_vendor/f.py": "f",
        "p/externals/g.py": "g",
        "../../bin/h.py": "h",
        "_top.py": "i",
    }
    sources = {
        file: module((mark, f"Summary of the {mark}.\n\n    {ENOUGH} {mark * 3}"))
        for file, mark in files.items()
    }
    install(tmp_path / "lib" / "site", "p", sources)
    assert names(tmp_path / "lib" / "site") == ["p.b", "p.open.a"]


def test_what_cannot_be_parsed_or_found_is_skipped(tmp_path: Path) -> None:
    good = module(("f", f"Does the thing well.\n\n    {ENOUGH}"))
    install(
        tmp_path,
        "p",
        {
            "p/good.py": good,
            "p/broken.py": good + "def (:\n",
            "p/nul.py": good + "\0",
            "p/gone.py": good,
            "p/latin.py": "",
        },
    )
    (tmp_path / "p/gone.py").unlink()
    (tmp_path / "p/latin.py").write_bytes(good.encode() + "é".encode("latin-1"))
    assert names(tmp_path) == ["p.good.f"]


def test_trundle_itself_and_shadowed_packages_are_left_out(tmp_path: Path) -> None:
    for site, mark in (("first", "a"), ("second", "b")):
        install(
            tmp_path / site, "p", {"p.py": module((mark, f"Does thing {mark} well.\n\n    {ENOUGH} {mark}"))}
        )
    install(
        tmp_path / "first", "trundle", {"trundle.py": module(("f", f"Rolls under the bed.\n\n    {ENOUGH}"))}
    )
    found = installed_packages([str(tmp_path / "first"), str(tmp_path / "second")])
    assert [pair.name for pair in environment_pairs(packages=found)] == ["p.a"]


def test_repeats_are_dropped_across_packages(tmp_path: Path) -> None:
    generic = [(f"g{n}", f"Return the usual thing.\n\n    {ENOUGH} {'generic' * (n + 1)}") for n in range(3)]
    install(tmp_path, "a", {"a.py": module(("first", f"Fold a paper boat.\n\n    {ENOUGH} One."), *generic)})
    install(
        tmp_path,
        "b",
        {
            "b.py": module(
                ("same_query", f"Fold a paper boat!\n\n    {ENOUGH} Two."),
                ("same_text", f"Fold some other boat.\n\n    {ENOUGH.upper()} one 1."),
                ("own", f"Unfold a paper boat.\n\n    {ENOUGH} Three."),
            )
        },
    )
    assert names(tmp_path) == ["a.first", "b.own"]


def test_the_limit_applies_per_package_and_is_spread_over_files(tmp_path: Path) -> None:
    sources = {
        f"p/m{n:02}.py": module(
            (f"f{n}", f"Does thing {'x' * (n + 1)} well.\n\n    {ENOUGH} {'y' * (n + 1)}")
        )
        for n in range(40)
    }
    install(tmp_path, "p", sources)
    install(tmp_path, "q", {"q.py": module(("f", f"Does its own thing.\n\n    {ENOUGH}"))})
    found = installed_packages([str(tmp_path)])
    pairs = environment_pairs(packages=found, limit_per_package=10)
    assert Counter(pair.package for pair in pairs) == {"p": 10, "q": 1}
    assert [pair.name for pair in pairs] != sorted(names(tmp_path))[:11]
    assert pairs == sorted(pairs, key=lambda pair: (pair.package, pair.name))
    assert pairs == environment_pairs(packages=found, limit_per_package=10)


NUMPY_STYLE = """Fold ``paper`` into a :class:`~boats.Boat`.

See the `guide <https://boats.example>`_ and [more](https://boats.example) about
**folding** the [`Boat`] well.

.. versionadded:: 1.2
   Folding was not possible before.

.. note:: Wet paper tears.

Parameters
----------
paper : Sheet
    What to fold, as in::

        paper = tear(sheet)

    or anything flat.

Examples
--------
>>> fold(paper)
Boat(1)

.. code-block:: python

    fold(1)

```python
fold(2)
```

References
----------
.. [1] A. Folder,
       Boats.
"""


def test_marks_and_code_are_stripped() -> None:
    pair = _documented("boats", "boats.fold", NUMPY_STYLE)
    assert pair is not None
    assert pair.query == "Fold paper into a boats.Boat."
    assert pair.document == (
        "boats.fold: See the guide and more about folding the Boat well. note: Wet paper tears. "
        "Parameters paper : Sheet What to fold, as in: or anything flat."
    )


def test_field_lists_read_as_prose() -> None:
    docstring = (
        "Fold a boat.\n\n:param paper: the sheet to fold into a boat\n:type paper: Sheet\n:returns: one boat"
    )
    pair = _documented("boats", "fold", docstring)
    assert pair is not None
    assert pair.document == "fold: paper: the sheet to fold into a boat Returns: one boat"


@pytest.mark.parametrize(
    ("summary", "query"),
    [
        ("fold(paper) -> Boat\n\nFold a sheet now.", "Fold a sheet now."),
        ("=====\nBoats (paper ones)\n=====", "Boats (paper ones)"),
        ("Fold a sheet\nover two lines.", "Fold a sheet over two lines."),
        ("Fold it.", None),
        ("word " * 31, None),
        ("Fold a sheet like this:", None),
        ("The boat is given by", None),
        (">>> fold(paper, twice, over)", None),
        ("Copyright of some boats", None),
        ("Fold $\\frac{1}{2}$ of it", None),
        ("", None),
    ],
)
def test_a_summary_must_make_a_good_query(summary: str, query: str | None) -> None:
    pair = _documented("p", "name", f"{summary}\n\n{ENOUGH}")
    assert (pair and pair.query) == query


def test_a_short_rest_after_the_summary_is_no_document() -> None:
    assert _documented("p", "name", "Fold a paper boat.") is None
    assert _documented("p", "name", "Fold a paper boat.\n\nUse paper, not 1 2 3 4 5 6 7.") is None


@given(docstring=st.text(st.sampled_from("ab `.:<>[]()*|#-=\n\t\\{}'\"é"), max_size=400))
def test_any_docstring_can_be_read(docstring: str) -> None:
    pair = _documented("p", "name", docstring)
    if pair is not None:
        assert not re.search(r"\s\s|\n", pair.query + pair.document)


def test_long_documents_end_at_a_word() -> None:
    pair = _documented("p", "name", "Fold a paper boat.\n\n" + "folding " * 1000)
    assert pair is not None
    assert _LONGEST_DOCUMENT - 10 < len(pair.document) <= _LONGEST_DOCUMENT
    assert pair.document.endswith(" folding")


@given(
    sizes=st.dictionaries(
        st.text("abcdef", min_size=1, max_size=3), st.integers(1, 30), min_size=2, max_size=20
    ),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 9),
)
def test_a_split_keeps_packages_whole_and_its_share(sizes: dict[str, int], share: float, seed: int) -> None:
    pairs = pairs_of(sizes)
    train, held = split_by_package(pairs, share, seed)
    assert train
    assert held
    assert not {pair.package for pair in train} & {pair.package for pair in held}
    assert sorted([*train, *held], key=lambda pair: pair.name) == sorted(pairs, key=lambda pair: pair.name)
    missing = share * len(pairs) - len(held)
    assert missing > -1e-9 or len(held) == min(sizes.values())
    assert all(sizes[pair.package] > missing - 1e-9 for pair in train), "a package that fits was left out"
    assert split_by_package(pairs[::-1], share, seed) == (train[::-1], held[::-1])


def test_seeds_choose_other_packages() -> None:
    pairs = pairs_of({f"package{n}": 5 for n in range(20)})
    chosen = {
        tuple(sorted({pair.package for pair in split_by_package(pairs, 0.2, seed)[1]})) for seed in range(5)
    }
    assert len(chosen) > 1


def test_a_split_that_cannot_be_made_is_rejected() -> None:
    with pytest.raises(BadInput, match="one package"):
        split_by_package(pairs_of({"p": 5}), 0.2, 0)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(BadInput, match="between 0 and 1"):
            split_by_package(pairs_of({"p": 5, "q": 5}), share, 0)


def test_the_real_environment() -> None:
    """Real packages, a few files of each, so that it stays short."""
    packages = {package.name: package for package in [*installed_packages(), standard_library()]}
    assert "trundle" not in packages
    assert PurePath("argparse.py") in packages["python"].files
    assert not any("site-packages" in file.parts for file in packages["python"].files)
    chosen = ["numpy", "pytest", "rich", "scikit-learn", "python"]
    short = [
        _Package(name=name, folder=packages[name].folder, files=tuple(sorted(packages[name].files)[:150]))
        for name in chosen
    ]
    told = RecordedProgress()
    pairs = environment_pairs(packages=short, limit_per_package=60, progress=told)
    assert told.tasks == [("reading installed documentation", len(chosen))]
    assert told.units == len(chosen)
    assert not told.lines
    assert {pair.package for pair in pairs} >= {"numpy", "rich", "scikit-learn", "python"}
    assert max(Counter(pair.package for pair in pairs).values()) <= 60
    assert len({pair.query for pair in pairs}) == len({pair.document for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert 3 <= len(pair.query.split()) <= 30
        assert pair.document.startswith(f"{pair.name}: ")
        assert len(pair.document) <= _LONGEST_DOCUMENT
        assert not any(part.startswith("_") for part in pair.name.split("."))
