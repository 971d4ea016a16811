"""Texts as tokens, and the teacher's vectors, all on the GPU: a batch is then a few gathers, and nothing is waited for.

A fast GPU takes tens of thousands of short texts a second; reading and tokenising them for every epoch anew would hold
it up. A text costs four bytes a token and, as its store has it, two or four a number of its vector, so a million
texts take about two gigabytes. Host memory stays flat. Where it does not fit, texts are read and tokenised batch by
batch as on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.data.labelling import role_of
from trundle.data.targets import Targets
from trundle.model.prompts import prompts_by_role
from trundle.model.tokenise import ShortCut, find_short_cut
from trundle.progress import SILENT, Progress

CHUNK = 16_384
"""Texts tokenised at once: enough for all cores."""
TOKENS_PER_TEXT = 512
"""No more than this is expected of a text when room is looked for."""
SHARE_OF_FREE_MEMORY = 0.25
DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Resident:
    """All texts of a store, tokenised once."""

    short_cut: ShortCut
    tokens: Tensor
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    vectors: Tensor

    def load(self, positions: NDArray[np.int64]) -> tuple[dict[str, Any], Tensor]:
        """The features and targets of some texts, on the device."""
        features = self.short_cut.features(self.tokens, self.starts[positions], self.lengths[positions])
        rows = torch.from_numpy(positions).to(self.vectors.device)
        return features, self.vectors[rows].float()


def fits(targets: Targets, free_bytes: int) -> bool:
    """Whether a store surely fits into memory of which so many bytes are free."""
    characters = np.minimum(targets.lengths, TOKENS_PER_TEXT)
    number = np.dtype(targets.manifest.dtype).itemsize
    needed = 4 * int(characters.sum()) + number * targets.width * len(targets)
    return needed < SHARE_OF_FREE_MEMORY * free_bytes


def make_resident(
    model: SentenceTransformer, targets: Targets, device: torch.device, *, progress: Progress = SILENT
) -> Resident | None:
    """Bring a store to a device, or None where the model's tokens can't be had the fast way."""
    short_cut = find_short_cut(model)
    if short_cut is None:
        return None
    prompts = prompts_by_role(model)
    vectors = torch.empty((len(targets), targets.width), dtype=DTYPES[targets.manifest.dtype], device=device)
    tokens, lengths = [], []
    with progress.task("tokenising", len(targets)) as advance:
        for start in range(0, len(targets), CHUNK):
            positions = np.arange(start, min(start + CHUNK, len(targets)))
            texts, kinds = targets.texts(positions), targets.kinds(positions)
            prompted = [prompts[role_of(kind)] + text for text, kind in zip(texts, kinds, strict=True)]
            flat, counts = short_cut.flat(prompted)
            tokens.append(torch.from_numpy(flat).to(device))
            lengths.append(counts)
            vectors[start : start + len(positions)] = torch.from_numpy(targets.vectors(positions)).to(device)
            advance(len(positions))
    counts = np.concatenate(lengths)
    return Resident(
        short_cut=short_cut,
        tokens=torch.cat(tokens),
        lengths=counts,
        starts=counts.cumsum() - counts,
        vectors=vectors,
    )
