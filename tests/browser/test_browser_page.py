"""The status page in a real browser: shows what happened, follows what happens, asks nobody else for anything."""

from __future__ import annotations

import time

import httpx
import pytest
from control_plane import Connector, ControlPlane, job_mapping, ok, story
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def begin(http: httpx.Client, name: str) -> tuple[str, Connector]:
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping(name=name)))["id"])
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    return job_id, connector


def check_stretch(page: Page) -> None:
    """Chosen by its steps, by dragging over it, and left again."""
    rows = page.locator("#curve-table tbody tr")
    page.locator("#curve-from").fill("11")
    page.locator("#curve-to").fill("19")
    page.locator("#curve-to").press("Enter")
    expect(page.locator("#curve")).to_have_attribute("data-points", "9")
    page.locator("#curve-to").fill("3")
    page.locator("#curve-to").press("Enter")
    assert page.locator("#curve-to").evaluate("box => box.validationMessage") == "the last step is below the first, 11"
    page.locator("#curve-whole").click()
    expect(page.locator("#curve")).to_have_attribute("data-points", "60")
    expect(page.locator("#curve-whole")).to_be_hidden()
    expect(rows).to_have_count(61)
    area = page.locator("#curve .u-over").bounding_box()
    assert area
    page.mouse.move(area["x"] + area["width"] / 4, area["y"] + 50)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] / 2, area["y"] + 50, steps=5)
    page.mouse.up()
    expect(page.locator("#curve-whole")).to_be_visible()
    expect(page.locator("#curve-from")).to_have_value("16")
    expect(page.locator("#curve-to")).to_have_value("30")
    expect(page.locator("#curve")).to_have_attribute("data-points", "15")
    page.locator("#curve .u-over").dblclick()
    expect(page.locator("#curve")).to_have_attribute("data-points", "60")
    expect(page.locator("#curve-from")).to_have_value("")


def check_point(page: Page) -> None:
    """A click on the curve, and a row of its table, lead to a step."""
    area = page.locator("#curve .u-over")
    expect(page.locator("#curve")).to_have_attribute("data-points", "60")
    expect(page.locator("#curve-step")).to_be_hidden()
    area.click(position={"x": area.evaluate("box => box.clientWidth") / 2, "y": 50})
    expect(page.locator("#curve-step")).to_contain_text("Step 30, attempt")
    page.locator("#curve-details").evaluate("details => { details.open = true }")
    expect(page.locator("#curve-table tbody a").first).to_have_attribute("href", "?step=60#part-step")
    page.locator("#curve-step a").click()
    expect(page.locator("#step-number")).to_have_value("30")
    expect(page.locator("#part-step")).to_be_in_viewport()


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
    expect(page.locator("#part-recoveries")).to_contain_text("R1: node lost")
    expect(page.locator("#part-recoveries")).to_contain_text("peer 12.9 MB")
    expect(page.locator("#part-recoveries .waterfall").first).to_contain_text("131 ms")
    expect(page.locator("#curve-notes")).to_contain_text("Continuous")
    expect(page.locator("#part-timeline svg.timeline .event-lost")).to_have_count(1)
    expect(page.locator("#part-plan svg.map rect.box")).to_have_count(4)
    expect(page.locator("#curve")).to_have_attribute("data-markers", "1")

    page.locator("#curve-to").fill("9")
    page.locator("#curve-to").press("Enter")
    expect(page.locator("#curve")).to_have_attribute("data-points", "9")
    ok(connector.send(job_id, told))
    expect(page.locator("#part-head .chip")).to_contain_text("succeeded")
    expect(page.locator("#curve")).to_have_attribute("data-points", "9")
    expect(page.locator("#curve")).to_have_attribute("data-evaluations", "0")
    page.locator("#curve-whole").click()
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
    check_stretch(page)
    page.locator("#curve-over").select_option("at")
    page.locator("#curve-figure").select_option("tokens_per_s")
    expect(page.locator("#curve canvas")).to_be_visible()
    page.get_by_role("link", name="epoch 2, before").click()
    expect(page.locator("#part-plan")).to_contain_text("not the current plan")
    assert page.url.endswith("?epoch=2#part-plan")
    page.locator("#plan-slider").fill("1")
    expect(page.locator("#part-plan")).to_contain_text("Plan 1 of 3")
    page.reload()
    expect(page.locator("#part-plan")).to_contain_text("Plan 1 of 3")
    expect(page.locator("#part-plan")).not_to_contain_text("What changed")
    check_point(page)


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
    for words in (
        'heading "read aloud"',
        "Plan map; the same as a table below",
        "Phases of recovery 1, one after the other",
        "succeeded",
    ):
        assert words in tree, words
    page.goto(f"{plane.url}/nodes")
    expect(page.locator("main")).to_contain_text("spot-1")
    # Nothing may stick out of a narrow window but what scrolls by itself.
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(f"{plane.url}/jobs/{job_id}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
