"""An interrupted run resumes after its last finished method and gives the same model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pico
from trundle.cache import cache_folder
from trundle.data.corpus import read_corpus
from trundle.pipeline import run as run_module
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request, Run
from trundle.recipe import Recipe, parse_recipe
from trundle.train import loop

ORDER = (
    "steps: [{vocabulary: {parameters: 95%}}, {weights: {sparsity: 50%, samples: 8, method: domain-fisher}}, "
    "{align: {steps: 1, texts: 30, batch_size: 8}}]"
)


class Stopped(Exception):
    """Simulates a kill."""


class Wrapped:
    """A method with another `apply`."""

    def __init__(self, method: Any, apply: Callable[..., Any]) -> None:
        self.method, self.apply = method, apply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)


@pytest.fixture
def run(
    pico_folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_module, "_KEPT_AFTER", 0.0)
    words = [f"{text} {number}" for number in range(20) for text in pico.TEXTS]
    rows = [
        {"query": one, "positive": two, "negative": three}
        for one, two, three in zip(words, words[1:], words[7:], strict=False)
    ]
    data = tmp_path / "tuples.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")

    def go(output: Path, recipe: Recipe, *, fresh: bool = False) -> Run:
        corpus = read_corpus([str(data)], seed=0)
        return run_recipe(
            Request(source=str(pico_folders("bert", 2)), output=output, corpus=corpus, fresh=fresh), recipe
        )

    return go


def counted(recipe: Recipe, taken: list[str], *, stop_at: str | None = None) -> Recipe:
    """The recipe, noting which methods are applied, and stopped when one begins."""

    def noting(method: Any) -> Any:
        def apply(*arguments: Any) -> Any:
            if method.name == stop_at:
                raise Stopped
            taken.append(method.name)
            return method.apply(*arguments)

        return Wrapped(method, apply)

    return replace(recipe, calls=tuple(replace(call, method=noting(call.method)) for call in recipe.calls))


def stopped_before_align(run: Callable[..., Run], output: Path) -> Recipe:
    """Two finished stages, and the recipe to resume."""
    recipe = parse_recipe(ORDER, name="x")
    with pytest.raises(Stopped):
        run(output, counted(recipe, [], stop_at="align"))
    return recipe


def test_finished_steps_are_not_repeated_and_the_cache_is_cleaned(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    recipe = parse_recipe(ORDER, name="three steps")
    at_once = run(tmp_path / "at-once", recipe)
    taken: list[str] = []
    with pytest.raises(Stopped):
        run(tmp_path / "small", counted(recipe, taken, stop_at="align"))
    assert taken == ["vocabulary", "weights"]
    assert not (tmp_path / "small").exists()
    taken.clear()
    later = run(tmp_path / "small", counted(recipe, taken))
    assert taken == ["align"]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("small", "at-once"))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert [step.as_json() for step in later.steps] == [step.as_json() for step in at_once.steps]
    assert later.judged.keys() == at_once.judged.keys()
    names = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("small", "at-once")]
    assert names[0] == names[1]
    assert not list((cache_folder() / "steps").iterdir())


def test_fresh_repeats_every_step(run: Callable[..., Run], tmp_path: Path) -> None:
    recipe = parse_recipe(ORDER, name="three steps")
    taken: list[str] = []
    with pytest.raises(Stopped):
        run(tmp_path / "small", counted(recipe, taken, stop_at="align"))
    taken.clear()
    run(tmp_path / "small", counted(recipe, taken), fresh=True)
    assert taken == ["vocabulary", "weights", "align"]


def test_another_option_is_another_run(run: Callable[..., Run], tmp_path: Path) -> None:
    taken: list[str] = []
    with pytest.raises(Stopped):
        run(tmp_path / "small", counted(parse_recipe(ORDER, name="x"), taken, stop_at="align"))
    taken.clear()
    run(tmp_path / "small", counted(parse_recipe(ORDER.replace("50%", "40%"), name="x"), taken))
    assert taken == ["weights", "align"]


def test_a_changed_file_that_a_step_reads_is_another_run(run: Callable[..., Run], tmp_path: Path) -> None:
    domain = tmp_path / "domain.jsonl"
    domain.write_text((tmp_path / "tuples.jsonl").read_text())
    recipe = parse_recipe(ORDER.replace("samples: 8", f"samples: 8, domain: {domain}"), name="x")
    taken: list[str] = []
    with pytest.raises(Stopped):
        run(tmp_path / "small", counted(recipe, taken, stop_at="align"))
    domain.write_text("\n".join(domain.read_text().splitlines()[5:]))
    taken.clear()
    run(tmp_path / "small", counted(recipe, taken))
    assert taken == ["weights", "align"]


def test_a_finished_training_survives_a_full_disk(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anything of it stay when the second try has written its result."""
    order = "steps: [{depth: {keep: 2}}, {align: {minutes: 0.02, texts: 60, batch_size: 8}}]"
    recipe = parse_recipe(order, name="two steps")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("trundle.pipeline.compress.save", full)
        with pytest.raises(OSError, match="no space"):
            run(tmp_path / "small", recipe)
    (left,) = (cache_folder() / "runs").glob("*/checkpoints/*")
    steps = int(left.name.removeprefix("step-"))
    again = run(tmp_path / "small", recipe)
    assert again.steps[1].facts["steps"] == steps > 0
    assert not list((cache_folder() / "runs").iterdir())


