"""The control plane for tests: served from a thread of this process (`api`), or a process of its own (`plane`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from control_plane import Connector, ControlPlane, control_plane
from fastapi import FastAPI
from servers import free_ports

from shoal_service.app import create_app
from shoal_service.settings import Settings


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return create_app(Settings(data_dir=tmp_path / "data", poll_s=0.1, plan_time_limit_s=3, file_roots="/"))


@pytest.fixture
def api(app: FastAPI, tmp_path: Path, eventually: Callable[..., object]) -> Iterator[httpx.Client]:
    """Signed in as the administrator."""
    token = (tmp_path / "data" / "admin.token").read_text().strip()
    port = free_ports(1)[0]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, 10)
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30) as client:
            yield client
    finally:
        app.state.services.bell.close()
        server.should_exit = True
        thread.join(timeout=10)


@pytest.fixture
def connector(api: httpx.Client) -> Connector:
    return Connector(http=api)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.fixture(scope="module")
def http(plane: ControlPlane) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as client:
        yield client
