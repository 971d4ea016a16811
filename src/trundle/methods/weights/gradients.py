"""Per-sample gradients of chosen matrices, squared and summed while they stream by: the diagonal of the Fisher information.

The loss of a sample is InfoNCE: its query finds its document among all documents of its small batch. It is taken as a
function of how the sample's *own* texts are encoded; the rivals' vectors are given. So each text has the gradient of one
sample, one backward pass serves a whole batch, and the gradient of a sample in a matrix is the product of what entered
the matrix and what came back from behind it, over the sample's tokens. It is formed for one matrix at a time, added to two
sums in fp32 (squares, and the gradient itself) and forgotten: the memory is two copies of the chosen matrices.

What this is not: it changes no weight, and no other parameter's gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn import functional

from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.methods.contrast.contrastive import TEMPERATURE, directions, make_chunker, relate
from trundle.methods.training import Prompts
from trundle.model.device import dropping
from trundle.model.encode import Features
from trundle.model.surgery import transformer_of
from trundle.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Texts that go through the model together, and the sample each belongs to."""

    features: Features
    owners: Tensor


@dataclass(frozen=True, kw_only=True)
class _SampleBatch:
    """A few samples that are each other's rivals: query i, its document i, then hard negatives with their owners.

    `query_rows` and `document_rows` say where a text is found in the joined results of its parts.
    """

    queries: tuple[_Part, ...]
    documents: tuple[_Part, ...]
    query_rows: Tensor
    document_rows: Tensor
    owners: Tensor
    """The sample of each document."""
    excluded: Tensor
    """(samples, documents): right answers of a query that are not its own document, and so no rivals."""

    @property
    def size(self) -> int:
        """How many samples."""
        return len(self.query_rows)


def _make_sample_loader(
    model: SentenceTransformer, prompts: Mapping[str, Prompts], *, negatives: int = 1, texts_at_once: int = 32
) -> Callable[[Sequence[Example]], _SampleBatch]:
    """How samples of one source become a batch; texts of similar length go through the model together."""
    chunked = make_chunker(model, texts_at_once)

    def load(samples: Sequence[Example]) -> _SampleBatch:
        prompt = prompts[samples[0].source]
        hard = [(owner, text) for owner, one in enumerate(samples) for text in one.negatives[:negatives]]
        documents = [sample.positive for sample in samples] + [text for _, text in hard]
        owners = np.asarray([*range(len(samples)), *(owner for owner, _ in hard)])
        query_parts, query_rows = _parts(
            chunked, [sample.query for sample in samples], np.arange(len(samples)), prompt.query
        )
        document_parts, document_rows = _parts(chunked, documents, owners, prompt.document)
        return _SampleBatch(
            queries=query_parts,
            documents=document_parts,
            query_rows=query_rows,
            document_rows=document_rows,
            owners=torch.from_numpy(owners),
            excluded=_excluded(samples, documents, negatives),
        )

    return load


def _parts(
    chunked: Callable[..., tuple[tuple[Features, ...], Tensor]],
    texts: Sequence[str],
    owners: np.ndarray[tuple[int], np.dtype[np.int64]],
    prompt: str,
) -> tuple[tuple[_Part, ...], Tensor]:
    features, rows = chunked(texts, prompt)
    order = torch.argsort(rows)
    by_place = torch.from_numpy(owners)[order]
    sizes = [len(part["input_ids"]) for part in features]
    parts = [
        _Part(features=one, owners=of) for one, of in zip(features, torch.split(by_place, sizes), strict=True)
    ]
    return tuple(parts), rows


def _excluded(samples: Sequence[Example], documents: Sequence[str], negatives: int) -> Tensor:
    """Where a document is known to answer a query without being its own, or is the query itself."""
    found = relate(samples, negatives=negatives)
    place = {text: number for number, text in enumerate(found.documents)}
    places = np.asarray([place[text] for text in documents])
    excluded = found.excluded[:, places] | (places[None, :] == found.answers[:, None])
    own = np.arange(len(samples))
    excluded[own, own] = False
    return torch.from_numpy(excluded)


_BATCH = 32
_GPU_BYTES = 1 << 28
"""How much of per-sample gradients of one matrix is held at once on a GPU; a CPU takes them one by one, in its cache."""


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """What a pass over samples found, by matrix, as (out, in) in fp32."""

    fisher: dict[str, Tensor]
    """The mean squared gradient of a sample."""
    mean: dict[str, Tensor]
    """The mean gradient."""
    samples: int


