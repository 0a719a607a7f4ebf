"""A job that rests, on real raylets: over a restart of the control plane, and on another shape of cluster after it."""

from __future__ import annotations

import psutil
import pytest
from running import LIMIT_S, Running, check_history, job_mapping
from servers import new_place
from waiting import eventually

STEPS = 40


@pytest.mark.long
def test_a_job_rests_and_goes_on_with_fewer_nodes(running: Running) -> None:
    """Nothing is done again, and while it rests it has no processes."""
    job_id = running.submit(job_mapping(STEPS, uri=new_place(), every_steps=1000))
    running.until_step(job_id, 8)
    assert running.client.pause(job_id)["wish"] == "paused"
    eventually(lambda: running.client.get(job_id)["status"]["state"] == "paused", LIMIT_S)
    step = running.step(job_id)
    stored = [item["step"] for item in running.client.checkpoints(job_id)["items"]]
    assert stored == [step]
    eventually(lambda: not running.processes("ray::RankActor") and not running.processes("ray::SupervisorActor"), 60)
    assert not any(node["jobs"] for node in running.client.nodes())
    psutil.Process(running.shoal.server_pid).kill()
    running.shoal.start_server()
    running.kill("small-1")
    assert running.client.resume(job_id)["status"]["state"] == "queued"
    recovery = running.until_event(job_id, "recovery_done")
    assert (recovery["cause"], recovery["step"]) == ("resumed", step)
    assert (recovery["redone_steps"], recovery["lost_steps"]) == (0, 0)
    assert recovery["num_bytes"]["store"] > 0
    events = running.finish(job_id)
    check_history(events, STEPS)
    assert [event["step"] for event in events if event["kind"] == "step_done"] == list(range(1, STEPS + 1))
