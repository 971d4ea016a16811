"""Per-sample gradients of matrices, squared and summed: the diagonal of the Fisher information.

The loss of a sample is InfoNCE over the documents of its batch, with the vectors of the negatives as
constants. So each text contributes to the gradient of one sample only, one backward pass serves a batch, and
a sample's gradient in a matrix is the product of the matrix's inputs and output gradients over the sample's
tokens. It is added to two sums in fp32 (squares, gradient), which need two copies of the chosen matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.methods.contrast.contrastive import TEMPERATURE, directions, make_chunker, relate
from trundle.methods.training import Prompts
from trundle.model.encode import dropping
from trundle.model.surgery import transformer_of
from trundle.model.tokens import Features
from trundle.progress import SILENT, Progress

_BATCH = 32
_NEGATIVES = 1
"""Hard negatives per sample."""
_TEXTS_AT_ONCE = 32
_GPU_BYTES = 1 << 28
"""Memory for the per-sample gradients of a matrix on a GPU."""


class _Texts(NamedTuple):
    """Tokenised texts in chunks of similar length."""

    chunks: tuple[Features, ...]
    rows: Tensor
    """The row of each text in the concatenated results of the chunks."""
    owners: Tensor
    """The sample of each text."""


class _SampleBatch(NamedTuple):
    """Samples of one source that are each other's negatives."""

    queries: _Texts
    documents: _Texts
    """The document of each sample, then the hard negatives."""
    excluded: Tensor
    """(samples, documents): correct answers to a query other than its own document; they are no negatives."""


_Loader = Callable[[Sequence[Example]], _SampleBatch]


def _make_sample_loader(model: SentenceTransformer, prompts: Mapping[str, Prompts]) -> _Loader:
    chunked = make_chunker(model, _TEXTS_AT_ONCE)

    def load(samples: Sequence[Example]) -> _SampleBatch:
        prompt = prompts[samples[0].source]
        queries, own = [sample.query for sample in samples], torch.arange(len(samples))
        hard = [(owner, text) for owner, one in enumerate(samples) for text in one.negatives[:_NEGATIVES]]
        documents = [sample.positive for sample in samples] + [text for _, text in hard]
        owners = torch.cat([own, torch.tensor([owner for owner, _ in hard], dtype=torch.long)])
        return _SampleBatch(
            queries=_Texts(*chunked(queries, prompt.query), owners=own),
            documents=_Texts(*chunked(documents, prompt.document), owners=owners),
            excluded=_excluded(samples, documents),
        )

    return load


def _excluded(samples: Sequence[Example], documents: Sequence[str]) -> Tensor:
    """Where a document answers a query without being its own, or is the query itself."""
    found = relate(samples, negatives=_NEGATIVES)
    place = {text: number for number, text in enumerate(found.documents)}
    places = np.asarray([place[text] for text in documents])
    excluded = found.excluded[:, places] | (places[None, :] == found.answers[:, None])
    own = np.arange(len(samples))
    excluded[own, own] = False
    return torch.from_numpy(excluded)


