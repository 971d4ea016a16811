"""Every family's graph gives what torch gives, whatever the pooling and padding side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

import pico
from trundle.export import export_model
from trundle.runtime import Encoder

TEXTS = [*pico.TEXTS, "a", "long " * 100]


def reference(folder: Path) -> np.ndarray:
    """One text at a time: what padding does to a decoder in torch is no reference."""
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_every_family(family: str, pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    exported = export_model(str(pico_folders(family)), to="onnx", output=tmp_path / "out")
    ours = Encoder(tmp_path / "out").encode(TEXTS)
    np.testing.assert_allclose(ours, reference(pico_folders(family)), atol=1e-5)
    assert exported.parity.largest_difference < 1e-5
    assert not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_every_family_in_openvino(family: str, pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("nncf", reason="needs pip install 'trundle[openvino]'")
    export_model(str(pico_folders(family)), to="openvino", output=tmp_path / "out")
    ours = Encoder(tmp_path / "out", threads=1).encode(TEXTS)
    np.testing.assert_allclose(ours, reference(pico_folders(family)), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "mode", "side"),
    [
        *(("bert", mode, "right") for mode in ("cls", "mean", "max", "weightedmean", "lasttoken")),
        *(("gpt2", mode, "left") for mode in ("mean", "weightedmean", "lasttoken")),
    ],
)
def test_every_pooling_and_side(family: str, mode: str, side: str, tmp_path: Path) -> None:
    transformer = Transformer(pico.save_backbone(family, str(tmp_path / "backbone")))
    transformer.tokenizer.padding_side = side
    torch.manual_seed(3)
    dense = Dense(32, 24, activation_function=torch.nn.Tanh())
    model = SentenceTransformer(modules=[transformer, Pooling(32, mode), dense, Normalize()], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    export_model(str(tmp_path / "model"), to="onnx")
    encoder = Encoder(tmp_path / "model")
    assert encoder.dimensions == 24
    np.testing.assert_allclose(encoder.encode(TEXTS), reference(tmp_path / "model"), atol=1e-5)


def test_a_chat_template_is_part_of_the_model(tmp_path: Path) -> None:
    """sentence-transformers renders each text as a message where the tokenizer has a template."""
    folder = tmp_path / "backbone"
    pico.save_backbone("llama", str(folder))
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
