"""What every page must do, on each of them, in light and dark, wide and narrow: no finding of axe, small, no wider than
the window; and the switches, the form and the filter that a reader uses."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import signed_in
from control_plane import Connector, ControlPlane, Story, job_mapping, ok, snapshot, story
from playwright.sync_api import Browser, Page, expect

from shoal_planner.job import parse_job
from shoal_recovery.journal import NodeNoticed

pytestmark = pytest.mark.browser
MOST_BYTES = 200_000


@pytest.fixture(scope="module")
def job_id(http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job in the middle of its life, of which everything is to be told."""
    connector = Connector(http=http)
    ok(connector.renew(lease_s=600, signs={"big-0": 0.04, "big-1": 0.03, "spot-0": 21.5}))
    job = job_mapping(name="eventful", checkpoint={"uri": tmp_path_factory.mktemp("store").as_uri()})
    created = str(ok(http.post("/v1/jobs", json=job))["id"])
    told = story(job, started_at_s=time.time() - 30)
    entries = told.entries[:-8]
    more = Story(job=parse_job(job), cluster=snapshot(), now_s=time.time(), entries=list(entries))
    more.add(NodeNoticed(node="spot-0", source="aws", why="terminate", lead_s=3500))
    ok(connector.send(created, more.entries))
    lost = next(entry for entry in entries if entry.event.kind == "node_lost")
    printed(http, created, [[1, lost.at_s, "warning", 1, 2, "peer closed its connection"]])
    ok(http.post("/v1/projects/default/members", json={"email": "some.one@example.org", "role": "viewer"}))
    return created


def printed(http: httpx.Client, job_id: str, rows: list[list[Any]]) -> None:
    source = {"node": "big-0", "life": "1", "lines": rows}
    body = {"cluster_id": "local", "holder": "connector-1", "sources": [source]}
    ok(http.post(f"/v1/jobs/{job_id}/logs", json=body))


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1400),
        ("dark", 420),
        pytest.param("dark", 1400, marks=pytest.mark.long),
        pytest.param("light", 420, marks=pytest.mark.long),
    ],
)
def test_no_page_has_a_finding(
    browser: Browser, plane: ControlPlane, http: httpx.Client, job_id: str, scheme: str, width: int
) -> None:
    link = ok(http.post("/v1/login-links"))["url"]
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    with signed_in(browser, plane.url, link, **options) as page:
        paths = (
            "/",
            f"/jobs/{job_id}",
            f"/jobs/{job_id}?epoch=2",
            f"/jobs/{job_id}?event=24&step=19",
            "/nodes",
            "/new",
        )
        for path in (*paths, "/projects", "/projects/default", "/tokens"):
            loaded = page.goto(plane.url + path)
            assert loaded is not None and loaded.ok
            if path == "/new":
                page.get_by_role("button", name="Plan and price").click()
                expect(page.locator("#preview h2")).to_be_visible()
            elif path != "/":
                page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            if path.startswith("/jobs"):
                expect(page.locator("#curve canvas")).to_be_visible()
            found = Axe().run(page)
            assert found.violations_count == 0, (path, found.generate_report())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            if "SHOAL_SHOTS" in os.environ:
                name = re.sub(r"[^a-z]+", "-", path.replace(job_id, "job").strip("/")) or "jobs"
                shot = Path(os.environ["SHOAL_SHOTS"]) / f"{name.strip('-')}-{scheme}-{width}.png"
                page.screenshot(path=shot, full_page=True)


def test_narrow_windows_show_what_matters(page: Page, plane: ControlPlane, job_id: str) -> None:
    """Without being moved sideways: rows of long tables stand one value below the other there, each with its name."""
    page.set_viewport_size({"width": 420, "height": 900})
    shown = {
        f"/jobs/{job_id}": ("#part-nodes .countdown", "#part-nodes .drill button", "#part-events td.told"),
        "/": ('#part-jobs td[data-name="Cost"]', "#part-jobs progress"),
        "/nodes": ('#part-nodes td[data-name="Works for"]', '#part-pools td[data-name="Interruptions"]'),
    }
    for path, places in shown.items():
        page.goto(plane.url + path)
        for place in places:
            box = page.locator(place).first.bounding_box()
            assert box is not None and box["width"] > 0 and box["x"] + box["width"] <= 420, (path, place, box)
    page.goto(f"{plane.url}/jobs/{job_id}")
    name = page.locator("#nodes-details tbody tr").first.locator("td").nth(5)
    assert "MFU" in name.evaluate("cell => getComputedStyle(cell, '::before').content")
    page.set_viewport_size({"width": 1180, "height": 900})
    assert name.evaluate("cell => getComputedStyle(cell, '::before').content") == "none"


