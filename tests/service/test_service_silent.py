"""Jobs of a cluster that is not heard of say so, and say so no more when it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
from control_plane import Connector, job_mapping, ok, story

from shoal.cli_show import show_job, show_jobs

PARTS = {"bulk_losses": "bulk-losses", "cost": "cost"}


def shown(api: httpx.Client, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = ok(api.get(f"/v1/jobs/{job_id}"))
    return found


def page(api: httpx.Client, path: str) -> str:
    return api.get(path, headers={"Accept": "text/html"}).text


def test_the_silence_of_a_cluster_is_told_of_its_jobs_until_it_is_heard_again(
    api: httpx.Client, connector: Connector, tmp_path: Path, capsys: Any
) -> None:
    ok(connector.renew())
    stored = job_mapping(name="runs-there", checkpoint={"uri": (tmp_path / "store").as_uri()})
    runs = ok(api.post("/v1/jobs", json=stored))["id"]
    waits = ok(api.post("/v1/jobs", json=job_mapping(name="waits-there")))["id"]
    ended = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    told = story(job_mapping(), started_at_s=time.time()).entries
    ok(connector.send(runs, told[:10]))
    ok(connector.send(ended, told))
    before = shown(api, runs)
    assert before["problem"] is None and shown(api, waits)["problem"] is None

    ok(connector.renew(lease_s=1e-6))
    heard = ok(api.get("/v1/clusters/local"))["updated_at"]
    problems = {job["id"]: job["problem"] for job in ok(api.get("/v1/jobs"))["items"]}
    assert (problems[runs]["code"], problems[runs]["since"]) == ("cluster_silent", heard)
    said = f"cluster local has not been heard of since {heard}; "
    nowhere_else = "no step of the job stands in an object store, so it waits for that cluster"
    assert problems[runs]["reason"] == f"{said}{nowhere_else}"
    assert problems[waits]["reason"] == (
        f"{said}the job has not begun, and begins on whichever cluster can let it begin first"
    )
    assert problems[ended] is None
    after = shown(api, runs)
    assert after["problem"] == problems[runs]
    assert (after["status"], after["wish"]) == (before["status"], before["wish"]), "nothing is done to it"
    for path in ("/", "/nodes", f"/jobs/{runs}"):
        assert nowhere_else in page(api, path), path
    show_jobs([shown(api, runs)])
    assert "cluster_silent" in capsys.readouterr().out
    beside = {name: ok(api.get(f"/v1/jobs/{runs}/{path}")) for name, path in PARTS.items()}
    show_job({**shown(api, runs), **beside})
    assert "cluster_silent" in capsys.readouterr().out

    ok(connector.renew())
    assert shown(api, runs)["problem"] is None
    for path in ("/", "/nodes", f"/jobs/{runs}"):
        assert "has not been heard of" not in page(api, path), path
