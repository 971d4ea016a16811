from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.errors import BadRecipe
from trundle.methods import METHODS
from trundle.methods.contract import _exact_fraction
from trundle.methods.depth import _layers_left
from trundle.recipe import make_options, parse_recipe, read_recipe, recipe_names, single


def test_every_shipped_recipe_is_valid_and_says_what_it_is() -> None:
    assert recipe_names()
    for name in recipe_names():
        recipe = read_recipe(name)
        assert recipe.about
        assert recipe.calls


def test_a_recipe_survives_its_own_json(tmp_path: Path) -> None:
    import yaml

    recipe = read_recipe("half", ["depth.drop=1/3", "align.texts=100"])
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(recipe.as_json()))
    again = read_recipe(tmp_path / "again.yaml")
    assert again.calls == recipe.calls
    assert again.calls[0].options.model_dump()["drop"] == "1/3"


def test_changes_reach_the_step() -> None:
    recipe = parse_recipe("steps: [depth: {keep: 6}]", name="x", changes=["depth.keep=3"])
    assert recipe.calls[0].options.model_dump()["keep"] == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no steps"),
        ("steps: []", "has no steps"),
        ("- depth", "has no steps"),
        ("steps: [depth: {keep: 3}]\nname: x", "unknown key 'name'"),
        ("steps: [dept: {keep: 3}]", "did you mean 'depth'"),
        ("steps: [depth: {kepp: 3}]", "no option 'kepp'; did you mean 'keep'"),
        ("steps: [depth: {keep: many}]", r"depth\.keep can't be 'many'"),
        ("steps: [depth: {drop: lots}]", "can't be"),
        ("steps: [depth: {drop: 1/0}]", "can't be"),
        ("steps: [depth: 3]", "must be 'option: value' pairs"),
        ("steps: [{depth: {keep: 3}, align: {}}]", "one method with its options"),
        ("steps: [7]", "one method with its options"),
        ("steps: [depth: {keep: 3, keep: 4}]", "'keep' occurs twice"),
        ("steps: [", "not valid YAML"),
        ("steps: [{[1]: 2}]", "not a string"),
        ("steps: [depth: {keep: true}]", r"depth\.keep can't be True"),
        ("steps: [align: {minutes: .inf}]", r"align\.minutes can't be inf"),
        ("steps: [align: {texts: 2}]", r"align\.texts can't be 2"),
        ("steps: [depth: {keep: !!python/object/apply:os.getcwd []}]", "not valid YAML"),
    ],
)
def test_bad_recipes_give_one_sentence(text: str, says: str) -> None:
    with pytest.raises(BadRecipe, match=says) as caught:
        parse_recipe(text, name="x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("keep=3", "method.option=value"),
        ("depth.keep", "method.option=value"),
        ("width.keep=3", "does not use 'width'"),
        ("depth.keep=[", "can't be read"),
    ],
)
def test_bad_changes(change: str, says: str) -> None:
    with pytest.raises(BadRecipe, match=says):
        parse_recipe("steps: [depth: {keep: 3}]", name="x", changes=[change])


def test_unknown_and_unreadable_recipes(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="did you mean 'half'"):
        read_recipe("hallf")
    with pytest.raises(BadRecipe, match="can't be read"):
        read_recipe(tmp_path / "missing.yaml")


def test_a_single_step_is_a_recipe() -> None:
    assert single(METHODS["depth"], {"keep": 2}).as_json()["steps"] == [{"depth": {"keep": 2}}]


def test_options_are_frozen() -> None:
    options = make_options(METHODS["depth"], {"keep": 2})
    with pytest.raises(ValueError, match="frozen"):
        options.keep = 3  # type: ignore[attr-defined]


@given(layers=st.integers(1, 200), percent=st.integers(0, 99))
def test_layers_left_is_exact(layers: int, percent: int) -> None:
    """Equal for '90%', 0.9 and '9/10', and equal to integer arithmetic; floats get 10·(1−0.9) wrong."""
    expected = layers * (100 - percent) // 100
    for share_text in (f"{percent}%", percent / 100, f"{percent}/100"):
        share = _exact_fraction(share_text)
        assert isinstance(share, Fraction)
        assert _layers_left(layers, share) == expected


def test_the_case_floats_get_wrong() -> None:
    assert int(10 * (1 - 0.9)) == 0
    share = _exact_fraction(0.9)
    assert isinstance(share, Fraction)
    assert _layers_left(10, share) == 1


@pytest.mark.parametrize(
    ("steps", "moved", "aligned"),
    [
        ("[{align: {}}, {depth: {keep: 3}}]", "depth", "align"),
        ("[{width: {objective: align}}, {depth: {keep: 3}}]", "depth", "width"),
        ("[{align: {}}, {width: {extract: 1/2}}]", "width", "align"),
        ("[{align: {}}, {width: {objective: contrast}}]", "width", "align"),
    ],
)
def test_a_method_that_leaves_the_vector_space_after_align_is_rejected(
    steps: str, moved: str, aligned: str
) -> None:
    with pytest.raises(BadRecipe, match=f"put {moved} before {aligned}"):
        parse_recipe(f"steps: {steps}", name="x")


def test_sizes_may_be_trained_in_an_aligned_models_space() -> None:
    assert parse_recipe("steps: [{align: {}}, {width: {objective: align}}]", name="x").calls
