"""Traces: one tree of spans for each recovery, as a receiver of OTLP over HTTP gets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, control_plane, job_mapping, ok, start_control_plane, story
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from waiting import eventually

from shoal_recovery.journal import RecoveryDone, entry_to_mapping
from shoal_service.recovery_spans import Traced, spans_of

JOB = Traced(job_id="job_1", project="default", name="tiny")


class Collector:
    """Parses what it is sent, and answers with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.status = status
        self.refused = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/x-protobuf"
                outer.paths.append(self.path)
                if outer.status == 200:
                    outer.requests.append(ExportTraceServiceRequest.FromString(body))
                else:
                    outer.refused += 1
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(outer.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def test_a_tree_has_the_times_of_the_journal() -> None:
    entry = next(
        each for each in story(job_mapping(), started_at_s=1.7e9).entries if isinstance(each.event, RecoveryDone)
    )
    payload = entry_to_mapping(entry)
    spans = spans_of(JOB, entry.seq, entry.at_s, payload)
    root, *parts = spans
    assert [span.name for span in spans] == ["recovery", "detect", "decide", "restore", "rebuild", "resume"]
    assert root.end_ns == round(entry.at_s * 1e9) and root.end_ns - root.start_ns == 487_000_000
    assert (parts[0].start_ns, parts[-1].end_ns) == (root.start_ns, root.end_ns)
    assert all(left.end_ns == right.start_ns for left, right in pairwise(parts))
    assert [span.end_ns - span.start_ns for span in parts[:4]] == [62_000_000, 48_000_000, 131_000_000, 204_000_000]
    assert {span.trace_id for span in spans} == {root.trace_id} and {span.parent_id for span in parts} == {root.span_id}
    assert len({span.span_id for span in spans}) == 6
    assert spans == spans_of(JOB, entry.seq, entry.at_s, payload), "whoever makes it anew makes the same"
    assert root.trace_id != spans_of(JOB, entry.seq + 1, entry.at_s, payload)[0].trace_id
    # Ranks that restore side by side may together claim more than there was.
    short = spans_of(JOB, 1, 100.0, payload | {"restore_s": 9.0})
    assert max(span.end_ns for span in short) == 100_000_000_000
    assert all(span.start_ns <= span.end_ns for span in short)


def begin(api: httpx.Client) -> tuple[str, list[Any]]:
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(Connector(http=api).renew())
    entries = story(job_mapping(), started_at_s=time.time() - 60).entries
    ok(Connector(http=api).send(job_id, entries))
    return job_id, [each for each in entries if isinstance(each.event, RecoveryDone)]


def test_each_recovery_arrives_once(tmp_path: Path, collector: Collector) -> None:
    with control_plane(tmp_path / "data", otlp_endpoint=f"{collector.url}/v1/traces") as plane:
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as api:
            job_id, done = begin(api)
            eventually(lambda: len(collector.spans()) == 12)
            first, second = [span for span in collector.spans() if span.name == "recovery"]
            told = attributes(first)
            assert told["shoal.job.id"] == job_id and told["shoal.recovery.cause"] == "node_lost"
            assert told["shoal.recovery.nodes_lost"] == ["spot-1"] and told["shoal.recovery.redone_steps"] == 1
            assert first.end_time_unix_nano == round(done[0].at_s * 1e9)
            assert attributes(second)["shoal.recovery.nodes_joined"] == ["spot-1"]
            restore = next(span for span in collector.spans() if span.name == "restore")
            assert attributes(restore)["shoal.restored_bytes.peer"] == 12_900_000
            assert restore.parent_span_id == first.span_id and restore.trace_id == first.trace_id
            resource = {
                each.key: each.value.string_value
                for each in collector.requests[0].resource_spans[0].resource.attributes
            }
            assert resource["service.name"] == "shoal"
            other, _ = begin(api)
            eventually(lambda: len(collector.spans()) == 24)
            assert {attributes(s)["shoal.job.id"] for s in collector.spans() if s.name == "recovery"} == {job_id, other}


def test_a_receiver_that_is_away_gets_them_later(tmp_path: Path, collector: Collector) -> None:
    """Also from the process that comes after a kill, and by the variable that all programs know."""
    collector.status = 400
    given = {"otlp_endpoint": f"{collector.url}/v1/traces"}
    plane = start_control_plane(tmp_path / "data", **given)
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as api:
        begin(api)
        eventually(lambda: collector.refused)
    plane.kill()
    collector.status = 200
    plane = start_control_plane(tmp_path / "data", int(plane.url.rpartition(":")[2]), **given)
    try:
        eventually(lambda: len(collector.spans()) == 12, 90)
    finally:
        plane.stop()
    assert set(collector.paths) == {"/v1/traces"}


def test_two_replicas_send_one_tree(
    postgres: Any, migrated: str, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    given = {"database_url": postgres.new_database(migrated)}
    with control_plane(tmp_path / "one", **given) as one:
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / "admin.token").write_text(one.token)
        with control_plane(tmp_path / "two", **given):
            with httpx.Client(base_url=one.url, headers=one.headers, timeout=30) as api:
                for _ in range(5):
                    begin(api)
            eventually(lambda: len(collector.spans()) >= 60)
            assert len({(span.trace_id, span.span_id) for span in collector.spans()}) == 60 == len(collector.spans())