def test_pages_are_small(page: Page, plane: ControlPlane, job_id: str) -> None:
    """With all that they load, as it crosses the network."""
    wire = page.context.new_cdp_session(page)
    wire.send("Network.enable")
    wire.send("Network.setCacheDisabled", {"cacheDisabled": True})
    crossed: list[float] = []
    wire.on("Network.loadingFinished", lambda said: crossed.append(said["encodedDataLength"]))
    for path in ("/", f"/jobs/{job_id}", "/nodes", "/new", "/projects", "/tokens"):
        crossed.clear()
        page.goto(plane.url + path, wait_until="load")
        assert len(crossed) > 4 and sum(crossed) < MOST_BYTES, (path, crossed)


def test_light_and_dark_and_clocks_are_the_readers_choice(page: Page, plane: ControlPlane, job_id: str) -> None:
    page.goto(f"{plane.url}/jobs/{job_id}")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    button = page.locator("#theme")
    expect(button).to_have_text("Auto")
    button.click()
    button.click()
    expect(button).to_have_text("Dark")
    assert page.evaluate(ground) != light
    page.reload()
    expect(page.locator("#theme")).to_have_text("Dark")
    assert page.evaluate(ground) != light
    expect(page.locator("#part-head time").first).to_contain_text("UTC")
    page.locator("#clock").click()
    expect(page.locator("#part-head time").first).not_to_contain_text("UTC")
    expect(page.locator("#part-head .ago").first).to_contain_text("ago")


def test_a_notice_counts_down(page: Page, plane: ControlPlane, job_id: str) -> None:
    page.goto(f"{plane.url}/jobs/{job_id}")
    row = page.locator("#part-nodes tr", has_text="spot-0")
    expect(row).to_contain_text("goes away")
    expect(row.locator(".countdown")).to_contain_text(re.compile(r"in \d+ min \d+ s"))
    before = row.locator(".countdown").inner_text()
    expect(row.locator(".countdown")).not_to_have_text(before)


def test_lines_are_followed_and_found_by_event(
    page: Page, plane: ControlPlane, http: httpx.Client, job_id: str
) -> None:
    page.goto(f"{plane.url}/jobs/{job_id}")
    page.get_by_role("link", name="lines printed around it").last.click()
    expect(page.locator("#part-logs")).to_contain_text("to 30 s after it")
    expect(page.locator("#log-lines tr")).to_have_count(1)
    assert "?event=" in page.url and page.url.endswith("#part-logs")
    page.reload()
    expect(page.locator("#log-lines tr")).to_contain_text("peer closed its connection")
    page.get_by_role("link", name="Newest lines").click()
    page.get_by_label("follow").check()
    printed(http, job_id, [[2, time.time(), "error", 3, 1, "<i>of another</i> rank"]])
    row = page.locator("#log-lines tr", has_text="<i>of another</i> rank")
    expect(row).to_contain_text("rank 1 big-0 error")
    page.get_by_label("Has").fill("CLOSED")
    page.get_by_label("Has").press("Enter")
    expect(row).to_have_count(0)
    expect(page.locator("#log-lines tr")).to_have_count(1)
    page.locator("#log-lines a").click()
    expect(page.locator("#line-1")).to_contain_text("peer closed")
    assert page.url.endswith("?line=1#line-1")


def test_a_step_and_an_event_have_links_that_stay(page: Page, plane: ControlPlane, job_id: str) -> None:
    page.goto(f"{plane.url}/jobs/{job_id}")
    part = page.locator("#part-step")
    part.get_by_role("spinbutton", name="Step").fill("19")
    part.get_by_role("spinbutton", name="Step").press("Enter")
    expect(part.locator("tbody tr")).to_have_count(1)
    assert page.url.endswith("?step=19#part-step")
    page.reload()
    expect(part.locator("tbody tr")).to_contain_text("counts")
    part.get_by_role("link", name="the one after").click()
    expect(part.locator("tbody tr")).to_have_count(2)
    expect(part).to_contain_text("rolled back")
    page.locator("#part-timeline a.event-lost").press("Enter")
    expect(page.locator("#part-events tr.chosen")).to_contain_text("spot-1: its connection closed")


