"""Jobs of kind ray_train as the control plane has them: what is accepted, and how what they report is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, ok

from shoal.cli import run
from shoal_planner.cluster import ClusterSnapshot, snapshot_to_mapping
from shoal_recovery.journal import Entry, Event, RecoveryDone, StateChanged
from shoal_recovery.journal_scripts import (
    CheckpointReported,
    ScriptFailed,
    ScriptPrinted,
    ScriptReported,
    ScriptStarted,
    TrainerAdjusted,
    WorkersStarted,
)

EMPTY = snapshot_to_mapping(ClusterSnapshot(nodes=()))


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('hello')\n")
    return {
        "kind": "ray_train",
        "name": "tuned",
        "script": {"path": "train.py", "working_dir": project.as_uri()},
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"uri": (tmp_path / "store").as_uri()},
        "metric": "accuracy",
    }


def entries(*events: Event) -> list[Entry]:
    return [Entry(seq=seq, at_s=1000.0 + seq, event=event) for seq, event in enumerate(events, start=1)]


def reported(epoch: int, step: int, accuracy: float) -> ScriptReported:
    metrics = {"accuracy": accuracy, "worst": "inf"}
    return ScriptReported(epoch=epoch, step=step, metrics=metrics, loss=accuracy, duration_s=2.0)


def workers(epoch: int, step: int, checkpoint: str | None) -> WorkersStarted:
    return WorkersStarted(epoch=epoch, trainer=1, step=step, nodes=("a", "b"), checkpoint=checkpoint, snapshot=EMPTY)


def story() -> list[Entry]:
    """Three reports, of which the second is stored; a loss; the third again, and a fourth."""
    return entries(
        StateChanged(state="starting", code="starting", reason="because"),
        ScriptStarted(attempt=1, node="a", reason="The script is started on a."),
        TrainerAdjusted(attempt=1, trainer=1, settings={"num_workers": "1 to 2 (the script said 8)"}),
        StateChanged(state="running", code="training", reason="because"),
        workers(1, 0, None),
        ScriptPrinted(attempt=1, lines=("hello <you>", "epoch 1"), left_out=0),
        reported(1, 1, 0.25),
        reported(1, 2, 0.5),
        CheckpointReported(epoch=1, step=2, uri="file:///store/job/checkpoint_2", num_bytes=4096),
        reported(1, 3, 0.125),
        StateChanged(state="recovering", code="node_lost", reason="Lost b."),
        workers(2, 2, "file:///store/job/checkpoint_2"),
        RecoveryDone(
            epoch=2,
            cause="node_lost",
            reason="Lost b.",
            step=2,
            redone_steps=1,
            lost_steps=0,
            detect_s=0.0,
            decide_s=0.0,
            restore_s=0.0,
            rebuild_s=4.0,
            total_s=4.0,
            num_bytes={},
        ),
        StateChanged(state="running", code="training", reason="2 workers train."),
        reported(2, 3, 0.75),
        reported(2, 4, 0.875),
        ScriptPrinted(attempt=1, lines=("the end",), left_out=7),
        ScriptFailed(attempt=1, rank=0, node="a", problem="ValueError: x", traceback="Traceback\n  their line"),
    )


def test_a_script_is_accepted_and_its_reports_count_once(
    api: httpx.Client, connector: Connector, job: dict[str, Any]
) -> None:
    ok(connector.renew())
    created = ok(api.post("/v1/jobs", json=job))
    assert (created["kind"], created["cluster_id"], created["status"]["steps"]) == ("ray_train", "local", None)
    (wished,) = connector.wishes()["jobs"]
    assert wished["spec"]["kind"] == "ray_train"
    job_id = created["id"]
    busy = str(ok(api.get("/v1/nodes"))["items"][0]["id"])
    told = [
        dataclasses.replace(entry, event=dataclasses.replace(entry.event, nodes=(busy, "gone")))
        if isinstance(entry.event, WorkersStarted)
        else entry
        for entry in story()
    ]
    ok(connector.send(job_id, told))
    status = ok(api.get(f"/v1/jobs/{job_id}"))["status"]
    assert (status["step"], status["loss"], status["recoveries"], status["redone_steps"]) == (4, 0.875, 1, 1)
    found = ok(api.get(f"/v1/jobs/{job_id}/metrics"))
    assert [(point["step"], point["loss"]) for point in found["points"]] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 0.875)]
    assert [point["loss"] for point in found["rolled_back"]] == [0.125]
    assert [told["metrics"]["accuracy"] for told in found["reported"]] == [0.25, 0.5, 0.75, 0.875]
    assert found["reported"][0]["metrics"]["worst"] == "inf"
    (stored,) = ok(api.get(f"/v1/jobs/{job_id}/checkpoints"))["items"]
    assert (stored["step"], stored["uri"]) == (2, "file:///store/job/checkpoint_2")
    assert ok(api.get(f"/v1/jobs/{job_id}/bulk-losses"))["items"] == []
    assert ok(api.get(f"/v1/jobs/{job_id}/cost"))["charges"] == []
    assert api.get(f"/v1/jobs/{job_id}/plan").json()["code"] == "no_plan_yet"
    nodes = {node["id"]: node["jobs"] for node in ok(api.get("/v1/nodes"))["items"]}
    assert [name for name, users in nodes.items() if users == [job_id]] == [busy]


def test_its_page_shows_what_a_script_has_and_nothing_of_plans(
    api: httpx.Client, connector: Connector, job: dict[str, Any]
) -> None:
    ok(connector.renew())
    job_id = ok(api.post("/v1/jobs", json=job))["id"]
    assert "Nothing yet." in api.get(f"/jobs/{job_id}").text
    ok(connector.send(job_id, story()))
    page = api.get(f"/jobs/{job_id}").text
    for words in (">accuracy</option>", "hello &lt;you&gt;", "checkpoint_2", "4.1 kB", "1 to 2 (the script said 8)"):
        assert words in page, words
    assert "their line" in page and "Plan: which device" not in page
    assert "4 reports" in api.get("/").text


def test_the_command_line_shows_a_script(
    api: httpx.Client,
    connector: Connector,
    job: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_SERVER", str(api.base_url))
    monkeypatch.setenv("SHOAL_TOKEN", api.headers["Authorization"].removeprefix("Bearer "))
    ok(connector.renew())
    job_id = ok(api.post("/v1/jobs", json=job))["id"]
    ok(connector.send(job_id, story()))
    assert run(["logs", job_id]) == 0
    assert [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "script: hello <you>",
        "script: epoch 1",
        "script: WARNING 7 lines were dropped: they came faster than they are kept",
        "script: the end",
        "rank 0: ERROR Traceback",
        "rank 0: ERROR   their line",
    ]
    (failed, _) = ok(api.get(f"/v1/jobs/{job_id}/logs", params={"level": "error"}))["items"]
    assert (failed["node"], failed["attempt"], failed["text"]) == ("a", 2, "Traceback")
    for command in ("status", "events", "checkpoints"):
        assert run([command, job_id]) == 0
    shown = capsys.readouterr().out
    for words in ("step 4, accuracy 0.875, worst inf", "2 on a, b, epoch 2, from step 2", "ValueError: x"):
        assert words in shown, words
    assert run(["export", job_id, "nowhere"]) == 2
    assert "kind = 'ray_train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"script": {"path": "none.py"}}, "script.path = 'none.py': there is no such file in file://"),
        ({"script": {"working_dir": "file:///nowhere"}}, "script.working_dir = 'file:///nowhere': cannot be read"),
        ({"model": {"preset": "llama-7b"}}, "model = {'preset': 'llama-7b'}: is of no use with kind 'ray_train'"),
        ({"limits": {"device_types": ["H100"]}}, "limits.device_types = H100: the cluster has no such nodes"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_created(
    api: httpx.Client, connector: Connector, job: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    ok(connector.renew())
    changed = {**job, **change}
    if "script" in change:
        changed["script"] = job["script"] | change["script"]
    answer = api.post("/v1/jobs", json=changed)
    assert answer.status_code == 422 and words in answer.json()["detail"]
    assert ok(api.get("/v1/jobs"))["items"] == []
    assert "no plan of such a job" in api.post("/v1/plans", json={"job": job}).json()["detail"]
