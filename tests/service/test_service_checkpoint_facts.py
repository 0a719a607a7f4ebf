"""What checkpoints cost training, and when their bytes were found to be right: from the journal to REST, the page and
the sums of a job's time."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import STALLED_S, Connector, Story, job_mapping, ok, story

from shoal_recovery.journal import CheckpointCommitted, Entry, RecoveryDone, StepDone
from shoal_service.checkpoint_facts import Look, verified
from shoal_service.goodput import PRODUCTIVE, STALLED, goodput
from shoal_service.panels_goodput import goodput_panel
from shoal_service.step_sums import EpochSteps
from shoal_service.timeline import Event


def event(seq: int, told: Any) -> Event:
    return Event(seq=seq, at_s=1000.0 + seq, kind=told.kind, payload=dataclasses.asdict(told))


def recovery(step: int, **changes: Any) -> RecoveryDone:
    told = Story(job=story(job_mapping(), started_at_s=0.0).job, cluster=None, now_s=0.0, step=step)  # type: ignore[arg-type]
    told.recover("node_lost", "it was lost", redone=0, lost=(), joined=())
    made = told.entries[-1].event
    assert isinstance(made, RecoveryDone)
    return dataclasses.replace(made, **changes)


def test_bytes_are_verified_by_whoever_read_them_last() -> None:
    stored = event(5, CheckpointCommitted(step=20, epoch=1, uri="file:///c", num_bytes=9, duration_s=0.5))
    whole = {"own": 0, "node": 0, "peer": 0, "store": 700}
    found = verified(20, stored, [event(9, recovery(20))])
    assert found is not None and (found.by, found.seq, found.at_s) == (Look.MANIFEST, 5, 1005.0)
    for others in (recovery(40, num_bytes=whole), recovery(20, num_bytes={**whole, "store": 0})):
        again = verified(20, stored, [event(9, others)])
        assert again is not None and again.by is Look.MANIFEST
    read = verified(20, stored, [event(11, recovery(20, num_bytes=whole)), event(9, recovery(20, num_bytes=whole))])
    assert read is not None and (read.by, read.seq) == (Look.BYTES, 11)
    assert verified(20, None, ()) is None


def test_what_held_steps_up_is_told_apart() -> None:
    steps = (
        EpochSteps(epoch=1, rolled_back=False, num_steps=10, seconds=4.0, tokens=10, stalled_s=0.5),
        EpochSteps(epoch=1, rolled_back=True, num_steps=1, seconds=0.4, tokens=1, stalled_s=0.1),
    )
    found = goodput((), steps, created_at_s=0.0, end_at_s=10.0)
    assert (found.parts[PRODUCTIVE], found.parts[STALLED], found.parts["redone"]) == (3.5, 0.5, 0.4)
    assert found.ratio == pytest.approx(0.35)
    rows = {key: (words, time) for key, words, time, _ in goodput_panel(found).rows}
    assert rows[STALLED] == ("steps that count, held up by copies of state", "500 ms")


def test_a_checkpoint_tells_what_it_cost_and_when_it_was_verified(
    api: httpx.Client, connector: Connector, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}/store"
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping(checkpoint={"uri": uri})))["id"])
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=1_700_000_000.0)
    told.entries[-1:] = []  # it goes on
    told.add(CheckpointCommitted(step=50, epoch=3, uri=uri, num_bytes=52_500_000, duration_s=0.8))
    ok(connector.send(job_id, [_held_up(entry) for entry in told.entries]))
    page = api.get(f"/jobs/{job_id}/panels/checkpoints", headers={"Accept": "text/html"}).text
    assert "Held up training" in page and ">34 ms<" in page and ">manifest</a>" in page
    goodput_page = api.get(f"/jobs/{job_id}/panels/goodput", headers={"Accept": "text/html"}).text
    assert "held up by copies of state" in goodput_page
    shown = ok(api.get(f"/v1/jobs/{job_id}"))["status"]["exchanges"]["waited_s"]
    assert shown["safety"] == {"mean": 0.008, "most": 0.016}


def _held_up(entry: Entry) -> Entry:
    """The step after the checkpoint by more than the others."""
    told = entry.event
    if isinstance(told, StepDone) and told.step == 51:
        return dataclasses.replace(entry, event=dataclasses.replace(told, stalled_s=0.034))
    return entry


def test_sums_are_the_same_whatever_comes_in_one_batch(api: httpx.Client, connector: Connector) -> None:
    """Also of a step that was done again."""
    entries = story(job_mapping(), started_at_s=time.time() - 60).entries[:-1]
    for size in (len(entries), 7):
        job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
        ok(connector.renew())
        for first in range(0, len(entries), size):
            ok(connector.send(job_id, entries[first : first + size]))
        text = api.get("/metrics").text
        lines = [each for each in text.splitlines() if 'kind="checkpoint"' in each and job_id in each]
        told = {each.partition("{")[0]: float(each.rpartition(" ")[2]) for each in lines}
        # The counter never falls: what held up the step that was rolled back stays in it.
        assert told == pytest.approx(
            {"shoal_job_elapsed_seconds": 60 * STALLED_S, "shoal_job_time_seconds_total": 61 * STALLED_S}
        )
