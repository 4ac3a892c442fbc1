"""Metrics of models with a server for Prometheus, and traces of their runs for OpenTelemetry.

    from prometheus_client import start_http_server
    from hybridc.runtime.metrics import Metrics, trace

    start_http_server(9000)
    Metrics().watch(model, "camera")
    trace(model, share=0.01)

Each needs its package: ``pip install 'hybridc[metrics,tracing]'``. The server's end has metrics of
its own: Triton's, with the time that requests wait and compute, and how many ran together.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

from hybridc.errors import UsageError
from hybridc.runtime.loader import Model
from hybridc.runtime.remote import HybridModel
from hybridc.runtime.remote_report import Listener, RequestReport, RunReport

_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Upper ends of the histograms' buckets."""

_Tracer: TypeAlias = Any


class Metrics:
    """The metrics of all models that it watches.

    Args:
        registry: Where they are registered; prometheus_client's own if it is not given.

    Raises:
        UsageError: prometheus_client is not installed.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise UsageError(
                "metrics need prometheus_client; run: pip install 'hybridc[metrics]'"
            ) from error
        own = {"registry": prometheus.REGISTRY if registry is None else registry}
        times = {**own, "buckets": _SECONDS}
        histogram, counter, gauge = prometheus.Histogram, prometheus.Counter, prometheus.Gauge
        self._runs = histogram("hybridc_run_seconds", "Time of a call.", ("model", "plan"), **times)
        self._parts = histogram(
            "hybridc_part_seconds",
            "Time of the parts here, and of each request: on the network and on the server.",
            ("model", "part", "where"),
            **times,
        )
        self._bytes = counter("hybridc_bytes", "Bytes sent and received.", ("model", "part"), **own)
        text = "Results of the local plan, as the server failed."
        self._fallbacks = counter("hybridc_fallbacks", text, ("model",), **own)
        self._errors = counter("hybridc_errors", "Calls without a result.", ("model",), **own)
        self._plan = gauge("hybridc_plan", "1 for the plan that is next.", ("model", "plan"), **own)
        gauges = {
            "active": "Calls under way.",
            "connected": "Whether the server answered last.",
            "round_trip_seconds": "Measured time of a call without contents.",
            "bytes_per_second": "Measured bandwidth.",
            "switches": "How often another plan took over.",
        }
        self._states = {
            field: gauge(f"hybridc_{field}", text, ("model",), **own)
            for field, text in gauges.items()
        }

    def watch(self, model: Model, name: str) -> None:
        """Count the runs of a model from now on.

        Args:
            model: A model with a server.
            name: What it is called in the label ``model``.

        Raises:
            UsageError: The model was loaded without a server.
        """
        hybrid = _hybrid(model)

        def listen(report: RunReport) -> None:
            self._count(report, name)

        hybrid.listen(listen)
        self._fallbacks.labels(name)
        self._errors.labels(name)
        for field, gauge in self._states.items():
            gauge.labels(name).set_function(
                lambda field=field: float(getattr(hybrid.status, field))
            )
        for plan in hybrid.status.runs:
            self._plan.labels(name, plan).set_function(
                lambda plan=plan: float(hybrid.status.plan == plan)
            )

    def _count(self, report: RunReport, name: str) -> None:
        if report.is_error:
            self._errors.labels(name).inc()
            return
        self._runs.labels(name, report.plan).observe(report.seconds)
        self._parts.labels(name, "here", "edge").observe(report.edge_seconds)
        for request in report.requests:
            self._parts.labels(name, request.model, "network").observe(request.network_seconds)
            self._parts.labels(name, request.model, "server").observe(request.server_seconds)
            self._bytes.labels(name, request.model).inc(request.bytes)
        if report.is_fallback:
            self._fallbacks.labels(name).inc()


def trace(model: Model, share: float = 1.0, tracer: _Tracer = None) -> None:
    """Have a span made of each run of a model, with OpenTelemetry's API.

    A span is a child of the one that is current where the model is called. Its attributes are the
    plan, the times, the bytes of each request, and why the server failed. Requests of a run that
    was drawn carry its context, so that the server's spans are children of it.

    Args:
        model: A model with a server.
        share: Share of the runs that are traced, drawn at random; runs in which the server failed
            are traced always, on this end.
        tracer: OpenTelemetry's tracer; that of the provider that is set if it is not given.

    Raises:
        UsageError: OpenTelemetry is not installed, the share is not between 0 and 1, or the model
            was loaded without a server.
    """
    if not 0 <= share <= 1:
        raise UsageError(f"share is {share} and must be between 0 and 1")
    try:
        from opentelemetry import propagate
        from opentelemetry import trace as opentelemetry
    except ImportError as error:
        raise UsageError(
            "traces need OpenTelemetry; run: pip install 'hybridc[tracing]'"
        ) from error
    found = tracer or opentelemetry.get_tracer("hybridc")
    chance = random.Random()

    def begin() -> tuple[dict[str, str], Listener]:
        headers: dict[str, str] = {}
        span = found.start_span("hybridc.run") if chance.random() < share else None
        if span is not None:
            propagate.inject(headers, opentelemetry.set_span_in_context(span))

        def end(report: RunReport) -> None:
            own, start = span, report.start_nanoseconds
            if own is None and report.trouble:
                own = found.start_span("hybridc.run", start_time=start)
            if own is not None:
                _describe(own, report, opentelemetry.StatusCode.ERROR)
                own.end(end_time=start + round(report.seconds * 1e9))

        return headers, end

    _hybrid(model).accompany(begin)


def _describe(span: Any, report: RunReport, error: Any) -> None:
    attributes: dict[str, Any] = {
        "hybridc.plan": report.plan,
        "hybridc.edge_seconds": report.edge_seconds,
        "hybridc.fallback": report.is_fallback,
    }
    for request in report.requests:
        attributes |= _attributes(request)
    if report.trouble:
        attributes["hybridc.trouble"] = report.trouble
    span.set_attributes(attributes)
    if report.is_error:
        span.set_status(error, report.trouble)


def _attributes(request: RequestReport) -> dict[str, Any]:
    head = f"hybridc.request.{request.model}"
    return {
        f"{head}.bytes": request.bytes,
        f"{head}.network_seconds": request.network_seconds,
        f"{head}.server_seconds": request.server_seconds,
    }


def _hybrid(model: Model) -> HybridModel:
    if not isinstance(model, HybridModel):
        raise UsageError("only a model that was loaded with a server has metrics and traces")
    return model
