"""The model card as the hub's own library reads it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

from trundle.pipeline.pair import _model_card, _pair_card
from trundle.records import Lineage

STEP = {
    "step": "align",
    "says": "into the space of /data/teachers/mpnet",
    "options": {},
    "plan": {},
    "facts": {},
}
SCORES = {
    "cosine to /data/teachers/mpnet": 0.91,
    "agreement@10, searching the index of /data/teachers/mpnet": 0.73,
    "agreement@10, own index": 0.61,
}


def lineage(**changes: object) -> Lineage:
    given = {
        "source": "cut",
        "space": "/data/teachers/mpnet",
        "steps": (STEP,),
        "data": ({"source": "/data/my texts.txt", "texts": 10, "fingerprint": "x"},),
        "scores": SCORES,
        "parent": {"source": "sentence-transformers/all-MiniLM-L6-v2", "parent": None},
    }
    return Lineage(**(given | changes))  # type: ignore[arg-type]


def test_the_hub_reads_the_facts() -> None:
    data = ModelCard(_model_card("small: model", lineage(), similarity="cosine")).data
    assert data.library_name == "sentence-transformers"
    assert data.pipeline_tag == "sentence-similarity"
    assert data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert data.to_dict()["base_model_relation"] == "finetune"
    assert "trundle" in (data.tags or [])
    assert data.model_name == "small: model"
    results = {result.metric_type: result for result in data.eval_results or []}
    found = results["agreement_at_10_searching_the_index_of_mpnet"]
    assert found.metric_value == 0.73
    assert found.metric_name == "agreement@10, searching the index of mpnet"
    assert found.task_type == "sentence-similarity"
    assert found.dataset_name == "Held-out texts of my texts.txt"
    assert len(results) == len(SCORES)


def test_a_card_survives_the_hub_library(tmp_path: Path) -> None:
    """What its library writes back says the same."""
    card = ModelCard(_model_card("small", lineage(), similarity="cosine"))
    card.save(tmp_path / "README.md")
    again = ModelCard.load(tmp_path / "README.md")
    assert again.data.to_dict() == card.data.to_dict()


def test_the_card_has_no_local_paths() -> None:
    text = _model_card("small", lineage(source="/home/me/models/cut", parent=None), similarity="cosine")
    assert "/home" not in text
    assert "/data" not in text
    assert ModelCard(text).data.base_model == "cut"


def test_a_model_aligned_to_itself_says_so() -> None:
    text = _model_card("small", lineage(space="the original"), similarity="cosine")
    assert "in that model's own vector space" in text


def test_without_measures_there_are_no_results() -> None:
    data = ModelCard(_model_card("small", lineage(scores={}), similarity="cosine")).data
    assert data.eval_results is None
    assert "model-index" not in data.to_dict()


def test_a_pair_names_both() -> None:
    facts = {"width": 8, "query_parameters": 10, "document_parameters": 100}
    made = lineage(
        steps=({**STEP, "step": "pair", "facts": facts},),
        space="big/teacher",
        scores={},
        parent={"source": "org/student", "space": "big/teacher", "scores": {"cosine to big/teacher": 0.5}},
    )
    data = ModelCard(_pair_card("both", made, similarity="cosine")).data
    assert data.base_model == ["org/student", "big/teacher"]
    assert data.to_dict()["base_model_relation"] == "merge"
    assert [result.metric_value for result in data.eval_results or []] == [0.5]
