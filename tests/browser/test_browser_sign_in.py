"""The page of a sign-in link: one button, for everybody who may be in front of it."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import PATIENCE_MS
from control_plane import ControlPlane, ok
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_a_link_leads_to_a_button_that_the_keyboard_presses(
    browser: Browser, plane: ControlPlane, http: httpx.Client, scheme: str, width: int
) -> None:
    link = ok(http.post("/v1/login-links"))["url"] + "&next=/nodes"
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 700})  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(link)
    expect(page.get_by_role("button", name="Sign in")).to_be_focused()
    assert page.get_by_role("textbox").count() == 0
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if "SHOAL_SHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["SHOAL_SHOTS"]) / f"sign-in-{scheme}-{width}.png")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{plane.url}/nodes")
    context.close()


def test_the_button_needs_no_scripts(browser: Browser, plane: ControlPlane, http: httpx.Client) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(ok(http.post("/v1/login-links"))["url"])
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{plane.url}/")
    context.close()
