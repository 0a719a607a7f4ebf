"""PostgreSQL is gone for a minute while a job trains on a real cluster: training does not notice, and its history is
whole as the database is back."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import pytest
from postgres import start_postgres
from running import LIMIT_S, Running, job_mapping
from waiting import eventually

from shoal.local_shoal import LocalOptions, LocalShoal

STEPS = 20_000  # more than it comes to
AWAY_S = 60.0
CLUSTER = {"nodes": [{"name": "small", "device": "cpu-1t", "count": 2, "host_memory_gib": 2}]}


@pytest.mark.long
def test_training_does_not_notice_that_the_database_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_postgres()
    monkeypatch.setenv("SHOAL_DATABASE_URL", server.new_database())
    monkeypatch.setenv("SHOAL_DATABASE_TIMEOUT_S", "2")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="shoal-e2e-") as folder,
            LocalShoal(LocalOptions(cluster=CLUSTER, data_dir=Path(folder), port=0)) as shoal,
        ):
            ground = Running(shoal, ["small-0", "small-1"])
            job_id = ground.submit(job_mapping(STEPS))
            ground.until_step(job_id, 5)
            with server.frozen():
                gone_s = time.time()
                threading.Event().wait(AWAY_S)
                back_s = time.time()
            # All of what was done meanwhile is told, and the job hears of its user again.
            eventually(lambda: (ground.events(job_id, "step_done") or [{"at_s": 0.0}])[-1]["at_s"] > back_s, LIMIT_S)
            ground.client.cancel(job_id)
            assert ground.client.wait(job_id, timeout_s=LIMIT_S)["status"]["state"] == "cancelled"
            events = ground.events(job_id)
            assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
            assert not [event for event in events if event["kind"] in ("recovery_done", "node_lost")]
            steps = [event for event in events if event["kind"] == "step_done"]
            assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
            assert {event["epoch"] for event in steps} == {1}
            assert sum(gone_s < event["at_s"] < back_s for event in steps) >= 10
            ground.restore()
    finally:
        server.close()
