"""Odd losses: what counts as one, who is told of it, and how often."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story

from shoal_recovery.journal import Entry, StepDone
from shoal_service.loss_watch import NO_NUMBER, SPIKE, LossWatch, watched


def after(losses: Iterable[float], watch: LossWatch | None = None, first: int = 1) -> LossWatch:
    found = watch or LossWatch()
    for step, loss in enumerate(losses, start=first):
        found = watched(found, step, loss)
    return found


def falling(steps: int) -> list[float]:
    """As losses fall, with noise."""
    return [1.9 + 3.6 * math.exp(-step / 25) + 0.08 * math.sin(step * 12.9898) for step in range(1, steps + 1)]


def test_a_loss_that_falls_is_not_odd() -> None:
    found = after(falling(300))
    assert (found.odd, found.alarms, found.sentence) == ("", 0, "")
    assert found.usual == pytest.approx(1.9, abs=0.1)


def test_a_jump_is_told_once_until_it_is_over() -> None:
    usual = after(falling(100))
    jumped = after([5.0, 5.1, 4.9], usual, first=101)
    assert (jumped.odd, jumped.num_odd, jumped.alarms, jumped.step, jumped.loss) == (SPIKE, 3, 1, 101, 5.0)
    assert jumped.usual == usual.usual and "jumped to 5 at step 101, from about" in jumped.sentence
    back = after([2.0], jumped, first=104)
    assert (back.odd, back.alarms) == ("", 1)
    again = after([9.0], back, first=105)
    assert (again.alarms, again.step) == (2, 105)


def test_what_stays_is_usual_after_a_while() -> None:
    stays = after([5.0] * 80, after(falling(100)), first=101)
    assert (stays.odd, stays.alarms) == ("", 1) and stays.usual == pytest.approx(5.0)


def test_no_number_is_odd_from_the_first_step_on() -> None:
    found = after([math.nan, math.inf])
    assert (found.odd, found.alarms, found.step, found.loss) == (NO_NUMBER, 1, 1, None)
    assert found.sentence == "The loss is not a number since step 1."
    assert after([4.0] * 5 + [40.0]).odd == "", "so early nobody knows what is usual"


@pytest.fixture
def told(api: httpx.Client, connector: Connector) -> tuple[str, list[Entry]]:
    body = {"url": "https://hooks.example.org/x", "events": ["job.loss"], "project": "default"}
    ok(api.post("/v1/webhooks", json=body))
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    ok(connector.renew())
    entries = story(job_mapping(), started_at_s=time.time() - 60).entries[:-1]
    return job_id, [_odd(entry) for entry in entries]


def _odd(entry: Entry) -> Entry:
    event = entry.event
    if isinstance(event, StepDone) and event.step >= 58:
        return dataclasses.replace(entry, event=dataclasses.replace(event, loss=11.5))
    return entry


def test_a_jump_is_told_to_webhooks_and_on_pages(
    api: httpx.Client, connector: Connector, told: tuple[str, list[Entry]]
) -> None:
    job_id, entries = told
    (hook,) = ok(api.get("/v1/webhooks"))["items"]
    deliveries = f"/v1/webhooks/{hook['id']}/deliveries"
    for end in (40, len(entries) - 2, len(entries)):
        ok(connector.send(job_id, entries[:end]))
    (one,) = ok(api.get(deliveries))["items"]
    assert one["event"] == "job.loss"
    for path in (f"/jobs/{job_id}", "/"):
        assert "The loss jumped to 11.5 at step 58, from about" in api.get(path, headers={"Accept": "text/html"}).text
