"""Metrics and traces say what happened."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import hybridc
from hybridc.errors import RemoteMissing, UsageError
from hybridc.runtime.metrics import Metrics, trace
from hybridc.runtime.remote_settings import RemoteSettings
from hybridc.runtime.remote_tensors import BUILD_BYTES
from hybridc.runtime.serving import Asked, Served, open_served
from tests.remote.http_server import HttpServer
from tests.remote.server import CRASH, Server

prometheus = pytest.importorskip("prometheus_client")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
api = pytest.importorskip("opentelemetry.trace")


@pytest.fixture
def server(hybrid):
    with Server(hybrid.repository) as running:
        yield running


def load(hybrid, server, **changes):
    remote = RemoteSettings((server.address,), probe_seconds=1e9, **changes)
    return hybridc.load(hybrid.bundle, remote=remote)


def recorder():
    """What keeps the spans that a provider makes, and the provider."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, provider


def on_the_server(model) -> None:
    model.probe()
    model._chooser.current = next(p for p in model.manifest.plans if p.name == "cut1")


def test_metrics_count_what_happened(hybrid, server):
    registry = prometheus.CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"hybridc_{name}", {"model": "camera", **labels})

    with load(hybrid, server) as model:
        Metrics(registry).watch(model, "camera")
        for fault in (None, CRASH, None):
            on_the_server(model)
            server.fault = fault
            model(x=hybrid.x)
            server.fault = None
        (plan,) = [plan for plan in model.manifest.plans if plan.name == "cut1"]
        part = next(part.name for part in plan.parts if part.remote)
        assert value("run_seconds_count", plan="cut1") == 2
        assert value("run_seconds_count", plan="local") == 1
        assert value("fallbacks_total") == 1
        assert value("errors_total") == 0
        assert value("bytes_total", part=part) == 2 * (plan.bytes + BUILD_BYTES)
        total = value("run_seconds_sum", plan="cut1") + value("run_seconds_sum", plan="local")
        pieces = value("part_seconds_sum", part="here", where="edge")
        for where in ("network", "server"):
            assert value("part_seconds_count", part=part, where=where) == 2
            pieces += value("part_seconds_sum", part=part, where=where)
        assert 0 < pieces < total
        assert value("active") == 0
        assert value("connected") == 1
        assert value("plan", plan=model.status.plan) == 1
        assert sum(value("plan", plan=name) for name in ("local", "cut1")) == 1
        assert value("round_trip_seconds") == model.status.round_trip_seconds


def test_errors_are_counted(hybrid, server):
    registry = prometheus.CollectorRegistry()
    with load(hybrid, server, plan="cut1") as model:
        Metrics(registry).watch(model, "m")
        server.fault = CRASH
        with pytest.raises(RemoteMissing):
            model(x=hybrid.x)
        assert registry.get_sample_value("hybridc_errors_total", {"model": "m"}) == 1
        assert model.status.errors == 1
        assert model.status.active == 0


def test_two_models_share_metrics(hybrid, server):
    registry = prometheus.CollectorRegistry()
    metrics = Metrics(registry)
    with load(hybrid, server) as first, load(hybrid, server) as second:
        for model, name in ((first, "a"), (second, "b")):
            metrics.watch(model, name)
        first(x=hybrid.x)
        labels = ({"model": name, "plan": "local"} for name in "ab")
        counts = [registry.get_sample_value("hybridc_run_seconds_count", own) for own in labels]
        assert counts == [1, None]


def test_spans(hybrid, server):
    exporter, provider = recorder()
    tracer = provider.get_tracer("test")
    with load(hybrid, server, plan="cut1") as model:
        trace(model, tracer=tracer)
        with tracer.start_as_current_span("request") as parent:
            model(x=hybrid.x)
        server.fault = CRASH
        with pytest.raises(RemoteMissing):
            model(x=hybrid.x)
    good, _, bad = exporter.get_finished_spans()
    assert good.parent.span_id == parent.get_span_context().span_id
    assert good.attributes["hybridc.plan"] == "cut1"
    assert good.end_time > good.start_time >= parent.start_time
    assert "the model broke" in bad.attributes["hybridc.trouble"]
    assert not bad.status.is_ok


@pytest.mark.parametrize("kind", [Server, HttpServer])
def test_the_servers_spans_are_children(hybrid, kind, monkeypatch):
    exporter, provider = recorder()
    monkeypatch.setattr(api, "get_tracer", provider.get_tracer)  # as if it were the process's
    with kind(hybrid.repository) as server, load(hybrid, server, plan="cut1") as model:
        model(x=hybrid.x)  # before anything is traced
        trace(model)
        model(x=hybrid.x)
        there, here = exporter.get_finished_spans()
        assert (there.name, here.name) == ("hybridc.serve", "hybridc.run")
        assert there.parent.span_id == here.context.span_id
        assert there.context.trace_id == here.context.trace_id
        first, second = server.traceparents
        assert first is None
        ids = f"00-{here.context.trace_id:032x}-{here.context.span_id:016x}-"
        assert second.startswith(ids)


def test_each_request_of_a_batch_has_its_span(hybrid, monkeypatch):
    exporter, provider = recorder()
    monkeypatch.setattr(api, "get_tracer", provider.get_tracer)
    (folder,) = hybrid.repository.glob("*/1")
    served = Served(open_served(folder), batches=False)
    arrays = {s.name: np.zeros(s.shape, s.dtype) for s in served.inputs}
    parents = [f"00-{number:032x}-{number:016x}-01" for number in (1, 2)]
    asked = [Asked(arrays, served.build, {"traceparent": parent}) for parent in parents]
    answers = served.run([*asked, Asked(arrays, "0" * 64, asked[0].trace), Asked(arrays)])
    assert [isinstance(answer, str) for answer in answers] == [False, False, True, False]
    spans = exporter.get_finished_spans()
    assert [span.context.trace_id for span in spans] == [1, 2, 1]
    assert [span.status.is_ok for span in spans] == [True, True, False]
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert len(served.run(asked)) == 2  # without OpenTelemetry there are just no spans
    assert len(exporter.get_finished_spans()) == 3
    served.close()


def test_few_runs_are_sampled_but_all_failures(hybrid, server):
    spans = []

    class Tracer:
        def start_span(self, name, start_time):
            spans.append(name)
            return self

        def set_attributes(self, attributes):
            pass

        def set_status(self, *_):
            pass

        def end(self, end_time):
            pass

    with load(hybrid, server, plan="cut1") as model:
        trace(model, share=0.0, tracer=Tracer())
        model(x=hybrid.x)
        assert spans == []
        server.fault = CRASH
        with pytest.raises(RemoteMissing):
            model(x=hybrid.x)
        assert len(spans) == 1


def test_a_listener_that_fails_breaks_nothing(hybrid, server, caplog):
    with load(hybrid, server) as model:
        model.listen(lambda report: 1 / 0)
        assert hybrid.is_right(model(x=hybrid.x))
    assert "a listener failed" in caplog.text


def test_refusals(hybrid, server, monkeypatch):
    with hybridc.load(hybrid.bundle) as model, pytest.raises(UsageError, match="with a server"):
        trace(model)
    with load(hybrid, server) as model, pytest.raises(UsageError, match="between 0 and 1"):
        trace(model, share=2)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match="pip install"):
        Metrics()
