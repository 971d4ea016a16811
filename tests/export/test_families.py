"""Every family's graph gives what torch gives, whatever the pooling and padding side."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
)

import pico
from trundle.errors import BadModel
from trundle.export.exporting import export_model
from trundle.export.quantise import ExportOptions
from trundle.runtime.encoder import Encoder
from trundle.runtime.engines import is_x86

TEXTS = [*pico.TEXTS, "a", "long " * 100]
OPENVINO = ("bert", "xlm-roberta", "mpnet", "modernbert", "qwen3", "gemma3", "phi3", "gpt2")
"""It reads the ONNX graph, which is tested for every family; the others have no operation that these lack."""
LAYERS = 2
"""ModernBERT has two kinds of layers; more take longer to trace."""


def reference(folder: Path) -> np.ndarray:
    """One text at a time, because padding changes a decoder's vectors in torch."""
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_every_family(family: str, pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = pico_folders(family, LAYERS)
    exported = export_model(str(folder), to="onnx", output=tmp_path / "out")
    ours = Encoder(tmp_path / "out").encode(TEXTS)
    np.testing.assert_allclose(ours, reference(folder), atol=1e-5)
    assert exported.closeness.largest_difference < 1e-5
    assert not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.parametrize("family", OPENVINO)
def test_families_in_openvino(family: str, pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("nncf", reason="needs pip install 'trundle[openvino]'")
    folder = pico_folders(family, LAYERS)
    export_model(str(folder), to="openvino", output=tmp_path / "out")
    ours = Encoder(tmp_path / "out", threads=1).encode(TEXTS)
    # On ARM openvino's logarithm puts a distance that is a power of two into the bucket beside its own.
    exact = family != "mpnet" or is_x86(platform.machine())
    np.testing.assert_allclose(ours, reference(folder), atol=1e-5 if exact else 1e-3)


def test_a_family_that_openvino_cannot_run(pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("nncf", reason="needs pip install 'trundle[openvino]'")
    with pytest.raises(BadModel, match="can't run the graph of this model; use --to onnx"):
        export_model(str(pico_folders("deberta", LAYERS)), to="openvino", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "mode", "side"),
    [
        *(("bert", mode, "right") for mode in ("cls", "mean", "max", "weightedmean", "lasttoken")),
        *(("gpt2", mode, "left") for mode in ("mean", "weightedmean", "lasttoken")),
    ],
)
def test_every_pooling_and_side(family: str, mode: str, side: str, tmp_path: Path) -> None:
    transformer = Transformer(pico.save_backbone(family, str(tmp_path / "backbone"), num_hidden_layers=1))
    transformer.tokenizer.padding_side = side
    torch.manual_seed(3)
    dense = Dense(32, 24, activation_function=torch.nn.Tanh())
    model = SentenceTransformer(modules=[transformer, Pooling(32, mode), dense, Normalize()], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    export_model(str(tmp_path / "model"), to="onnx")
    encoder = Encoder(tmp_path / "model")
    assert encoder.dimensions == 24
    np.testing.assert_allclose(encoder.encode(TEXTS), reference(tmp_path / "model"), atol=1e-5)


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
@pytest.mark.parametrize("size", ["full", "half", "int8"])
@pytest.mark.parametrize("limit", [None, 12])
def test_a_static_model(engine: str, size: str, limit: int | None, tmp_path: Path) -> None:
    """Texts of different lengths in one batch, with and without a limit, without special tokens."""
    if engine == "openvino":
        pytest.importorskip("nncf", reason="needs pip install 'trundle[openvino]'")
        if size == "int8" and not is_x86(platform.machine()):
            pytest.skip("openvino's int8 is refused on this processor")
    tokenizer = pico.wordpiece()
    tokenizer.no_truncation()
    if limit is not None:
        tokenizer.enable_truncation(limit)
    rows = torch.randn(tokenizer.get_vocab_size(), 48, generator=torch.Generator().manual_seed(4))
    model = SentenceTransformer(
        modules=[StaticEmbedding(tokenizer, embedding_weights=rows), Normalize()], device="cpu"
    )
    model.save_pretrained(str(tmp_path / "model"))
    calibrate = [f"{text} {number}" for number in range(9) for text in pico.TEXTS]
    halves = {"onnx": "float16", "openvino": "bfloat16"}
    precision = {"full": "float32", "half": halves[engine]}.get(size, size)
    options = ExportOptions(calibrate=calibrate)
    export_model(
        str(tmp_path / "model"), to=engine, precision=precision, options=options, output=tmp_path / "out"
    )
    wanted = reference(tmp_path / "model")
    ours = Encoder(tmp_path / "out", threads=2).encode(TEXTS)
    assert (ours * wanted).sum(axis=1).min() > 0.999
    np.testing.assert_allclose(ours, wanted, atol={"full": 1e-5, "half": 1e-2, "int8": 5e-3}[size])
    one_by_one = [Encoder(tmp_path / "out").encode(text) for text in TEXTS]
    np.testing.assert_allclose(ours, one_by_one, atol=1e-6 if size != "half" else 1e-2)


def test_a_chat_template_is_part_of_the_model(tmp_path: Path) -> None:
    """sentence-transformers renders each text as a message if the tokenizer has a template."""
    folder = tmp_path / "backbone"
    pico.save_backbone("llama", str(folder), num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<s>{{ m['role'] }} says {{ m['content'] }}</s>{% endfor %}"
    )
    model = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32, "lasttoken")], device="cpu")
    assert model.preprocess(["a"])["modality"] == "message"
    model.save_pretrained(str(tmp_path / "model"))
    export_model(str(tmp_path / "model"), to="onnx")
    np.testing.assert_allclose(
        Encoder(tmp_path / "model").encode(TEXTS), reference(tmp_path / "model"), atol=1e-4, rtol=1e-4
    )
