"""Matrices with two zeros in each four: which ones, and which way they are multiplied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.model import SparseLinear, is_two_of_four, with_sparse_kernels
from trundle.model.sparse_kernels import TOKENS_TILE, Kernel, kernel_for

KERNELS = (Kernel(tokens=64, algorithm=7), Kernel(tokens=16, algorithm=3))


def test_two_of_four_is_recognised() -> None:
    assert is_two_of_four(torch.tensor([[1.0, 0, 0, 2, 0, 0, 0, 0]]))
    assert not is_two_of_four(torch.tensor([[1.0, 3, 0, 2]]))
    assert not is_two_of_four(torch.zeros(1, 6))


def test_without_a_gpu_the_model_stays_dense(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("bert")
    if model.device.type != "cpu":
        pytest.skip("there is a GPU")
    assert with_sparse_kernels(model) == (model, 0)


def test_the_kernel_is_that_of_the_nearest_size_below() -> None:
    found = [kernel_for(tokens, KERNELS) for tokens in (15, 16, 63, 64, 1000)]
    assert [kernel and kernel.algorithm for kernel in found] == [None, 3, 3, 7, 7]


def multiply(
    packed: Tensor, dense: Tensor, *, bias: Tensor | None, transpose_result: bool, alg_id: int, **_: int
) -> Tensor:
    """A GPU's product played by a dense one that has the same rules."""
    assert dense.shape[1] % TOKENS_TILE == 0
    assert alg_id in {kernel.algorithm for kernel in KERNELS}
    found = packed @ dense
    if bias is not None:
        found = found + bias[:, None]
    return found.t().contiguous() if transpose_result else found


@pytest.mark.parametrize("bias", [True, False])
@given(texts=st.integers(1, 9), length=st.integers(1, 9))
def test_whichever_way_the_product_is_the_same(bias: bool, texts: int, length: int) -> None:
    dense = nn.Linear(12, 20, bias=bias)
    layer = SparseLinear(dense, dense.weight.detach(), KERNELS)
    states = torch.randn(texts, length, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_cslt_sparse_mm", multiply)
        torch.testing.assert_close(layer(states), dense(states))
