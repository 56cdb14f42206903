"""`/metrics`: what Prometheus reads. Every application has a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.running import Deliver, Event, Running
from starquill.types import Delta, EngineOptions, EngineStats, GenerateRequest

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

router = APIRouter()


class Metrics:
    """What an application measures."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_Counts(engine))
        self._answers = Counter(
            "starquill_http_requests",
            "Requests by route and status.",
            ("method", "route", "status"),
            registry=registry,
        )
        self.first_token = Histogram(
            "starquill_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            buckets=_FIRST,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "starquill_time_between_tokens_seconds",
            "Between two tokens of one request.",
            buckets=_BETWEEN,
            registry=registry,
        )

    def answered(self, scope: Scope, status: int) -> None:
        # By the route's pattern: paths that somebody made up must not each become a series.
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if route != "none" else "any"
        self._answers.labels(method, route, str(status)).inc()


class _Counts:
    """The engine's own counts, read when Prometheus asks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        now = self._engine.stats()
        for name, about, value in (
            ("running", "Requests that are being worked on.", now.running),
            ("waiting", "Requests that wait for a slot.", now.waiting),
            ("cache_bytes", "Memory that keys and values may take.", now.cache_bytes),
            ("cache_bytes_used", "Memory that keys and values take.", now.cache_bytes_used),
        ):
            yield GaugeMetricFamily(f"starquill_{name}", about, value)
        for name, about, value in (
            ("prompt_tokens", "Tokens of prompts.", now.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were in the cache.", now.cached_tokens),
            ("generated_tokens", "Tokens written.", now.generated_tokens),
            ("proposed_tokens", "Tokens that prompt lookup guessed.", now.proposed_tokens),
            ("accepted_tokens", "Tokens that it guessed right.", now.accepted_tokens),
            ("steps", "Steps of the engine.", now.steps),
        ):
            yield CounterMetricFamily(f"starquill_{name}", about, value)


class MeasuredEngine:
    """The part of an engine that routes use, with its deltas timed on their way."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    @property
    def model(self) -> LoadedModel:
        return self._engine.model

    @property
    def options(self) -> EngineOptions:
        return self._engine.options

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def submit(self, request: GenerateRequest, deliver: Deliver) -> Running:
        last, times = time.perf_counter(), self._metrics.first_token

        def timed(event: Event) -> None:
            nonlocal last, times
            if isinstance(event, Delta) and event.token_id is not None:
                now = time.perf_counter()
                times.observe(now - last)
                last, times = now, self._metrics.between_tokens
            deliver(event)

        return self._engine.submit(request, timed)

    def abandon(self, running: Running) -> None:
        self._engine.abandon(running)


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    """Figures in Prometheus' text form."""
    registry = http.app.state.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
