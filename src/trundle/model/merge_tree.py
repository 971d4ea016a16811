"""What a token of a BPE vocabulary is merged from.

A token can only be produced when both halves of its last merge are there, and theirs, down to bytes or characters. A
vocabulary that holds, with each of its tokens, all of these is *closed*: then every token in it can still be produced,
and a text that needs no other token is segmented exactly as before. (All merges of that text's segmentation are still
there, no new ones are, so the same merge comes first at every step.) WordPiece and Unigram need no halves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from trundle.model.tokenizer_file import Content, merge_parts, merged, model_type

Halves = tuple[int, int]


class MergeTree:
    """The last merge of every token, found when it is asked for."""

    def __init__(self, content: Content) -> None:
        self._model: Any = content["model"]
        self._halves: dict[int, Halves | None] = {}
        self._ranks: dict[tuple[str, str], int] = {}
        self._several: set[int] = set()
        if model_type(content) == "BPE":
            self._read_merges()
        self._tokens = {number: token for token, number in self._vocab.items()} if self._several else {}

    def halves(self, token: int) -> Halves | None:
        """The ids a token's last merge joins; None for a token that no merge makes."""
        if token in self._several:
            self._several.discard(token)
            self._halves[token] = self._last_merge(self._tokens[token])
        return self._halves.get(token)

    def with_halves(self, tokens: Iterable[int]) -> set[int]:
        """The tokens and everything they are merged from."""
        found: set[int] = set()
        waiting = list(tokens)
        while waiting:
            token = waiting.pop()
            if token not in found:
                found.add(token)
                waiting.extend(self.halves(token) or ())
        return found

    @property
    def _vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._model["vocab"]
        return vocab

    def _read_merges(self) -> None:
        """Most vocabularies have one merge for each token; those converted from sentencepiece list every possible one."""
        vocab = self._vocab
        for rank, merge in enumerate(self._model["merges"]):
            left, right = merge_parts(merge)
            self._ranks.setdefault((left, right), rank)
            made = vocab.get(merged(left, right, self._model))
            if made is None or left not in vocab or right not in vocab:
                continue
            if made in self._halves:
                self._several.add(made)
            else:
                self._halves[made] = (vocab[left], vocab[right])

    def _last_merge(self, text: str) -> Halves | None:
        """Merge a token's own characters as the tokenizer would, to see which of several merges comes last."""
        pieces, last = list(text), None
        while len(pieces) > 1:
            ranked = [
                (self._ranks[pair], place)
                for place, pair in enumerate(itertools.pairwise(pieces))
                if pair in self._ranks
            ]
            if not ranked:
                return self._halves.get(self._vocab[text])
            _, place = min(ranked)
            last = (pieces[place], pieces[place + 1])
            pieces[place : place + 2] = ["".join(last)]
        return None if last is None else (self._vocab[last[0]], self._vocab[last[1]])


NO_MERGES = MergeTree({"model": {"type": "WordPiece", "vocab": {}}})
"""For a choice of tokens that need nothing else."""