def test_what_is_written_outlives_what_is_drawn_anew(page: Page, plane: ControlPlane, job_id: str) -> None:
    page.goto(f"{plane.url}/jobs/{job_id}")
    silent = page.locator("#part-nodes tr", has_text="spot-0").locator("td", has_text="silent")
    before = silent.inner_text()
    notice = page.get_by_label("Notice for big-0 in seconds")
    notice.fill("300")
    notice.blur()
    expect(silent).not_to_have_text(before)  # its age
    expect(notice).to_have_value("300")


def test_limits_are_changed_and_a_checkpoint_is_asked_for(
    page: Page, plane: ControlPlane, http: httpx.Client, job_id: str
) -> None:
    page.goto(f"{plane.url}/jobs/{job_id}")
    page.get_by_role("link", name="Resize").click()
    page.get_by_label("Most devices").fill("5")
    page.get_by_label("Budget in dollars").fill("1000")
    page.get_by_role("button", name="Change limits").click()
    expect(page.locator("#part-limits .figure")).to_contain_text("left of $1,000")
    expect(page.locator("#part-head")).to_contain_text("at most 5")
    assert ok(http.get(f"/v1/jobs/{job_id}"))["spec"]["limits"]["max_devices"] == 5
    page.get_by_role("button", name="Checkpoint now").click()
    page.wait_for_url("**#part-checkpoints")
    page.locator("#curve-figure").select_option("mfu")
    expect(page.locator("#curve canvas")).to_be_visible()


def test_a_token_is_made_and_revoked(page: Page, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/tokens")
    page.get_by_label("Name").fill("nightly")
    page.get_by_label("May").select_option("member in default")
    page.get_by_role("button", name="Make token").click()
    expect(page.locator("#secret")).to_have_text(re.compile(r"shoal_.{20,}"))
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Revoke nightly").click()
    expect(page.locator("tr", has_text="nightly")).to_contain_text("revoked")


def test_keys_alone_lead_everywhere(page: Page, plane: ControlPlane, job_id: str) -> None:
    page.goto(f"{plane.url}/jobs/{job_id}")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.url.endswith("#main")
    page.get_by_role("link", name="Goodput").first.focus()
    page.keyboard.press("Enter")
    assert page.url.endswith("#part-goodput")
    hour = page.get_by_role("link", name="last hour")
    hour.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#part-goodput [aria-current]")).to_have_text("last hour")
    assert page.url.endswith("?window=1h#part-goodput")


def test_a_job_is_planned_and_submitted_from_its_page(page: Page, plane: ControlPlane, http: httpx.Client) -> None:
    ok(Connector(http=http).renew(lease_s=600))
    page.goto(f"{plane.url}/new")
    text = page.get_by_label("The job, as YAML or JSON")
    text.fill("name: wrong\nmodel: {layers: 0}\n")
    page.get_by_role("button", name="Plan and price").click()
    expect(page.locator("#preview")).to_contain_text("This job would be refused")
    text.fill("name: [broken\n")
    page.get_by_role("button", name="Plan and price").click()
    expect(page.locator("#preview")).to_contain_text("is not valid YAML")
    text.fill(json.dumps(job_mapping(name="from the page")))
    page.get_by_role("button", name="Plan and price").click()
    expect(page.locator("#preview")).to_contain_text("an hour for all nodes")
    expect(page.locator("#preview")).to_contain_text("All 60 steps")
    before = {job["id"] for job in ok(http.get("/v1/jobs"))["items"]}
    page.get_by_role("button", name="Submit job").click()
    expect(page.locator("h1")).to_have_text("from the page")
    (created,) = {job["id"] for job in ok(http.get("/v1/jobs"))["items"]} - before
    assert page.url.endswith(created)
    page.get_by_role("link", name="Clone").click()
    page.wait_for_url("**/new?from=*")
    assert "name: from the page" in page.get_by_label("The job, as YAML or JSON").input_value()


def test_the_list_is_filtered(page: Page, plane: ControlPlane, http: httpx.Client, job_id: str) -> None:
    ok(http.post("/v1/jobs", json=job_mapping(name="another")))
    page.goto(plane.url)
    rows = page.locator("#part-jobs tbody tr")
    page.get_by_label("Name has").fill("EVENT")
    page.get_by_role("button", name="Show").click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("eventful")
    page.get_by_label("Name has").fill("")
    page.get_by_label("State").select_option("running")
    page.get_by_role("button", name="Show").click()
    expect(rows).to_have_count(1)
    assert job_id in rows.inner_text()
