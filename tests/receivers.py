"""Receivers of webhooks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """An HTTP server that keeps what it is told, and answers as a test wants it to."""

    def __init__(self, port: int = 0) -> None:
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self.status = 204
        self.answers = threading.Event()
        self.answers.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.heard.append(({name.lower(): value for name, value in self.headers.items()}, body))
                outer.answers.wait()
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.heard]

    def types(self) -> list[str]:
        return sorted(each["type"] for each in self.told())


@contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    found = Receiver(port)
    try:
        yield found
    finally:
        found.close()
