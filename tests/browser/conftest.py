"""A control plane in a process of its own, and a browser that is signed in to it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from browsing import chromium, signed_in
from control_plane import ControlPlane, control_plane, ok
from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def http(plane: ControlPlane) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=60) as client:
        yield client


@pytest.fixture
def page(browser: Browser, plane: ControlPlane, http: httpx.Client) -> Iterator[Page]:
    with signed_in(browser, plane.url, ok(http.post("/v1/login-links"))["url"]) as opened:
        yield opened
