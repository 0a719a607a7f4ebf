"""Spans on their way out, by OTLP over HTTP. The only file that knows OpenTelemetry's libraries, which read its own
variables of the environment (OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES and others)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from shoal_service.recovery_spans import Span

_TIMEOUT_S = 10.0


class OtlpExport:
    """`send` blocks: call it in a thread. `endpoint` is the whole URL that spans are posted to."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._resource = Resource.create({"service.name": "shoal", "service.version": version("shoal")})
        self._scope = InstrumentationScope("shoal", version("shoal"))

    def send(self, spans: Sequence[Span]) -> bool:
        """Whether the receiver took them."""
        found = self._exporter.export([self._readable(span) for span in spans])
        return found is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> ReadableSpan:
        parent = None if span.parent_id is None else _context(span.trace_id, span.parent_id)
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=dict(span.attributes),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
