"""Raylets of drills stand in networks of their own, which can be parted; without the right to make any they share one,
and nobody parts them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import networks
import pytest
from faults import ray_ground
from faults.drills import Kind
from faults.ray_ground import RayGround
from faults.stores import STORE, Stores
from networks import Network, inside

from shoal.local_shoal import LocalShoal

WHY_NOT = networks.missing()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "networks can be made")
def test_who_is_parted_hears_only_who_is_parted_too() -> None:
    with Network("abc") as network, Network("abc") as other, contextlib.ExitStack() as closing:
        assert network.address != other.address
        with inside(network.namespace("a")):
            listening = closing.enter_context(socket.create_server((network.host("a"), 0)))
        hearing = listening.getsockname()
        assert all(reach(hearing, network.namespace(name)) for name in "bc") and reach(hearing)
        assert not reach(hearing, other.namespace("b"))
        network.part("a", "b")
        assert reach(hearing, network.namespace("b"))
        assert not reach(hearing, network.namespace("c")) and not reach(hearing)
        network.mend("a", "b")
        assert all(reach(hearing, network.namespace(name)) for name in "bc") and reach(hearing)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "networks can be made")
def test_who_is_parted_beside_the_store_hears_that_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which grounds and stores change for good
    stores = Stores(tmp_path)
    with Network(("a", "b", "c", STORE)) as network, contextlib.ExitStack() as closing:
        closing.callback(stores.close)
        url = urlsplit(stores.stand_in(network)["AWS_ENDPOINT_URL_S3"])
        store, head = (str(url.hostname), int(url.port or 0)), (network.address, int(url.port or 0))
        with inside(network.namespace("a")):
            listening = closing.enter_context(socket.create_server((network.host("a"), 0)))
        hearing = listening.getsockname()
        network.part_beside(STORE, "a", "b")
        assert reach(hearing, network.namespace("b"))
        assert not reach(hearing, network.namespace("c")) and not reach(hearing)
        assert not reach(head, network.namespace("a")) and reach(head, network.namespace("c"))
        assert all(answers(store, network.namespace(name)) for name in "abc") and answers(store)
        network.mend("a", "b")
        assert reach(hearing, network.namespace("c")) and reach(hearing) and reach(head, network.namespace("a"))


def answers(address: tuple[str, int], namespace: str | None = None) -> bool:
    """Whether the object store says anything there."""
    with (
        contextlib.nullcontext() if namespace is None else inside(namespace),
        socket.create_connection(address, 5.0) as asked,
    ):
        asked.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return asked.recv(5) == b"HTTP/"


def reach(address: tuple[str, int], namespace: str | None = None) -> bool:
    """From there, or else from where this process stands."""
    with contextlib.nullcontext() if namespace is None else inside(namespace), contextlib.suppress(OSError):
        socket.create_connection(address, 1.0).close()
        return True
    return False


def test_without_networks_raylets_share_one_and_none_is_parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[LocalShoal] = []
    monkeypatch.setattr(networks, "missing", lambda: "only root makes network namespaces")
    monkeypatch.setattr(LocalShoal, "__enter__", lambda shoal: started.append(shoal))
    monkeypatch.setattr(ray_ground, "Disks", lambda _: SimpleNamespace(missing="no disk"))
    monkeypatch.setattr(ray_ground, "Running", lambda *_: None)
    monkeypatch.setattr(ray_ground.worker_hook, "environment", dict)
    nothing: Any = None
    missing: Mapping[Kind, str] = RayGround(tmp_path, nothing).missing
    assert [type(each) for each in started] == [LocalShoal]
    assert missing == {
        Kind.DISK_FULL: "no disk",
        Kind.DISK_HUNG: "no disk",
        Kind.PARTITION: "only root makes network namespaces",
        Kind.PARTITION_STORE: "only root makes network namespaces",
    }
