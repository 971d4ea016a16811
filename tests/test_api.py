"""`import trundle`: each function takes a model or its name, and does what its command does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel

import pico
import trundle
from recorded_progress import RecordedProgress
from trundle.errors import BadInput, UnknownFamily

TEXTS = pico.different_texts(700)
FEW = TEXTS[:200]


@pytest.fixture
def bert(pico_folders: Callable[..., Path]) -> Path:
    return pico_folders("bert", 2)


def layers(model: SentenceTransformer) -> int:
    return int(model[0].model.config.num_hidden_layers)


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, trundle; trundle.Encoder; assert not {'torch', 'pyarrow', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there() -> None:
    for name in trundle.__all__:
        assert getattr(trundle, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'shrink'"):
        _ = trundle.shrink  # type: ignore[attr-defined]


def test_a_missing_package_is_named_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(trundle, "import_module", absent)
    with pytest.raises(trundle.TrundleError, match=r"trundle.distill needs .*'trundle\[compress\]'"):
        _ = trundle.distill


def test_layers_tokens_weights_and_widths_are_cut(bert: Path) -> None:
    whole = SentenceTransformer(str(bert), device="cpu")
    assert layers(trundle.prune_layers(whole, keep=1)) == 1
    assert layers(whole) > 1, "the model that was passed is not changed"
    assert len(trundle.prune_vocabulary(bert, keep=150, texts=TEXTS).tokenizer) == 150
    pruned = trundle.prune_weights(str(bert), "50%", method="magnitude")
    zeros = sum(int((weight == 0).sum()) for weight in pruned.parameters())
    assert zeros > sum(int((weight == 0).sum()) for weight in whole.parameters()) + 100
    half = trundle.narrow(bert, "1/2")
    assert 2 * half[0].model.config.hidden_size == whole[0].model.config.hidden_size


def test_a_student_is_distilled_from_a_model_in_memory(bert: Path, tmp_path: Path) -> None:
    teacher = SentenceTransformer(str(bert), device="cpu")
    student = trundle.prune_layers(teacher, keep=1)
    rows = [{"text": text, "label": 0} for text in TEXTS]
    result = trundle.distill(student, teacher, rows, steps=4, output=tmp_path / "small")
    assert layers(result.model) == 1
    assert result.fidelity is not None
    assert result.fidelity.agreement_asymmetric > 0
    assert TEXTS[0] not in repr(result)
    assert "agreement_asymmetric=" in repr(result)
    loaded = SentenceTransformer(str(result.folder), device="cpu")
    np.testing.assert_allclose(loaded.encode("a text"), result.model.encode("a text"), atol=1e-6)
    page = result.report()
    assert page == tmp_path / "small" / "report.html"
    assert "agreement" in page.read_text(encoding="utf-8")


def test_a_recipe_is_run_and_pushed(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trundle.compress(bert, "half", texts=TEXTS, progress=(progress := RecordedProgress()))
    assert progress.lines
    assert result.outcome is None
    sent: list[Any] = []

    class Hub:
        def create_repo(self, *given: Any, **named: Any) -> None:
            sent.append((given, named))

        def upload_folder(self, **named: Any) -> SimpleNamespace:
            sent.append(named)
            return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert result.push_to_hub("me/small", private=True) == "https://hub/commit"
    assert sent[0] == (("me/small",), {"private": True, "exist_ok": True})
    assert (Path(sent[1]["folder_path"]) / "modules.json").is_file()


def test_a_budget_is_searched_for_a_model_in_memory(bert: Path, tmp_path: Path) -> None:
    whole = SentenceTransformer(str(bert), device="cpu")
    result = trundle.compress(
        whole, budget="2x", texts=TEXTS, minutes=0.03, output=tmp_path / "small", progress=False
    )
    assert result.outcome is not None
    assert trundle.Encoder(result.folder).dimensions == whole.get_embedding_dimension()


def test_a_model_is_evaluated_exported_and_checked_on_an_index(bert: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = SentenceTransformer(str(bert), device="cpu")
    found = trundle.evaluate_model(trundle.prune_layers(whole, keep=1), whole, texts=TEXTS)
    assert 0 < found.fidelity[0].agreement_asymmetric < 1
    encoder = trundle.export_model(whole, output=tmp_path / "graph")
    np.testing.assert_allclose(encoder.encode("a text"), whole.encode("a text"), atol=1e-4)
    with pytest.raises(BadInput, match=r"or pass replace=True to replace it$"):
        trundle.export_model(whole, output=encoder.folder)
    with pytest.raises(BadInput, match=r"pass them with texts$"):
        trundle.export_model(whole, output=tmp_path / "int8", precision="int8")
    index = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": TEXTS, "vector": list(whole.encode(TEXTS))}), index)
    for model in (whole, encoder.folder):
        assert trundle.check_index(model, str(index), sample_size=100).agreement > 0.99


def test_a_model_of_an_unknown_family_learns_teaches_and_is_exported(bert: Path, tmp_path: Path) -> None:
    tokenizer, other = pico.tokenizer_for("bert"), tmp_path / "other"
    shape = pico.COMMON | {"num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model("albert", embedding_size=16, **shape)
    AutoModel.from_config(config).save_pretrained(other)
    tokenizer.save_pretrained(other)
    whole = SentenceTransformer(str(bert), device="cpu")
    student = trundle.distill(other, whole, FEW, steps=2, output=tmp_path / "student").model
    assert student.get_embedding_dimension() == whole.get_embedding_dimension()
    taught = trundle.distill(bert, trundle.load(other), TEXTS, steps=2, output=tmp_path / "taught")
    assert taught.fidelity is not None
    vector = trundle.export_model(student, output=tmp_path / "graph").encode("a text")
    np.testing.assert_allclose(vector, student.encode("a text"), atol=1e-4)
    with pytest.raises(UnknownFamily, match=r"can't cut models of type 'albert'.*can still teach"):
        trundle.prune_layers(other, keep=1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: trundle.compress("m", "half", budget="2x"), "one or the other"),
        (lambda: trundle.compress("m", data="texts/"), "no option 'data'.*such as texts"),  # type: ignore[call-arg]
        (lambda: trundle.compress("m", texts="t", minutes="5"), "not a number of minutes"),  # type: ignore[arg-type]
        (lambda: trundle.compress("m", texts="t", budget=12), "12 is not a budget"),  # type: ignore[arg-type]
        (lambda: trundle.compress("m", texts=5), "5 are no texts"),  # type: ignore[arg-type]
        (lambda: trundle.compress("m", texts={"text": ["a"] * 99}), r"{'text': .* are no texts; pass a list"),
        (lambda: trundle.compress("m", texts="~/none.txt"), r"/none.txt does not exist"),
        (lambda: trundle.compress("m", texts="https://a.b/c.txt"), "is an address; download it"),
        (lambda: trundle.distill("m", "t", [1]), "a text is a int; pass strings"),  # type: ignore[list-item]
        (lambda: trundle.distill("m", "t", [{"body": "a"}]), "columns body; pass its texts as a column"),
    ],
)
def test_a_mistake_is_one_sentence(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        call()
