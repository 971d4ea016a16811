"""int8 and binary vectors as sentence-transformers computes them, and the rankings they give."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sentence_transformers.util import quantize_embeddings

from trundle.embedder import _plain
from trundle.errors import BadInput
from trundle.evaluate.retrieval import nearest
from trundle.evaluate.shortening import (
    _bytes_of,
    _shortened,
    _to_bytes,
    _usual_dimensions,
    _with_shortened,
    measure_ranges,
    read_ranges,
)
from trundle.records import CALIBRATION_FILE

RANDOM = np.random.default_rng(3)
CALIBRATION = RANDOM.normal(size=(200, 32)).astype(np.float32)
VECTORS = (1.3 * RANDOM.normal(size=(80, 32))).astype(np.float32)  # some lie outside the ranges
RANGES = measure_ranges([CALIBRATION], "teacher")


@pytest.mark.parametrize("dimensions", [32, 16, 5])
def test_bytes_are_those_of_sentence_transformers(dimensions):
    theirs = quantize_embeddings(
        VECTORS[:, :dimensions], "int8", calibration_embeddings=CALIBRATION[:, :dimensions]
    )
    np.testing.assert_array_equal(_to_bytes(VECTORS[:, :dimensions], RANGES), theirs)


@pytest.mark.parametrize("dimensions", [32, 16])
def test_bits_are_those_of_sentence_transformers_and_order_by_hamming_distance(dimensions):
    theirs = np.unpackbits(quantize_embeddings(VECTORS[:, :dimensions], "ubinary"), axis=1)
    bits = _shortened(VECTORS, dimensions, "binary", RANGES)
    np.testing.assert_array_equal(bits > 0, theirs == 1)
    hamming = (theirs[:10, None, :] != theirs[None, 10:, :]).sum(axis=2)
    expected = np.argsort(hamming, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(nearest(bits[:10], bits[10:], 7), expected)


def test_int8_codes_are_within_half_a_step_of_their_value():
    step = (RANGES.highest - RANGES.lowest) / 255
    kept = _shortened(CALIBRATION, 32, "int8", RANGES)
    assert (np.abs(kept - CALIBRATION) <= 0.5001 * step).all()
    assert _shortened(VECTORS, 8, "float32", RANGES).tolist() == VECTORS[:, :8].tolist()


def test_a_constant_dimension_works():
    flat = CALIBRATION.copy()
    flat[:, 3] = 0.25
    ranges = measure_ranges([flat], "teacher")
    assert np.isfinite(_shortened(VECTORS, 32, "int8", ranges)).all()
    theirs = quantize_embeddings(VECTORS, "int8", calibration_embeddings=flat)
    np.testing.assert_array_equal(_to_bytes(VECTORS, ranges), theirs)


@given(arrays(np.float32, (12, 3), elements=st.floats(-4, 4, width=32)), st.integers(1, 11))
def test_blocks_give_the_ranges_of_the_whole(vectors, cut):
    whole, parts = measure_ranges([vectors], "t"), measure_ranges([vectors[:cut], vectors[cut:]], "t")
    assert (whole.lowest == parts.lowest).all()
    assert (whole.highest == parts.highest).all()
    assert whole.vectors == parts.vectors == 12


def test_ranges_survive_the_folder_exactly(tmp_path):
    assert read_ranges(tmp_path) is None
    (tmp_path / CALIBRATION_FILE).write_text(RANGES.as_text())
    read = read_ranges(tmp_path)
    assert (read.lowest == RANGES.lowest).all()
    assert (read.highest == RANGES.highest).all()
    assert (read.vectors, read.teacher) == (200, "teacher")


@pytest.mark.parametrize(
    "content",
    ["{", "[" * 100_000, "[]", json.dumps({"lowest": [1], "highest": [1, 2], "vectors": 1, "teacher": ""})],
)
def test_damaged_ranges_are_named(tmp_path, content):
    (tmp_path / CALIBRATION_FILE).write_text(content)
    with pytest.raises(BadInput, match="damaged"):
        read_ranges(tmp_path)


def test_no_vectors_have_no_ranges():
    with pytest.raises(BadInput, match="no vectors"):
        measure_ranges([], "t")


def test_every_role_is_shortened():
    model = _with_shortened(_plain("table", lambda texts: VECTORS[: len(texts)]), 4, "binary", RANGES)
    for encode in (model.text, model.query, model.document):
        assert encode(["a", "b"]).shape == (2, 4)
    assert [_bytes_of(12, precision) for precision in ("float32", "int8", "binary")] == [48, 12, 2]


@pytest.mark.parametrize(
    ("width", "expected"), [(768, (768, 512, 256, 128, 64)), (1024, (1024, 512, 256, 128, 64)), (2, (2, 1))]
)
def test_usual_dimensions(width, expected):
    assert _usual_dimensions(width) == expected
