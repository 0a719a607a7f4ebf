"""Links that stay: to any entry of a job's journal and to any step, however long ago; from marks and tables to them."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import httpx
import pytest
from control_plane import Connector, Story, job_mapping, ok, story

from shoal_recovery.journal import NodeLost, NodeNoticed, StepDone
from shoal_service import views
from shoal_service.known_by import Known, Tellings
from shoal_service.panels_recovery import recoveries_panel
from shoal_service.timeline import Event, timeline

HTML = {"Accept": "text/html"}


@pytest.fixture
def told() -> Story:
    made = story(job_mapping(), started_at_s=time.time() - 60)
    made.entries.pop()  # it goes on
    return made


@pytest.fixture
def job_id(api: httpx.Client, connector: Connector, told: Story) -> str:
    made = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(connector.renew())
    for number in range(views.MAX_EVENTS):
        told.add(NodeNoticed(node="spot-0", source="drill", why=f"drill {number}", lead_s=30.0), 0.1)
    ok(connector.send(made, told.entries))
    return made


def test_an_old_event_is_shown_with_those_before_it(api: httpx.Client, job_id: str, told: Story) -> None:
    lost = next(entry.seq for entry in told.entries if isinstance(entry.event, NodeLost))
    newest = api.get(f"/jobs/{job_id}/panels/events", headers=HTML).text
    assert f'id="event-{lost}"' not in newest, "too long ago"
    page = api.get(f"/jobs/{job_id}", params={"event": lost}, headers=HTML).text
    assert f'<tr id="event-{lost}" class="chosen">' in page
    panel = page[page.index('id="part-events"') :]
    assert f"/panels/events?event={lost}" in panel, "it stays when the panel is drawn again"
    numbers = [int(found) for found in re.findall(r'<tr id="event-(\d+)"', panel)]
    assert numbers[0] == lost and numbers == sorted(numbers, reverse=True)

    step = next(entry for entry in told.entries if isinstance(entry.event, StepDone))
    panel = api.get(f"/jobs/{job_id}/panels/events", params={"event": step.seq}, headers=HTML).text
    assert f'<tr id="event-{step.seq}" class="chosen">' in panel and "step 1: loss" in panel
    for nothing in ("999999", "many", ""):
        answer = api.get(f"/jobs/{job_id}/panels/events", params={"event": nothing}, headers=HTML)
        assert answer.status_code == 200 and 'class="chosen"' not in answer.text


def test_a_step_tells_each_time_that_it_was_done(api: httpx.Client, job_id: str) -> None:
    redone = next(point["step"] for point in ok(api.get(f"/v1/jobs/{job_id}/metrics"))["rolled_back"])
    page = api.get(f"/jobs/{job_id}", params={"step": redone}, headers=HTML).text
    panel = page[page.index('id="part-step"') : page.index('id="part-logs"')]
    assert panel.count("<tr><td>") == 2 and "rolled back" in panel and "counts" in panel
    assert "400 ms" in panel and "12 ms" in panel and "152 to 159" in panel
    assert f"?step={redone - 1}#part-step" in panel and f"?step={redone + 1}#part-step" in panel
    seqs = re.findall(r"\?event=(\d+)#part-logs", panel)
    assert len(seqs) == 2
    shown = api.get(f"/jobs/{job_id}/panels/step", params={"step": 5, "choose": "1"}, headers=HTML)
    assert shown.headers["HX-Replace-Url"] == f"/jobs/{job_id}?step=5#part-step"
    later = api.get(f"/jobs/{job_id}/panels/step", params={"step": 1000}, headers=HTML).text
    assert "Not done so far: the newest is 60." in later
    assert api.get(f"/jobs/{job_id}/panels/step", params={"step": "-1"}, headers=HTML).status_code == 422


def events(told: Story) -> list[Event]:
    return [
        Event(seq=entry.seq, at_s=entry.at_s, kind=entry.event.kind, payload=dataclasses.asdict(entry.event))
        for entry in told.entries
    ]


def test_marks_of_the_timeline_lead_to_what_happened(told: Story) -> None:
    found = events(told)
    drawn = timeline(found, created_at_s=told.entries[0].at_s, end_at_s=told.now_s)
    assert [mark.href for mark in drawn.recoveries] == ["#recovery-1", "#recovery-2"]
    lane = next(lane for lane in drawn.lanes if lane.name == "spot-1")
    by_text = {mark.text: mark.href for mark in lane.marks}
    seqs = {event.kind: event.seq for event in found if event.payload.get("node") == "spot-1"}
    assert by_text["lost"] == f"?event={seqs['node_lost']}#event-{seqs['node_lost']}"
    assert by_text["joined"] == f"?event={seqs['node_joined']}#event-{seqs['node_joined']}"


def test_a_recovery_tells_how_its_nodes_came_to_be_known_to_go(told: Story) -> None:
    found = events(told)
    first = next(event for event in found if event.kind == "recovery_done")
    before = [event for event in found if event.seq < first.seq]
    (alone,) = told_by(first, before)
    assert alone.sentence == "spot-1: without notice, its connection closed; noticed after 62 ms"
    loss = {"evidence": "its connection closed", "detect_s": 0.062}
    expected = {"node": "spot-1", "notice": None, "loss": loss, "loss_after_notice_s": None}
    assert alone.resource() == expected
    said = {"source": "aws", "why": "terminate", "lead_s": 120.0}
    notice = Event(seq=1, at_s=before[-1].at_s - 30, kind="node_noticed", payload={"node": "spot-1", **said})
    (early,) = told_by(replace(first, payload={"nodes_lost": (), "nodes_drained": ("spot-1",)}), [notice])
    assert early.sentence == "spot-1: notice by aws (terminate), 2 min before its end"
    assert early.resource() == {"node": "spot-1", "notice": said, "loss": None, "loss_after_notice_s": None}
    (both,) = told_by(first, [notice, *before])
    assert both.sentence.startswith("spot-1: notice by aws (terminate), 2 min before its end; lost ")
    assert both.resource()["notice"] == said and both.resource()["loss"] == loss
    assert both.resource()["loss_after_notice_s"] > 0
    assert told_by(replace(first, payload={"nodes_lost": ("other",)}), before) == ()
    lost = next(event for event in before if event.kind == "node_lost")
    later = replace(lost, seq=lost.seq + 1, at_s=lost.at_s + 9)
    (second,) = told_by(replace(first, seq=lost.seq + 2), [notice, lost, later])
    assert (second.notice, second.loss) == (None, later), "the notice was of the node's life before"
    done = [event for event in found if event.kind == "recovery_done"]
    shown = recoveries_panel(done, (), {}, found)
    assert [card["told"] for card in shown["cards"]][-1] == (alone.sentence,)
    assert {part.name: part.text for part in shown["total"]}["peer"] == "25.8 MB in 26 ms"


def told_by(recovery: Event, before: Sequence[Event]) -> tuple[Known, ...]:
    return Tellings(before).of(recovery)