def _batches_of(samples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    """Batches of one source; a single last sample joins the previous batch, because it needs negatives."""
    for _, group in groupby(samples, key=lambda sample: sample.source):
        same = list(group)
        starts = [start for start in range(0, len(same), size) if start == 0 or start < len(same) - 1]
        yield from (same[start:stop] for start, stop in pairwise([*starts, len(same)]))


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """The result of a pass over samples, by matrix, as (out, in) in fp32."""

    fisher: dict[str, Tensor]
    """The mean squared gradient of a sample."""
    mean: dict[str, Tensor]
    """The mean gradient."""


def _measure_gradients(
    model: SentenceTransformer,
    samples: Sequence[Example],
    modules: Sequence[str],
    *,
    prompts: Mapping[str, Prompts],
    batch_size: int = _BATCH,
    dropout_seed: int | None = None,
    label: str = "gradients",
    progress: Progress = SILENT,
) -> _Gradients:
    """Measure Fisher information and the mean gradient; `dropout_seed` turns on dropout as in training."""
    load = _make_sample_loader(model, prompts)
    sums = _Sums(transformer_of(model).model, modules)
    wanted = [weight.requires_grad for weight in model.parameters()]
    model.requires_grad_(False)
    devices = [model.device.index or 0] if model.device.type == "cuda" else []
    try:
        with (
            dropping(model, dropout_seed is not None),
            torch.random.fork_rng(devices),
            sums.hooked(),
            progress.task(f"{label}: gradients", len(samples)) as advance,
        ):
            if dropout_seed is not None:
                torch.manual_seed(dropout_seed)
            for number, chosen in enumerate(_batches_of(samples, batch_size), start=1):
                losses = sums.add_batch(model, load(chosen))
                sums.check(losses, f"{label} batch {number}, which begins with {chosen[0].query[:60]!r},")
                advance(len(chosen))
    finally:
        for weight, needs in zip(model.parameters(), wanted, strict=True):
            weight.requires_grad_(needs)
    for total in (*sums.squares.values(), *sums.totals.values()):
        total.div_(len(samples))
    return _Gradients(fisher=sums.squares, mean=sums.totals)


def _measure_norms(
    model: SentenceTransformer,
    samples: Sequence[Example],
    modules: Sequence[str],
    *,
    prompts: Mapping[str, Prompts],
    batch_size: int = _BATCH,
    progress: Progress = SILENT,
) -> dict[str, Tensor]:
    """The norm of each input feature of these modules over all tokens of the samples, as Wanda uses it."""
    load = _make_sample_loader(model, prompts)
    backbone = transformer_of(model).model
    squares: dict[str, Tensor] = {}
    real: Tensor | None = None

    def add(name: str, _module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        if real is None or inputs[0].shape[:-1] != real.shape:  # DeBERTa's distances
            return
        found = inputs[0][real].float().square().sum(dim=0)
        squares[name] = squares[name] + found if name in squares else found

    with (
        ExitStack() as hooks,
        torch.inference_mode(),
        dropping(model, False),
        progress.task("activations", len(samples)) as advance,
    ):
        for name in modules:
            hooks.enter_context(backbone.get_submodule(name).register_forward_hook(partial(add, name)))
        for chosen in _batches_of(samples, batch_size):
            batch = load(chosen)
            for chunk in (*batch.queries.chunks, *batch.documents.chunks):
                features = batch_to_device(dict(chunk), model.device)
                real = features["attention_mask"].bool()
                model(features)
            advance(len(chosen))
    return {name: total.sqrt().clone() for name, total in squares.items()}


def _own_losses(batch: _SampleBatch, queries: Tensor, documents: Tensor) -> Tensor:
    device = queries.device
    samples = torch.arange(len(queries), device=device)
    own = batch.documents.owners.to(device)[None, :] == samples[:, None]
    asked, found = directions(queries), directions(documents)
    scores = torch.where(own, asked @ found.T, asked @ found.detach().T) / TEMPERATURE
    scores = scores.masked_fill(batch.excluded.to(device), -torch.inf)
    return functional.cross_entropy(scores, samples, reduction="none")


class _Tap(torch.autograd.Function):
    """Returns a module's output unchanged; `backward` passes its input and output gradient to `receive`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _anchor: Tensor, inputs: Tensor, receive: Any) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.receive = receive
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.receive(ctx.saved_tensors[0], gradient)
        return gradient, None, None, None


class _Sums:
    """The two sums of each module, and the inputs and output gradients of the current batch."""

    def __init__(self, backbone: nn.Module, modules: Sequence[str]) -> None:
        self._modules = {name: backbone.get_submodule(name) for name in modules}
        self._anchor = torch.zeros((), requires_grad=True)
        self._chunk, self._shape = 0, torch.Size()
        self._real: list[Tensor] = []
        """The places of each chunk's real tokens. A mask would let the GPU wait in every matrix."""
        self._received: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        self.squares: dict[str, Tensor] = {}
        self.totals: dict[str, Tensor] = {}

    def hooked(self) -> ExitStack:
        hooks = ExitStack()
        for name, module in self._modules.items():
            hooks.enter_context(module.register_forward_hook(partial(self._tap, name)))
        return hooks

    def _tap(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if inputs[0].shape[:-1] != self._shape:  # DeBERTa's distances
            return output
        arguments = (output, self._anchor, inputs[0].detach(), partial(self._receive, name, self._chunk))
        tapped: Tensor = _Tap.apply(*arguments)  # type: ignore[no-untyped-call]
        return tapped

    def add_batch(self, model: SentenceTransformer, batch: _SampleBatch) -> Tensor:
        queries, documents = batch.queries, batch.documents
        chunks = (*queries.chunks, *documents.chunks)
        rows = _token_rows(queries, documents)
        end = sum(map(len, rows))  # where a row of zeros comes
        padded = pad_sequence(rows, batch_first=True, padding_value=end).to(model.device)
        self._token_rows = padded if _at_once(model.device) else rows
        self._real, self._received, self._chunks = [], {}, len(chunks)
        vectors = []
        for number, chunk in enumerate(chunks):
            self._chunk = number
            features = batch_to_device(dict(chunk), model.device)
            self._shape = features["attention_mask"].shape
            self._real.append(features["attention_mask"].flatten().nonzero().flatten())
            vectors.append(model(features)["sentence_embedding"])
        asked = torch.cat(vectors[: len(queries.chunks)])[queries.rows.to(model.device)]
        found = torch.cat(vectors[len(queries.chunks) :])[documents.rows.to(model.device)]
        losses = _own_losses(batch, asked, found)
        torch.autograd.backward(losses.sum())
        return losses.detach()

    def _receive(self, name: str, chunk: int, states: Tensor, gradient: Tensor) -> None:
        """Store the tensors of one chunk; after the last chunk of the batch, form the samples' gradients."""
        real = self._real[chunk]
        received = self._received.setdefault(name, {})
        received[chunk] = (states.flatten(0, -2)[real].float(), gradient.flatten(0, -2)[real].float())
        if len(received) == self._chunks:
            ordered = [received[number] for number in range(self._chunks)]
            self._add(name, *(torch.cat(tensors) for tensors in zip(*ordered, strict=True)))
            del self._received[name]

    def _add(self, name: str, states: Tensor, slopes: Tensor) -> None:
        if name not in self.squares:
            for sums in (self.squares, self.totals):
                sums[name] = torch.zeros(slopes.shape[1], states.shape[1], device=states.device)
        squares, totals = self.squares[name], self.totals[name]
        if isinstance(self._token_rows, list):
            for rows in self._token_rows:
                gradient = slopes[rows].T @ states[rows]
                squares.addcmul_(gradient, gradient)
                totals.add_(gradient)
            return
        states, slopes = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (states, slopes))
        for rows in torch.split(self._token_rows, max(1, _GPU_BYTES // (4 * squares.numel()))):
            gradients = torch.bmm(slopes[rows].transpose(1, 2), states[rows])
            totals.add_(gradients.sum(dim=0))
            squares.add_(gradients.square_().sum(dim=0))

    def check(self, losses: Tensor, where: str) -> None:
        sums = torch.stack([losses.sum(), *(total.sum() for total in self.squares.values())])
        if not bool(torch.isfinite(sums).all()):
            raise BadInput(f"loss or gradients of {where} are not finite; check the texts and the weights")


def _at_once(device: torch.device) -> bool:
    """Whether a batch's gradients are formed together; a CPU forms them one by one, in its cache."""
    return device.type != "cpu"


def _token_rows(queries: _Texts, documents: _Texts) -> list[Tensor]:
    """The rows of each sample's tokens among all real tokens of the chunks."""
    tokens = [chunk["attention_mask"].sum(dim=1) for texts in (queries, documents) for chunk in texts.chunks]
    owners = [texts.owners[torch.argsort(texts.rows)] for texts in (queries, documents)]
    by_token = torch.cat(owners).repeat_interleave(torch.cat(tokens))
    return [torch.nonzero(by_token == sample).flatten() for sample in range(len(queries.rows))]
