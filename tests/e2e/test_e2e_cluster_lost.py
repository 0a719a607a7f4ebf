"""A whole Ray cluster is gone, with all that its head knew: its job goes on by itself on the next one of its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Running, check_history, job_mapping
from servers import RunningServer, new_place

from shoal.local_shoal import LocalOptions, LocalShoal

STEPS = 40
CLUSTER = {"nodes": [{"name": "node", "device": "cpu-1t", "count": 2, "host_memory_gib": 2}]}


@pytest.mark.long
def test_a_job_goes_on_on_the_next_cluster(
    seaweedfs: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what the nodes' folders still hold. Nobody asks for that."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    with LocalShoal(LocalOptions(cluster=CLUSTER, data_dir=tmp_path, port=0)) as shoal:
        running = Running(shoal, ["node-0", "node-1"])
        job_id = running.submit(job_mapping(STEPS, uri=new_place(), every_steps=5, keep=2))
        running.until_event(job_id, "checkpoint_committed")
        running.end_cluster()
        shoal._start_cluster()
        events = running.finish(job_id)
        check_history(events, STEPS)
        first, second = (event for event in events if event["kind"] == "cluster_entered")
        assert first["cluster"] == second["cluster"]
        assert first["incarnation"] != second["incarnation"]
        (recovery,) = (event for event in events if event["kind"] == "recovery_done")
        assert (recovery["cause"], recovery["epoch"]) == ("resumed", 1000)
        running.client.close()
