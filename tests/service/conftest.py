"""The control plane for tests: served from a thread of this process (`api`), or a process of its own (`plane`)."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import structlog
import uvicorn
from control_plane import Connector, ControlPlane, control_plane
from fastapi import FastAPI
from postgres import RunningPostgres, start_postgres
from servers import free_ports
from starlette.routing import BaseRoute

from shoal_service.app import create_app
from shoal_service.database import Database
from shoal_service.settings import Settings

_ON_BOTH = {"journal", "migrating", "once", "races", "replicas", "takeover"}  # where the two differ most


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test that runs on either kind of database does so on one of them, half on each, and on the other one where
    there is time."""
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        params = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
        if params and "database_url" in params and item.path.stem.removeprefix("test_service_") not in _ON_BOTH:
            words = re.split(r"[\[\]-]", item.nodeid)
            alike.setdefault("-".join(word for word in words if word != params["database_url"]), []).append(item)
    for name, both in alike.items():
        if len(both) == 2:
            both[zlib.crc32(name.encode()) % 2].add_marker(pytest.mark.long(seconds=10))


@pytest.fixture(scope="session", autouse=True)
def lines_to_logging() -> None:
    """As in a server: what it tells goes to `logging`, and standard output is the commands' alone."""
    structlog.configure(wrapper_class=structlog.stdlib.BoundLogger, logger_factory=structlog.stdlib.LoggerFactory())


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Servers and commands send lines to the standard error of their process, which outlives them where it is ours."""
    root, configured = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**configured)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind: who asks for it, or for `app` or `api`, runs on both."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "shoal.db")
        return f"sqlite:///{tmp_path / 'shoal.db'}"
    server: RunningPostgres = request.getfixturevalue("postgres")
    return server.new_database(request.getfixturevalue("migrated"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[RunningPostgres]:
    server = start_postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def migrated(postgres: RunningPostgres) -> str:
    """The name of a database with all tables, of which others are copies."""
    url = postgres.new_database()
    _migrate(url)
    return url.rpartition("/")[2]


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of SQLite."""
    path = tmp_path_factory.mktemp("migrated") / "shoal.db"
    _migrate(f"sqlite:///{path}")
    return path


def _migrate(url: str) -> None:
    async def migrate() -> None:
        database = Database(url)
        await database.migrate()
        await database.close()

    asyncio.run(migrate())


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path, database_url: str) -> Settings:
    """A test may set more of them, as its (indirect) parameter."""
    given = {"data_dir": tmp_path / "data", "database_url": database_url, "poll_s": 0.1}
    more = getattr(request, "param", {})
    return Settings(**{**given, "plan_time_limit_s": 3, "file_roots": "/", **more})


@pytest.fixture(scope="session")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[BaseRoute]:
    """Every application has the same ones, and to work out what they take and answer costs it a tenth of a second."""
    return create_app(Settings(data_dir=tmp_path_factory.mktemp("routes"))).router.routes


@pytest.fixture
def app(settings: Settings, routes: list[BaseRoute]) -> FastAPI:
    made = create_app(settings)
    assert len(made.router.routes) == len(routes)
    made.router.routes = routes
    return made


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