def test_a_training_whose_result_is_kept_leaves_no_checkpoints(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    order = "steps: [{contrast: {steps: 2, batch_size: 8}}, {depth: {keep: 2}}, {align: {steps: 0}}]"
    taken: list[str] = []
    with pytest.raises(Stopped):
        run(tmp_path / "small", counted(parse_recipe(order, name="x"), taken, stop_at="align"))
    assert not list((cache_folder() / "runs").iterdir())
    run(tmp_path / "small", counted(parse_recipe(order, name="x"), taken))
    assert taken == ["contrast", "depth", "align"]


def test_the_same_training_twice_at_once_is_two_trainings(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = "steps: [{depth: {keep: 2}}, {align: {steps: 4, texts: 60, batch_size: 8}}]"
    recipe = parse_recipe(order, name="two steps")
    alone, begun = loop.train, []

    def joined(*args: Any, **more: Any) -> Any:
        begun.append(more["folder"])
        if len(begun) == 1:
            run(tmp_path / "second", recipe)
        return alone(*args, **more)

    monkeypatch.setattr("trundle.methods.training.train", joined)
    run(tmp_path / "first", recipe)
    assert len(set(begun)) == 2
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not list((cache_folder() / "runs").iterdir())


def test_two_runs_with_the_same_first_steps_do_not_block_each_other(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    """The second starts while the first applies a shared step, and ends before the first stores it."""
    recipe, other = (parse_recipe(ORDER.replace("steps: 1", f"steps: {n}"), name="x") for n in (1, 2))
    shared = recipe.calls[1]
    assert shared.options == other.calls[1].options

    def joined(*arguments: Any) -> Any:
        taken: list[str] = []
        with pytest.raises(Stopped):  # its stages stay
            run(tmp_path / "second", counted(other, taken, stop_at="align"))
        assert taken == ["weights"]  # the vocabulary was there
        return shared.method.apply(*arguments)

    slow = replace(shared, method=Wrapped(shared.method, joined))
    run(tmp_path / "first", replace(recipe, calls=(recipe.calls[0], slow, recipe.calls[2])))
    taken: list[str] = []
    run(tmp_path / "second", counted(other, taken))
    assert taken == ["vocabulary", "weights", "align"]  # the first was safe and cleared them
    assert not list((cache_folder() / "steps").iterdir())


def load_stages_by(other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace how stages are loaded; the source is loaded as before."""
    load, stages = run_module.load, cache_folder() / "steps"

    def loaded(folder: str, **settings: Any) -> Any:
        return (other if stages in Path(folder).parents else load)(folder, **settings)

    monkeypatch.setattr(run_module, "load", loaded)


def test_a_stage_deleted_while_it_is_read_is_computed_again(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = stopped_before_align(run, tmp_path / "small")

    def too_late(folder: str, **_: Any) -> Any:
        shutil.rmtree(Path(folder).parent)
        raise FileNotFoundError(folder)

    load_stages_by(too_late, monkeypatch)
    taken: list[str] = []
    run(tmp_path / "small", counted(recipe, taken))
    assert taken == ["vocabulary", "weights", "align"]


def test_a_damaged_stage_is_an_error(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = stopped_before_align(run, tmp_path / "small")
    load_stages_by(lambda *_, **__: 1 / 0, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "small", recipe)
