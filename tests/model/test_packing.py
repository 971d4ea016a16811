"""Packed folders: smaller by their zeros, and the same model to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer

import pico
from trundle.artifact import Lineage
from trundle.errors import BadModel
from trundle.model import (
    block_weights,
    copy_of,
    load,
    save,
    weight_bytes,
)
from trundle.model.packing import NOTE_FILE, is_packed, pack, unpack

LINEAGE = Lineage(source="test")


def pruned(
    model: SentenceTransformer, share: float, dtype: torch.dtype = torch.float32
) -> SentenceTransformer:
    small = copy_of(model).to(dtype)
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in block_weights(small):
            weight.masked_fill_(torch.rand(weight.shape, generator=dice) < share, 0.0)
    return small


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e-45]), min_size=1, max_size=40),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_packing_is_exact_to_the_bit(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=dtype).view(1, -1)
    bits, kept = pack(tensor)
    whole = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    assert torch.equal(unpack(bits, kept, (1, len(values))).view(whole), tensor.view(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_size_follows_sparsity(
    dtype: torch.dtype, pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    sizes = []
    for share in (0.0, 0.3, 0.6, 0.9):
        model = pruned(pico_model("bert"), share, dtype)
        folder = save(model, tmp_path / f"{share}", lineage=LINEAGE, card="", compact=True)
        sizes.append(weight_bytes(folder))
        zeros = sum(int((weight == 0).sum()) for _, weight in block_weights(model))
        weights = sum(weight.numel() for _, weight in block_weights(model))
        if share:
            expected = sizes[0] - zeros * dtype.itemsize + weights / 8
            assert sizes[-1] == pytest.approx(
                expected, abs=300 * len(list(block_weights(model)))
            )  # names, shapes
    assert sizes == sorted(sizes, reverse=True)
    assert not is_packed(tmp_path / "0.0")


def test_a_packed_folder_opens_as_the_plain_model(
    pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    model = pruned(pico_model("bert"), 0.5)
    folder = save(model, tmp_path / "packed", lineage=LINEAGE, card="", compact=True)
    assert is_packed(folder)
    opened = load(folder)
    assert type(opened[0]) is Transformer
    for name, weight in opened.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    plain = save(opened, tmp_path / "plain", lineage=LINEAGE, card="")
    np.testing.assert_array_equal(
        SentenceTransformer(str(plain), device="cpu").encode(pico.TEXTS), model.encode(pico.TEXTS)
    )


def test_plain_sentence_transformers_opens_it_where_trundle_is(
    pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    model = pruned(pico_model("bert"), 0.5)
    folder = save(model, tmp_path / "packed", lineage=LINEAGE, card="", compact=True)
    code = (
        "import sys; from sentence_transformers import SentenceTransformer as S; "
        f"m = S({str(folder)!r}, trust_remote_code=True, device='cpu'); "
        f"m.save_pretrained({str(tmp_path / 'again')!r}); print(m.encode(['a text'])[0][:3].tolist())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    vector = json.loads(said.stdout.strip().splitlines()[-1])
    assert vector == pytest.approx(model.encode(["a text"])[0][:3].tolist(), abs=1e-6)
    assert not is_packed(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").is_file()


def test_a_damaged_one_is_named(pico_model: Callable[[str], SentenceTransformer], tmp_path: Path) -> None:
    folder = save(
        pruned(pico_model("bert"), 0.5), tmp_path / "packed", lineage=LINEAGE, card="", compact=True
    )
    (folder / NOTE_FILE).write_text("{")
    with pytest.raises(BadModel, match="is damaged"):
        load(folder)
