"""Who is heard by agents and ranks: callers that know the cluster's key, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shoal_workers.greeting import use_key
from shoal_workers.wire import Connection, Server, connect

ASK = """
import sys
from shoal_workers.greeting import use_key
from shoal_workers.wire import ConnectionClosed, connect
use_key(bytes.fromhex(sys.argv[2]))
try:
    print(connect(("127.0.0.1", int(sys.argv[1]))).request({"question": 1}))
except ConnectionClosed:
    print("nobody answers")
"""


@pytest.fixture
def heard() -> Iterator[tuple[int, list[object]]]:
    """The port of a server of a cluster, and what was said to it."""
    said: list[object] = []

    def handle(connection: Connection) -> None:
        message, _ = connection.receive()
        said.append(message)
        connection.send({"answer": 2})

    use_key(b"k" * 32)
    server = Server("127.0.0.1", handle, "test")
    server.start()
    yield server.port, said
    server.close()
    use_key(b"")


def ask_from_elsewhere(port: int, key: bytes) -> str:
    command = [sys.executable, "-c", ASK, str(port), key.hex()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()


def test_a_process_of_the_cluster_is_heard(heard: tuple[int, list[object]]) -> None:
    port, said = heard
    connection = connect(("127.0.0.1", port))
    assert connection.request({"question": 0}) == {"answer": 2}
    connection.close()
    assert ask_from_elsewhere(port, b"k" * 32) == "{'answer': 2}"
    assert said == [{"question": 0}, {"question": 1}]


@pytest.mark.parametrize("key", [b"", b"j" * 32])
def test_a_process_of_another_cluster_is_not(heard: tuple[int, list[object]], key: bytes) -> None:
    port, said = heard
    assert ask_from_elsewhere(port, key) == "nobody answers"
    assert said == []


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 32, b"\0" * 500, b"\xff" * 12 + b"{}"])
def test_whoever_does_not_greet_is_not_heard(heard: tuple[int, list[object]], first: bytes) -> None:
    port, said = heard
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(first)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it closes before it has read all that was said
            assert stranger.recv(100) == b""
    assert said == []