def _measure_gradients(
    model: SentenceTransformer,
    samples: Sequence[Example],
    modules: Sequence[str],
    *,
    prompts: Mapping[str, Prompts],
    batch_size: int = _BATCH,
    negatives: int = 1,
    temperature: float = TEMPERATURE,
    dropout_seed: int | None = None,
    label: str = "gradients",
    progress: Progress = SILENT,
) -> _Gradients:
    """Take the Fisher information and the mean gradient of these modules' weights, named as in the backbone.

    Samples should stand in the order in which they shall be rivals; a batch never mixes sources. With `dropout_seed` the
    model drops at random as in training, so that two copies of a text are two views of it.
    """
    load = _make_sample_loader(model, prompts, negatives=negatives)
    sums = _Sums(transformer_of(model).model, modules)
    wanted = [weight.requires_grad for weight in model.parameters()]
    model.requires_grad_(False)
    try:
        with (
            dropping(model, dropout_seed is not None),
            _dice(dropout_seed, model.device),
            sums.tapped(),
            progress.task(f"{label}: gradients", len(samples)) as advance,
        ):
            for number, chosen in enumerate(_batches_of(samples, batch_size), start=1):
                losses = sums.take(model, load(chosen), temperature)
                sums.check(losses, f"{label} batch {number}, which begins with {chosen[0].query[:60]!r},")
                advance(len(chosen))
    finally:
        for weight, needs in zip(model.parameters(), wanted, strict=True):
            weight.requires_grad_(needs)
    return _Gradients(
        fisher={name: total.div_(len(samples)) for name, total in sums.squares.items()},
        mean={name: total.div_(len(samples)) for name, total in sums.totals.items()},
        samples=len(samples),
    )


