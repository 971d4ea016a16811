"""Matrices of which two in each four weights are zero, on GPUs that multiply them at half the cost.

What this is not: it changes no weight, and where no sparse product was measured to be faster it changes nothing at all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional

from trundle.model.heads import copy_of
from trundle.model.surgery import transformer_of

OLDEST = (8, 0)
"""The first GPUs with such units."""
TILE = 64
"""Only matrices whose sides are multiples of this are tried."""
TOKENS_TILE = 8
"""The kernels take so many tokens, or a multiple of it."""
SIZES = (1024, 4096, 16384, 65536)
"""Tokens of a batch for which both ways are timed: a sparse product costs time to begin, so it takes many to pay."""
GAIN = 1.03
"""So many times faster, or it is left: less is within what the clock sees."""
BUSY = 0.5
"""The processor takes 0.4 ms to begin a sparse product. More than this share of the GPU's own time, and a model waits for the
processor, which has more to begin than products."""
ROUNDS, CALLS = 5, 10


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The fastest way of the library to multiply at least so many tokens."""

    tokens: int
    algorithm: int
    split: int = 1
    split_mode: int = -1
    """Into how many parts the sum is split, and how they are added."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds until all is done, and until the processor has begun all of it."""

    whole: float
    begun: float


def is_two_of_four(weight: Tensor) -> bool:
    """Whether no four weights side by side in a row have more than two that are not zero."""
    if weight.ndim != 2 or weight.shape[1] % 4:
        return False
    return bool(((weight.reshape(-1, 4) != 0).sum(dim=1) <= 2).all())


def with_sparse_kernels(model: SentenceTransformer) -> tuple[SentenceTransformer, int]:
    """A copy in bf16 that runs 2:4 matrices sparsely where this GPU gains by it, for inference, and how many those are.

    Each shape of matrix is timed for batches of several sizes. A matrix that gains is held twice, for small batches still go
    the dense way. On other devices the model itself comes back, dense, with 0.
    """
    if model.device.type != "cuda" or not _multiplies_sparsely(model.device):
        return model, 0
    fast = copy_of(model).to(torch.bfloat16).requires_grad_(False)
    timed: dict[tuple[int, int, bool], tuple[Kernel, ...]] = {}
    found = 0
    for parent in list(transformer_of(fast).model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is not nn.Linear or not _fits(module.weight):
                continue
            packed = torch._cslt_compress(module.weight)
            shape = (module.out_features, module.in_features, module.bias is not None)
            if shape not in timed:
                timed[shape] = _paying(module, packed)
            if timed[shape]:
                setattr(parent, name, SparseLinear(module, packed, timed[shape]))
                found += 1
    return fast, found


class SparseLinear(nn.Linear):
    """A linear layer that multiplies many tokens sparsely, and few as ever."""

    def __init__(self, dense: nn.Linear, packed: Tensor, kernels: tuple[Kernel, ...]) -> None:
        super().__init__(dense.in_features, dense.out_features, bias=False, device="meta")
        self.weight, self.bias = dense.weight, dense.bias
        self.register_buffer("packed", packed, persistent=False)
        self.kernels = kernels

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """The layer's output, whichever way."""
        kernel = kernel_for(input.numel() // self.in_features, self.kernels)
        if kernel is None:
            return super().forward(input)
        packed = self.get_buffer("packed")
        return product(
            input.reshape(-1, self.in_features), packed, self.bias, self.out_features, kernel
        ).reshape(*input.shape[:-1], self.out_features)


def kernel_for(tokens: int, kernels: tuple[Kernel, ...]) -> Kernel | None:
    """The one of the nearest size below; none if so few tokens are faster the dense way."""
    return max(
        (kernel for kernel in kernels if kernel.tokens <= tokens),
        key=lambda kernel: kernel.tokens,
        default=None,
    )


def product(rows: Tensor, packed: Tensor, bias: Tensor | None, width: int, kernel: Kernel) -> Tensor:
    """Rows times the packed matrix, lying as a dense product would: what comes next is slow on a transposed result."""
    count = len(rows)
    if missing := -count % TOKENS_TILE:
        rows = functional.pad(rows, (0, 0, 0, missing))
    found = torch._cslt_sparse_mm(packed, rows.t(), bias=bias, transpose_result=True, alg_id=kernel.algorithm)
    return found.reshape(-1, width)[:count]


def _paying(dense: nn.Linear, packed: Tensor) -> tuple[Kernel, ...]:
    """The kernels for those sizes from which on the sparse way is faster."""
    found: list[Kernel] = []
    for size in reversed(SIZES):
        rows = torch.randn(size, dense.in_features, dtype=dense.weight.dtype, device=dense.weight.device)
        kernel = _fastest(packed, rows, dense.bias)
        usual, sparse = _in_turns(
            partial(functional.linear, rows, dense.weight, dense.bias),
            partial(product, rows, packed, dense.bias, dense.out_features, kernel),
        )
        if usual.whole < GAIN * sparse.whole or sparse.begun > BUSY * sparse.whole:
            break
        found.append(kernel)
    return tuple(found)


def _fastest(packed: Tensor, rows: Tensor, bias: Tensor | None) -> Kernel:
    """The library tries all it has for this shape."""
    search = torch._C._cusparselt.mm_search  # type: ignore[attr-defined]
    algorithm, split, split_mode, _ = search(packed, rows.t(), bias, None, None, True)
    return Kernel(tokens=len(rows), algorithm=algorithm, split=split, split_mode=split_mode)


@torch.inference_mode()
def _in_turns(*ways: Callable[[], Tensor]) -> list[Timed]:
    """Medians over some calls in a row, for in a model the processor begins one product while the GPU is at another."""
    rounds: list[list[Timed]] = [[] for _ in ways]
    for _ in range(ROUNDS + 1):
        for way, own in zip(ways, rounds, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                way()
            begun = time.perf_counter() - start
            torch.cuda.synchronize()
            own.append(Timed(whole=time.perf_counter() - start, begun=begun))
    return [
        Timed(
            whole=statistics.median(one.whole for one in own[1:]),
            begun=statistics.median(one.begun for one in own[1:]),
        )
        for own in rounds
    ]


def _multiplies_sparsely(device: torch.device) -> bool:
    known = hasattr(getattr(torch._C, "_cusparselt", None), "mm_search")
    return (
        known
        and torch.cuda.get_device_capability(device) >= OLDEST
        and torch.backends.cusparselt.is_available()
    )


def _fits(weight: Tensor) -> bool:
    return all(size % TILE == 0 for size in weight.shape) and is_two_of_four(weight)
