"""The status page in a real browser: shows what happened, follows what happens, asks nobody else for anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from control_plane import Connector, ControlPlane, control_plane, job_mapping, ok, story
from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = pytest.mark.browser
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip("no /usr/bin/chromium; tests/browser/install.sh installs it where it may")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield running
        running.close()


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
    """Signed in. Whatever goes wrong in the page, or asks another server, fails the test."""
    context = browser.new_context(viewport={"width": 1180, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    opened.on("request", lambda request: None if request.url.startswith(plane.url) else wrong.append(request.url))
    opened.goto(ok(http.post("/v1/login-links"))["url"])
    yield opened
    context.close()
    assert wrong == []


def begin(http: httpx.Client, name: str) -> tuple[str, Connector]:
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping(name=name)))["id"])
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    return job_id, connector


def test_a_page_follows_its_job_without_reload(page: Page, http: httpx.Client, plane: ControlPlane) -> None:
    job_id, connector = begin(http, "followed")
    told = story(job_mapping(), started_at_s=time.time()).entries
    page.goto(plane.url)
    page.get_by_role("link", name="followed").click()
    expect(page.locator("#part-head .chip")).to_contain_text("queued")
    page.evaluate("window.stays = true")

    ok(connector.send(job_id, told[:12]))
    expect(page.locator("#part-head .chip")).to_contain_text("running")
    expect(page.locator("#part-head")).to_contain_text("of 60")
    expect(page.locator("#part-plan svg.map rect.box")).to_have_count(5)
    expect(page.locator("#part-plan")).to_contain_text("embedding + layers 0-6")
    expect(page.locator("#part-cost")).to_contain_text("$15.00 for 4 nodes")
    expect(page.locator("#curve canvas")).to_be_visible()

    ok(connector.send(job_id, told[:30]))
    expect(page.locator("#part-timeline")).to_contain_text("R1: node lost")
    expect(page.locator("#part-timeline")).to_contain_text("peer 12.9 MB")
    expect(page.locator("#part-timeline svg.timeline .event-lost")).to_have_count(1)
    expect(page.locator("#part-plan svg.map rect.box")).to_have_count(4)
    expect(page.locator("#curve")).to_have_attribute("data-markers", "1")

    ok(connector.send(job_id, told))
    expect(page.locator("#part-head .chip")).to_contain_text("succeeded")
    expect(page.locator("#curve")).to_have_attribute("data-points", "60")
    expect(page.locator("#curve")).to_have_attribute("data-markers", "2")
    expect(page.locator("#curve")).to_have_attribute("data-evaluations", "1")
    expect(page.locator("#part-head")).to_contain_text("perplexity 9.4877, step 60")
    expect(page.locator("#live")).to_have_text("ended")
    expect(page.locator("#part-cost")).to_contain_text("no nodes")
    assert page.evaluate("window.stays")

    page.locator("#curve-details summary").click()
    expect(page.locator("#curve-table tbody tr")).to_have_count(61)
    expect(page.locator("#curve-table")).to_contain_text("rolled back")
    expect(page.locator("#curve-table")).to_contain_text("2.2500")
    page.get_by_role("link", name="epoch 2").click()
    expect(page.locator("#part-plan")).to_contain_text("not the current plan")


def test_the_plan_opens_as_a_picture(page: Page, http: httpx.Client, plane: ControlPlane) -> None:
    job_id, connector = begin(http, "drawn")
    ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time()).entries))
    page.goto(f"{plane.url}/jobs/{job_id}")
    page.get_by_role("link", name="This plan as a picture").click()
    page.wait_for_url("**/plan.svg?epoch=3")
    expect(page.locator("svg text.title")).to_contain_text("2 pipelines")
    # Its own style holds, so the policy lets it; and nothing sticks out of the boxes that it is in.
    assert page.evaluate("getComputedStyle(document.querySelector('.title')).fontWeight") == "700"
    assert page.evaluate("""[...document.querySelectorAll('rect.box[rx="5"]')].every(box => {
        const room = box.getBoundingClientRect()
        return [...box.parentNode.querySelectorAll('text')].every(text => {
            const place = text.getBoundingClientRect()
            return place.left >= room.left && place.right <= room.right && place.bottom <= room.bottom
        })
    })""")


def test_cancelling_from_the_page(page: Page, http: httpx.Client, plane: ControlPlane) -> None:
    job_id, connector = begin(http, "cancelled from the page")
    ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time()).entries[:6]))
    page.goto(f"{plane.url}/jobs/{job_id}")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel job").click()
    expect(page.locator("#part-head .chip")).to_contain_text("cancelling")
    assert ok(http.get(f"/v1/jobs/{job_id}"))["wish"] == "cancelled"


def test_the_page_can_be_read_by_machines(page: Page, http: httpx.Client, plane: ControlPlane) -> None:
    job_id, connector = begin(http, "read aloud")
    ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time()).entries))
    page.goto(f"{plane.url}/jobs/{job_id}")
    tree = page.locator("main").aria_snapshot()
    for words in ('heading "read aloud"', "Plan map; the same as a table below", "Phases of recovery 1", "succeeded"):
        assert words in tree, words
    page.goto(f"{plane.url}/nodes")
    expect(page.locator("main")).to_contain_text("spot-1")
    # Nothing may stick out of a narrow window but what scrolls by itself.
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(f"{plane.url}/jobs/{job_id}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
