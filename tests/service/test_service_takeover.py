"""Jobs of clusters that are not heard of any more: which go to another one, which wait, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story
from fastapi import FastAPI

from shoal_planner.cluster import parse_cluster
from shoal_recovery.journal import CheckpointCommitted
from shoal_service.app import create_app
from shoal_service.settings import Settings


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return create_app(Settings(data_dir=tmp_path / "data", poll_s=0.1, plan_time_limit_s=3, cluster_lost_s=0))


def test_a_job_goes_where_nothing_of_it_is_lost(
    api: httpx.Client, connector: Connector, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    """Not to a cluster that has no plan for it; not at all while its state is nowhere else."""
    stored, alone = (
        str(ok(api.post("/v1/jobs", json=job_mapping(checkpoint={"uri": (tmp_path / name).as_uri()})))["id"])
        for name in ("stored", "alone")
    )
    ok(connector.renew())
    told = story(job_mapping(), started_at_s=time.time()).entries
    at = next(index for index, entry in enumerate(told) if isinstance(entry.event, CheckpointCommitted))
    ok(connector.send(stored, told[: at + 1]))
    ok(connector.send(alone, told[:at]))
    said = ok(api.get(f"/v1/jobs/{stored}"))["cluster"]
    assert (said["connected"], said["problem"], said["fault_tolerant_head"]) == (True, None, None)
    ok(connector.renew(lease_s=1e-6))
    problem = ok(api.get(f"/v1/jobs/{alone}"))["cluster"]["problem"]
    assert "no step of the job stands in an object store, so it waits for that cluster" in problem
    assert problem[:1].upper() + problem[1:] in api.get(f"/jobs/{alone}", headers={"Accept": "text/html"}).text
    assert "goes on on the next one that connects" in ok(api.get(f"/v1/jobs/{stored}"))["cluster"]["problem"]

    tiny = parse_cluster({"nodes": [{"name": "t", "device": "X", "host_memory_gib": 1}], "devices": {"X": TINY}})
    ok(Connector(http=api, cluster_id="tiny", holder="h", cluster=tiny).renew())
    other = Connector(http=api, cluster_id="other", holder="h")

    def wished() -> list[tuple[str, str, int]]:
        ok(other.renew())
        return [(job["id"], job["wish"], job["last_seq"]) for job in other.wishes()["jobs"]]

    assert eventually(wished, 30) == [(stored, "run", at + 1)]
    job = ok(api.get(f"/v1/jobs/{stored}"))
    assert (job["cluster_id"], job["status"]["state"], job["status"]["code"]) == ("other", "waiting", "cluster_lost")
    assert "cluster local has not been heard of for long" in job["status"]["reason"]
    # The one that comes back has lost the job; what nobody took is still its own.
    ok(connector.renew())
    assert [wish["id"] for wish in connector.wishes()["jobs"]] == [alone]
    assert connector.send(stored, told[at + 1 :]).json()["code"] == "wrong_cluster"


TINY = {"memory_gib": 0.0001, "tflops_bf16": 1, "memory_gb_per_s": 1}


def test_pages_say_what_comes_of_a_dead_head(api: httpx.Client, connector: Connector) -> None:
    for told, words in ((True, "training goes on: "), (False, "the cluster ends with it: "), (None, "not known: ")):
        body = {"holder": "connector-1", "lease_s": 60, "fault_tolerant_head": told}
        snapshot = {"nodes": []}
        ok(api.put("/v1/clusters/local", json={**body, "snapshot": snapshot}))
        (cluster,) = ok(api.get("/v1/clusters"))["items"]
        assert cluster["if_head_dies"].startswith(words)
        assert words in api.get("/nodes", headers={"Accept": "text/html"}).text
