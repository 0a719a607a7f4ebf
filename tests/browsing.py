"""A headless Chromium for tests of pages: whatever goes wrong in a page, or asks another server, fails the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 20_000


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip("no /usr/bin/chromium; tests/browser/install.sh installs it where it may")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield running
        running.close()


@contextlib.contextmanager
def signed_in(
    browser: Browser, url: str, link: str, patience_ms: float = PATIENCE_MS, **options: Any
) -> Iterator[Page]:
    """A page of the server at `url`, after its sign-in `link`. `options` are of the browser's context."""
    context = browser.new_context(**{"viewport": {"width": 1180, "height": 900}, **options})
    context.set_default_timeout(patience_ms)
    expect.set_options(timeout=patience_ms)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(url) else wrong.append(request.url))
    page.goto(link)
    page.get_by_role("button", name="Sign in").press("Enter")
    page.wait_for_url(lambda where: "/login" not in where)
    yield page
    context.close()
    assert wrong == []
