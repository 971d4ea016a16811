"""Figures for Prometheus, one registry per server. No text and no key ever is a label."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trundle.serve.batching import Batcher

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TEXTS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class Metrics:
    """What a server counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "trundle_requests", "Answers by route and status.", ("route", "status"), registry=self._registry
        )
        self.seconds = Histogram(
            "trundle_request_seconds",
            "From the request's head to the answer's end.",
            ("route",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self.texts = Counter(
            "trundle_texts", "Texts embedded, by model and role.", ("model", "role"), registry=self._registry
        )
        self.tokens = Counter("trundle_tokens", "Tokens read, by model.", ("model",), registry=self._registry)
        self._batch_texts = Histogram(
            "trundle_batch_texts", "Texts run together.", ("model",), buckets=TEXTS, registry=self._registry
        )
        self._batch_seconds = Histogram(
            "trundle_batch_seconds",
            "Time to tokenise and run a batch.",
            ("model",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self._waiting = Gauge(
            "trundle_waiting_texts", "Texts waiting for a worker.", ("model",), registry=self._registry
        )

    def watch_batches(self, model: str) -> Callable[[int, float], None]:
        """What a model's batcher tells of each batch."""
        texts, seconds = self._batch_texts.labels(model), self._batch_seconds.labels(model)

        def watch(count: int, took: float) -> None:
            texts.observe(count)
            seconds.observe(took)

        return watch

    def watch_waiting(self, model: str, batcher: Batcher) -> None:
        """Look at how many texts wait whenever somebody asks."""
        self._waiting.labels(model).set_function(lambda: batcher.waiting)

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self._registry)
