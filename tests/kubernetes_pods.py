"""What agents ask of the API of Kubernetes, answered over HTTP: the object of their own pod."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from helm_ground import NAMESPACE


class KubernetesPods:
    """The pods that there are."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pods: dict[str, dict[str, Any]] = {}

    def add(self, pod: str) -> None:
        self._pods[pod] = {"kind": "Pod", "metadata": {"name": pod}}

    def delete(self, pod: str, grace_s: float) -> None:
        ends = datetime.now(UTC) + timedelta(seconds=grace_s)
        self._pods[pod] = {"kind": "Pod", "metadata": {"name": pod, "deletionTimestamp": f"{ends:%Y-%m-%dT%H:%M:%SZ}"}}

    def forget(self, pod: str) -> None:
        self._pods.pop(pod, None)

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        found = self._pods.get(path.removeprefix(f"/api/v1/namespaces/{NAMESPACE}/pods/"))
        return (404, {"kind": "Status"}) if found is None else (200, found)


@contextlib.contextmanager
def kubernetes_pods(host: str) -> Iterator[KubernetesPods]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, value = pods.answer(self.path)
            raw = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((host, 0), Handler)
    pods = KubernetesPods(f"http://{host}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield pods
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
