"""What a job measures on its cluster outlives the job and the connector, and prices the preview of the next one."""

from __future__ import annotations

from typing import Any

import pytest
from running import LIMIT_S, Running, job_mapping
from waiting import eventually

from shoal.local_shoal import CLUSTER_ID


def cluster(running: Running) -> dict[str, Any]:
    return running.client._call("GET", f"/v1/clusters/{CLUSTER_ID}")


@pytest.mark.long
def test_a_preview_is_priced_by_what_an_earlier_job_measured(running: Running) -> None:
    job = job_mapping(12)
    job["model"] = {**job["model"], "ffn": 192}  # a shape that no other test has
    eventually(lambda: len(running.client.nodes()) == 4, LIMIT_S)
    guessed = running.client.preview(job)["predicted"]["step_s"]
    job_id = running.submit(job)
    events = running.finish(job_id)
    kinds = [event["kind"] for event in events]
    assert kinds.index("figures_measured") < kinds.index("plan_adopted")
    (checked,) = [event for event in events if event["kind"] == "prediction_checked"]
    assert 0 < checked["predicted_s"] < 100 * checked["measured_s"]

    devices = {node["device"] for node in running.client.nodes()}
    found = {(figure["device"], figure["ffn"]) for figure in cluster(running)["profile"]["layers"]}
    assert found >= {(device, 192) for device in devices}
    for node in running.client.nodes():
        assert node["measured"]["update"]["elements_per_s"] > 0
        assert all(1e6 < link["bytes_per_s"] < 1e12 for link in node["measured"]["links"])
        assert node["measured"]["links"]
    priced = running.client.preview(job)["predicted"]["step_s"]
    assert priced != guessed

    before = cluster(running)
    for process in running.processes("ray::ConnectorActor").values():
        process.kill()
    eventually(lambda: cluster(running)["holder"] != before["holder"], LIMIT_S)
    assert cluster(running)["profile"] == before["profile"]
