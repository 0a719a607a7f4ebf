"""Ports of embedded nodes are known before anybody listens on them, and nobody else is given them meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal_workers import local

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_port_is_idle_and_the_kernel_gives_it_to_nobody() -> None:
    first_given = int(GIVEN.read_text().split()[0])
    for port in {local._idle_port() for _ in range(20)}:
        assert local._FIRST_PORT <= port < first_given
        with socket.socket() as listener:
            listener.bind(("", port))


@pytest.mark.parametrize("first", [10**6, 65_000])
def test_where_the_kernel_gives_all_ports_one_of_these_is_taken(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(local, "_FIRST_PORT", first)
    assert local._idle_port() >= 1024
