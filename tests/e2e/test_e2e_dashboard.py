"""The page as its user has it: a job written there runs on real raylets, and what befalls it is seen as it happens."""

from __future__ import annotations

import json
import re

import pytest
from browsing import chromium, signed_in
from playwright.sync_api import Dialog, Page, expect
from running import LIMIT_S, Running, job_mapping
from servers import new_place
from waiting import eventually

STEPS = 600
PATIENCE_MS = LIMIT_S * 1000


@pytest.mark.browser
@pytest.mark.timeout(900)
def test_a_job_is_written_watched_shaken_paused_and_cancelled_on_its_page(running: Running) -> None:
    link = running.client.login_link()["url"]
    with chromium() as browser, signed_in(browser, running.shoal.url, link, PATIENCE_MS) as page:
        page.on("dialog", Dialog.accept)
        job_id = _submitted(page, running)
        page.evaluate("window.stays = true")
        _drilled(page, running, job_id)
        assert page.evaluate("window.stays === undefined"), "a form leads to the page anew"
        page.evaluate("window.stays = true")
        _killed(page, running, job_id)
        assert page.evaluate("window.stays"), "it was reloaded"
        page.get_by_role("button", name="Checkpoint now").click()
        expect(page.locator("#part-checkpoints")).to_contain_text("stored whole")
        expect(page.locator("#part-checkpoints").get_by_role("link", name="New job from step").first).to_be_visible()
        page.get_by_role("button", name="Pause job").click()
        expect(page.locator("#part-head .chip").first).to_contain_text("paused")
        expect(page.locator("#part-checkpoints")).to_contain_text("stored whole")
        page.get_by_role("button", name="Resume job").click()
        expect(page.locator("#part-head .chip").first).to_contain_text("running")
        expect(page.locator("#part-recoveries")).to_contain_text("resumed")
        page.get_by_role("button", name="Cancel job").click()
        expect(page.locator("#part-head .chip").first).to_contain_text("cancelled")
        expect(page.locator("#live")).to_have_text("ended")
    assert running.client.get(job_id)["status"]["state"] == "cancelled"


def _submitted(page: Page, running: Running) -> str:
    page.get_by_role("link", name="New job").first.click()
    text = json.dumps(job_mapping(STEPS, uri=new_place(), every_steps=1000))
    page.get_by_label("The job, as YAML or JSON").fill(text)
    page.get_by_role("button", name="Plan and price").click()
    expect(page.locator("#preview")).to_contain_text("small-")
    page.get_by_role("button", name="Submit job").click()
    page.wait_for_url(re.compile("/jobs/job_"))
    job_id = page.url.rsplit("/", 1)[1]
    running.adopt(job_id)
    expect(page.locator("#part-head .chip").first).to_contain_text("running")
    expect(page.locator("#curve")).to_have_attribute("data-points", re.compile("[5-9]|[1-9][0-9]"))
    expect(page.locator("#part-plan svg.map rect.box").first).to_be_visible()
    return job_id


def _drilled(page: Page, running: Running, job_id: str) -> None:
    """It is told that it goes away, and the job leaves it with nothing to redo."""
    node = running.plan(job_id)["plan"]["pipelines"][-1]["stages"][0]["replicas"][0]["node"]
    page.get_by_label(f"Notice for {node} in seconds").fill("300")
    page.locator("#part-nodes tr", has_text=node).get_by_role("button", name="Preempt").click()
    expect(page.locator("#part-recoveries")).to_contain_text("R1: preemption notice")
    row = page.locator("#part-nodes tr", has_text=node)
    expect(row).to_contain_text("goes away")
    expect(row.locator(".countdown")).to_have_text(re.compile(r"in \d+ min \d+ s"))
    expect(page.locator("#recovery-1")).to_contain_text("0 redone, 0 lost")


def _killed(page: Page, running: Running, job_id: str) -> None:
    """Without any notice; the page shows how long each phase took and where bytes came from, as REST does."""
    nodes = {
        replica["node"]
        for pipeline in running.plan(job_id)["plan"]["pipelines"]
        for stage in pipeline["stages"]
        for replica in stage["replicas"]
    }
    running.kill(max(name for name in nodes if name.startswith("small")))
    card = page.locator("#recovery-2")
    expect(card).to_contain_text("node lost")
    told = eventually(lambda: running.client.recoveries(job_id)["items"][1:], LIMIT_S)[0]
    falls = card.locator(".waterfall tr")
    expect(falls.filter(has_text="detect")).to_contain_text(f"{told['detect_s'] * 1000:,.0f} ms")
    expect(falls.filter(has_text="first step")).to_have_count(1)
    expect(page.locator("#part-timeline .event-lost")).to_have_count(1)
    assert told["bytes"]["own"] + told["bytes"]["node"] + told["bytes"]["peer"] > 0
    for source in ("own", "node", "peer", "store"):
        expect(card.locator(".legend")).to_contain_text(source)
    expect(page.locator("#curve")).to_have_attribute("data-markers", "2")
    expect(page.locator("#part-losses .figure b")).to_have_text(re.compile(r"\d+"))