def _measure_norms(
    model: SentenceTransformer,
    samples: Sequence[Example],
    modules: Sequence[str],
    *,
    prompts: Mapping[str, Prompts],
    batch_size: int = _BATCH,
    label: str = "activations",
    progress: Progress = SILENT,
) -> dict[str, Tensor]:
    """The length of each input feature of these modules over all tokens of the samples: what Wanda weighs by."""
    load = _make_sample_loader(model, prompts)
    backbone = transformer_of(model).model
    squares: dict[str, Tensor] = {}
    real: Tensor | None = None

    def listen(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            assert real is not None
            found = inputs[0].flatten(0, -2)[real].float().square().sum(dim=0)
            squares[name] = squares[name] + found if name in squares else found

        return hook

    handles = [backbone.get_submodule(name).register_forward_hook(listen(name)) for name in modules]
    try:
        with (
            torch.inference_mode(),
            dropping(model, False),
            progress.task(f"{label}: activations", len(samples)) as advance,
        ):
            for chosen in _batches_of(samples, batch_size):
                batch = load(chosen)
                for part in (*batch.queries, *batch.documents):
                    features = batch_to_device(dict(part.features), model.device)
                    real = features["attention_mask"].flatten().bool()
                    model(features)
                advance(len(chosen))
    finally:
        for handle in handles:
            handle.remove()
    return {name: total.sqrt().clone() for name, total in squares.items()}


def _batches_of(samples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    """Samples of one source, a few at a time; a last one alone joins those before it, for it needs rivals."""
    start = 0
    while start < len(samples):
        end = start
        while end < len(samples) and samples[end].source == samples[start].source:
            end += 1
        while start < end:
            stop = min(start + size, end)
            stop = end if end - stop == 1 else stop
            yield samples[start:stop]
            start = stop


def _own_losses(batch: _SampleBatch, queries: Tensor, documents: Tensor, temperature: float) -> Tensor:
    """The loss of each sample; what another sample's document is like is given, not learned from."""
    device = queries.device
    samples = torch.arange(batch.size, device=device)
    own = batch.owners.to(device)[None, :] == samples[:, None]
    asked, found = directions(queries), directions(documents)
    scores = torch.where(own, asked @ found.T, asked @ found.detach().T) / temperature
    scores = scores.masked_fill(batch.excluded.to(device), -torch.inf)
    return functional.cross_entropy(scores, samples, reduction="none")


@contextmanager
def _dice(seed: int | None, device: torch.device) -> Iterator[None]:
    """The same chances every time, and nobody else's disturbed."""
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield


class _Tap(torch.autograd.Function):
    """Leaves a module's output as it is, and hands what comes back to `receive` together with what went in."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _anchor: Tensor, inputs: Tensor, receive: Any) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.receive = receive
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.receive(ctx.saved_tensors[0], slope)
        return slope, None, None, None


class _Sums:
    """The two sums of each module, and what of the batch at hand has come back so far."""

    def __init__(self, backbone: nn.Module, modules: Sequence[str]) -> None:
        self._modules = {name: backbone.get_submodule(name) for name in modules}
        self._anchor = torch.zeros((), requires_grad=True)
        self._part = 0
        self._real: list[Tensor] = []
        self._back: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        self.squares: dict[str, Tensor] = {}
        self.totals: dict[str, Tensor] = {}

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """Listen to the modules while the block runs."""
        handles = [module.register_forward_hook(self._hook(name)) for name, module in self._modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., Tensor]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            part = self._part
            tapped: Tensor = _Tap.apply(  # type: ignore[no-untyped-call]
                output,
                self._anchor,
                inputs[0].detach(),
                lambda went, came: self._receive(name, part, went, came),
            )
            return tapped

        return hook

    def take(self, model: SentenceTransformer, batch: _SampleBatch, temperature: float) -> Tensor:
        """Add one batch; its samples' losses come back."""
        parts = (*batch.queries, *batch.documents)
        self._index, self._lengths = _token_index(parts, batch.size)
        self._index = self._index.to(model.device)
        self._real, self._back, self._parts = [], {}, len(parts)
        vectors = []
        for number, part in enumerate(parts):
            self._part = number
            features = batch_to_device(dict(part.features), model.device)
            self._real.append(features["attention_mask"].flatten().bool())
            vectors.append(model(features)["sentence_embedding"])
        asked = torch.cat(vectors[: len(batch.queries)])[batch.query_rows.to(model.device)]
        found = torch.cat(vectors[len(batch.queries) :])[batch.document_rows.to(model.device)]
        losses = _own_losses(batch, asked, found, temperature)
        torch.autograd.backward(losses.sum())
        return losses.detach()

    def _receive(self, name: str, part: int, went: Tensor, came: Tensor) -> None:
        """Keep what came back of one part; when all parts of the batch have, form the samples' gradients."""
        real = self._real[part]
        back = self._back.setdefault(name, {})
        back[part] = (went.flatten(0, -2)[real].float(), came.flatten(0, -2)[real].float())
        if len(back) == self._parts:
            ordered = [back[number] for number in range(self._parts)]
            self._add(name, *(torch.cat(tensors) for tensors in zip(*ordered, strict=True)))
            del self._back[name]

    def _add(self, name: str, went: Tensor, came: Tensor) -> None:
        if name not in self.squares:
            shape = (came.shape[1], went.shape[1])
            self.squares[name], self.totals[name] = (torch.zeros(shape, device=went.device) for _ in range(2))
        squares, totals = self.squares[name], self.totals[name]
        if went.device.type == "cpu":
            for rows, length in zip(self._index, self._lengths, strict=True):
                gradient = came[rows[:length]].T @ went[rows[:length]]
                squares.addcmul_(gradient, gradient)
                totals.add_(gradient)
            return
        went, came = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (went, came))
        for rows in torch.split(self._index, max(1, _GPU_BYTES // (4 * squares.numel()))):
            gradients = torch.bmm(came[rows].transpose(1, 2), went[rows])
            totals.add_(gradients.sum(dim=0))
            squares.add_(gradients.square_().sum(dim=0))

    def check(self, losses: Tensor, where: str) -> None:
        """Refuse a batch whose gradients are not numbers."""
        sums = torch.stack([losses.sum(), *(total.sum() for total in self.squares.values())])
        if not bool(torch.isfinite(sums).all()):
            raise BadInput(
                f"the loss or the gradients of {where} are NaN or infinite; look for damaged texts there, or check "
                "the model's weights"
            )


def _token_index(parts: Sequence[_Part], samples: int) -> tuple[Tensor, list[int]]:
    """For each sample, where its tokens stand in the row of all real tokens; filled up with the place after the last."""
    owners = torch.cat(
        [
            part.owners.repeat_interleave(part.features["attention_mask"].sum(dim=1).to(part.owners.device))
            for part in parts
        ]
    )
    order = torch.argsort(owners, stable=True)
    lengths = torch.bincount(owners, minlength=samples)
    index = torch.full((samples, int(lengths.max())), len(owners))
    starts = lengths.cumsum(0) - lengths
    places = torch.arange(len(owners)) - starts[owners[order]]
    index[owners[order], places] = order
    return index, lengths.tolist()
