"""Jobs' metrics in trackers, read back with the trackers' own readers: each step once, whatever happens to steps, to
the control plane and to the trackers."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from control_plane import (
    ALL_NODES,
    Connector,
    ControlPlane,
    Story,
    control_plane,
    job_mapping,
    ok,
    snapshot,
    start_control_plane,
    story,
)
from servers import free_ports
from tracked import (
    mlflow_holds,
    mlflow_runs,
    mlflow_server,
    single,
    tensorboard_holds,
    tensorboard_texts,
    told_by_rest,
    wandb_holds,
)
from waiting import eventually

from shoal_planner.job import parse_job
from shoal_recovery.journal import entry_to_mapping
from shoal_service.sinks import MODULES

LIMIT_S = 120.0


def tracked(folder: Path) -> dict[str, Any]:
    return {
        "tensorboard": {"log_dir": (folder / "tb").as_uri()},
        "mlflow": {"tracking_uri": f"sqlite:///{folder / 'mlflow.db'}", "experiment_name": "shoals"},
        "wandb": {"project": "shoals", "mode": "offline", "dir": str(folder / "wb")},
    }


def begin(http: httpx.Client, **changes: Any) -> tuple[str, Connector]:
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping(**changes)))["id"])
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    return job_id, connector


def trackers(http: httpx.Client, job_id: str) -> dict[str, dict[str, Any]]:
    return {each["tool"]: each for each in ok(http.get(f"/v1/jobs/{job_id}"))["trackers"]}


def metrics(http: httpx.Client, job_id: str) -> dict[str, Any]:
    return ok(http.get(f"/v1/jobs/{job_id}/metrics", params={"max_points": 450}))  # type: ignore[no-any-return]


def until_complete(http: httpx.Client, job_id: str) -> None:
    def complete() -> bool:
        found = trackers(http, job_id)
        assert [each["problem"] for each in found.values() if not each["complete"]] == []
        return True

    eventually(complete, LIMIT_S)


def until_written(http: httpx.Client, job_id: str, after: int = 0, tool: str = "tensorboard") -> int:
    """The newest step that the tracker has, later than `after`."""

    def written() -> int:
        step: int = trackers(http, job_id)[tool]["step"]
        return step if step > after else 0

    return eventually(written, LIMIT_S)


def check_readers(http: httpx.Client, job_id: str, folder: Path) -> None:
    """All three hold what REST says, each figure once."""
    rest = told_by_rest(metrics(http, job_id))
    assert [step for step, _ in rest["train/loss"]] == list(range(1, len(rest["train/loss"]) + 1))
    assert tensorboard_holds(folder / "tb" / f"tiny-{job_id}") == single(rest)
    runs = mlflow_runs(f"sqlite:///{folder / 'mlflow.db'}", "shoals", job_id)
    (run,) = (run for run in runs if "shoal.replaced_by" not in run.data.tags)
    assert mlflow_holds(f"sqlite:///{folder / 'mlflow.db'}", run) == rest
    found, _ = wandb_holds(folder / "wb")
    assert {name: points for name, points in found.items() if name != "shoal/recoveries"} == rest


def test_readers_find_what_rest_says_across_recoveries(plane: ControlPlane, http: httpx.Client, tmp_path: Path) -> None:
    job_id, connector = begin(http, track=tracked(tmp_path))
    told = story(job_mapping(), started_at_s=time.time())
    lost_at = next(index for index, entry in enumerate(told.entries) if entry.event.kind == "node_lost")
    ok(connector.send(job_id, told.entries[:lost_at]))
    # The newest step may be done again, and is held back.
    eventually(lambda: {each["step"] for each in trackers(http, job_id).values()} == {19}, LIMIT_S)
    ok(connector.send(job_id, told.entries[lost_at:]))
    until_complete(http, job_id)
    assert metrics(http, job_id)["num_rolled_back"] == 1
    check_readers(http, job_id, tmp_path)

    run_folder = tmp_path / "tb" / f"tiny-{job_id}"
    assert trackers(http, job_id)["tensorboard"]["url"] == run_folder.as_uri()
    assert [step for step, _ in tensorboard_texts(run_folder, "shoal/recoveries")] == [19, 39]
    assert tensorboard_texts(run_folder, "shoal/state")[0][1].startswith("succeeded: ")
    (run,) = mlflow_runs(f"sqlite:///{tmp_path / 'mlflow.db'}", "shoals", job_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    assert run.data.params["train.global_batch"] == "8"
    assert run.data.tags["shoal.recovery.1"].startswith("node spot-1 was lost; steps again from 19 after 0.49 s")
    found, others = wandb_holds(tmp_path / "wb")
    assert found["shoal/recoveries"] == [(20, 1), (40, 2)]
    made = [record.run for record in others if record.WhichOneof("record_type") == "run"]
    assert (made[0].run_id, made[0].project, made[0].display_name) == (job_id, "shoals", "tiny")
    assert "step 39: node spot-1 joined" in made[-1].notes


@pytest.mark.long
def test_safe_steps_that_are_done_again_all_the_same_are_written_anew(http: httpx.Client, tmp_path: Path) -> None:
    job_id, connector = begin(http, track=tracked(tmp_path), train={"steps": 30})
    told = Story(job=parse_job(job_mapping(train={"steps": 30})), cluster=snapshot(), now_s=time.time())
    told.state("starting", "planned", "starts")
    told.adopt(ALL_NODES, told.cluster, "first plan")
    told.state("running", "stepping", "training")
    told.train(10)
    told.evaluate(2.5)
    told.train(10)
    ok(connector.send(job_id, told.entries))
    eventually(lambda: {each["step"] for each in trackers(http, job_id).values()} == {19}, LIMIT_S)
    sent = len(told.entries)
    told.state("recovering", "nodes_lost", "more nodes were lost than there were copies")
    told.step = 5
    told.adopt(ALL_NODES, told.cluster, "from the store")
    told.state("running", "stepping", "training goes on")
    told.train(25, step_s=0.7)
    told.state("succeeded", "all_steps_done", "all steps are done")
    ok(connector.send(job_id, told.entries[sent:]))
    until_complete(http, job_id)
    assert metrics(http, job_id)["num_rolled_back"] == 15
    check_readers(http, job_id, tmp_path)
    old, new = sorted(
        mlflow_runs(f"sqlite:///{tmp_path / 'mlflow.db'}", "shoals", job_id), key=lambda run: run.data.tags["shoal.run"]
    )
    assert (old.info.status, new.info.status) == ("KILLED", "FINISHED")
    assert (old.info.run_name, new.info.run_name) == ("tiny (replaced)", "tiny")
    assert old.data.tags["shoal.replaced_by"] == new.data.tags["shoal.run"] == f"{job_id}-2"


@pytest.mark.long
def test_a_killed_control_plane_leaves_no_step_out_and_none_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed again and again while it writes, now and then between a write and its note."""
    monkeypatch.setenv("SHOAL_TRACKER_LEASE_S", "1")
    job = {"track": tracked(tmp_path), "train": {"steps": 440}}
    told = story(job_mapping(**job), started_at_s=time.time()).entries
    (port,) = free_ports(1)
    job_id, sent, reached = "", 0, 0
    for end in (60, 200, 330, len(told)):
        plane = start_control_plane(tmp_path / "data", port)
        with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
            connector = Connector(http=http)
            if not job_id:
                job_id, connector = begin(http, **job)
            ok(connector.renew(lease_s=300))
            ok(connector.send(job_id, told[sent:end]))
            sent = end
            if end < len(told):
                reached = until_written(http, job_id, reached)
                plane.kill()
                continue
            until_complete(http, job_id)
            check_readers(http, job_id, tmp_path)
            assert len(mlflow_runs(f"sqlite:///{tmp_path / 'mlflow.db'}", "shoals", job_id)) == 1
        assert plane.stop() == 0


@pytest.mark.long
def test_a_tracker_that_is_away_holds_nothing_up_and_gets_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    uri = f"http://127.0.0.1:{port}"
    track = {"mlflow": {"tracking_uri": uri}, "tensorboard": {"log_dir": (tmp_path / "tb").as_uri()}}
    told = story(job_mapping(track=track), started_at_s=time.time()).entries
    own = control_plane(tmp_path / "data", tracking_private="true")
    with own as plane, httpx.Client(base_url=plane.url, headers=plane.headers) as http:
        job_id, connector = begin(http, track=track)
        ok(connector.send(job_id, told[:20]))
        eventually(lambda: trackers(http, job_id)["mlflow"]["problem"], LIMIT_S)
        away = trackers(http, job_id)["mlflow"]
        assert away["problem"] == f"{uri} does not answer ([Errno 111] Connection refused)"
        assert (away["step"], away["complete"]) == (0, False) and away["problem_since"].endswith("Z")
        assert "Nothing goes to mlflow since" in http.get(f"/jobs/{job_id}", headers={"Accept": "text/html"}).text
        until_written(http, job_id)
        with mlflow_server(tmp_path / "server", port):
            ok(connector.send(job_id, told[20:]))
            until_complete(http, job_id)
            back = trackers(http, job_id)["mlflow"]
            (run,) = mlflow_runs(uri, "Default", job_id)
            assert back["problem"] is None and back["problem_since"] is None
            assert back["url"] == f"{uri}/#/experiments/0/runs/{run.info.run_id}"
            assert mlflow_holds(uri, run) == told_by_rest(metrics(http, job_id))


def test_of_two_replicas_one_writes_and_the_other_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TRACKER_LEASE_S", "3")
    track = {"tensorboard": tracked(tmp_path)["tensorboard"]}
    told = story(job_mapping(track=track), started_at_s=time.time()).entries
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(control_plane(tmp_path / "data")) for _ in range(2)]
        with httpx.Client(base_url=replicas[0].url, headers=replicas[0].headers) as http:
            job_id, connector = begin(http, track=track)
            ok(connector.send(job_id, told[:20]))
            until_written(http, job_id)
        (writes,) = (each for each in replicas if psutil.Process(each.process.pid).children())
        (other,) = (each for each in replicas if each is not writes)
        writes.kill()
        with httpx.Client(base_url=other.url, headers=other.headers) as http:
            ok(Connector(http=http).send(job_id, told[20:]))
            until_complete(http, job_id)
            held = tensorboard_holds(tmp_path / "tb" / f"tiny-{job_id}")
            assert held == single(told_by_rest(metrics(http, job_id)))


@pytest.mark.long
def test_a_tracker_that_hangs_is_given_up_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped: REST answers all the while, and another process goes on."""
    monkeypatch.setenv("SHOAL_TRACKER_TIMEOUT_S", "15")
    track = {"tensorboard": tracked(tmp_path)["tensorboard"]}
    told = story(job_mapping(track=track), started_at_s=time.time()).entries
    with control_plane(tmp_path / "data") as plane, httpx.Client(base_url=plane.url, headers=plane.headers) as http:
        job_id, connector = begin(http, track=track)
        ok(connector.send(job_id, told[:20]))
        until_written(http, job_id)
        (writer,) = psutil.Process(plane.process.pid).children()
        writer.suspend()
        ok(connector.send(job_id, told[20:]))
        eventually(lambda: trackers(http, job_id)["tensorboard"]["problem"] == "did not answer within 15 s", LIMIT_S)
        eventually(lambda: not writer.is_running(), LIMIT_S)
        until_complete(http, job_id)
        held = tensorboard_holds(tmp_path / "tb" / f"tiny-{job_id}")
        assert held == single(told_by_rest(metrics(http, job_id)))


def test_event_files_in_an_object_store_are_read_like_any_others(s3_uri: str, tmp_path: Path) -> None:
    from shoal_recovery.store import open_store

    track = {"tensorboard": {"log_dir": f"{s3_uri}/tb"}}
    with control_plane(tmp_path / "data") as plane, httpx.Client(base_url=plane.url, headers=plane.headers) as http:
        job_id, connector = begin(http, track=track)
        told = story(job_mapping(track=track), started_at_s=time.time()).entries
        for first in range(0, len(told), 25):
            ok(connector.send(job_id, told[first : first + 25]))
            wanted = max(0, ok(http.get(f"/v1/jobs/{job_id}"))["status"]["step"] - 1)
            eventually(lambda wanted=wanted: trackers(http, job_id)["tensorboard"]["step"] >= wanted, LIMIT_S)
        until_complete(http, job_id)
        store, run = open_store(f"{s3_uri}/tb"), tmp_path / "copy"
        run.mkdir()
        for name in store.list(f"tiny-{job_id}/"):
            (run / name.rpartition("/")[2]).write_bytes(store.read(name))
        assert tensorboard_holds(run) == single(told_by_rest(metrics(http, job_id)))


def test_a_run_folder_that_was_deleted_is_written_anew(http: httpx.Client, tmp_path: Path) -> None:
    track = {"tensorboard": tracked(tmp_path)["tensorboard"]}
    job_id, connector = begin(http, track=track)
    told = story(job_mapping(track=track), started_at_s=time.time()).entries
    ok(connector.send(job_id, told[:20]))
    until_written(http, job_id)
    (events,) = (tmp_path / "tb" / f"tiny-{job_id}").iterdir()
    events.unlink()
    ok(connector.send(job_id, told[20:]))
    until_complete(http, job_id)
    assert tensorboard_holds(tmp_path / "tb" / f"tiny-{job_id}") == single(told_by_rest(metrics(http, job_id)))


def test_the_end_of_a_job_and_what_is_no_number(http: httpx.Client, tmp_path: Path) -> None:
    track = {tool: tracked(tmp_path)[tool] for tool in ("tensorboard", "mlflow")}
    job_id, connector = begin(http, track=track)
    told = Story(job=parse_job(job_mapping()), cluster=snapshot(), now_s=time.time())
    told.state("starting", "planned", "starts")
    told.adopt(ALL_NODES, told.cluster, "first plan")
    told.state("running", "stepping", "training")
    told.train(4)
    told.state("failed", "step_refused", "step 5 is no finite number")
    entries = [entry_to_mapping(entry) for entry in told.entries]
    entries[-3] |= {"loss": "nan", "grad_norm": "inf", "skipped": True}
    body = {"cluster_id": connector.cluster_id, "holder": connector.holder, "entries": entries}
    ok(http.post(f"/v1/jobs/{job_id}/journal", json=body))
    until_complete(http, job_id)
    rest = told_by_rest(metrics(http, job_id))
    assert [step for step, _ in rest["train/loss"]] == [1, 2, 4]
    rest = {**rest, "train/skipped": [(3, 1.0)]}
    run_folder = tmp_path / "tb" / f"tiny-{job_id}"
    assert tensorboard_holds(run_folder) == single(rest)
    assert tensorboard_texts(run_folder, "shoal/state") == [(4, "failed: step 5 is no finite number")]
    (run,) = mlflow_runs(f"sqlite:///{tmp_path / 'mlflow.db'}", "shoals", job_id)
    assert mlflow_holds(f"sqlite:///{tmp_path / 'mlflow.db'}", run) == rest
    assert (run.info.status, run.data.tags["shoal.reason"]) == ("FAILED", "step 5 is no finite number")


def test_a_tool_that_is_not_installed_is_named_with_its_extra(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODULES, "wandb", "no_such_module")  # type: ignore[index]
    refused = api.post("/v1/jobs", json=job_mapping(track={"wandb": {"project": "p"}}))
    assert (refused.status_code, refused.json()["param"]) == (422, "track.wandb")
    assert (
        "the control plane lacks no_such_module: install shoal[wandb] from its wheel there" in refused.json()["detail"]
    )


@pytest.mark.parametrize(
    ("track", "param", "says"),
    [
        ({"tensorboard": {"log_dir": "/tmp/x"}}, "track.tensorboard.log_dir", "must begin with file:// or s3://"),
        ({"tensorboard": {"log_dir": "file:///proc/x"}}, "track.tensorboard.log_dir", "cannot be written"),
        ({"mlflow": {"tracking_uri": "file:///tmp/mlruns"}}, "track.mlflow.tracking_uri", "sqlite:////file"),
        ({"mlflow": {"tracking_uri": "http://me:pw@host"}}, "track.mlflow.tracking_uri", "must not carry credentials"),
        ({"wandb": {"project": "a/b"}}, "track.wandb.project", "must not contain '/'"),
        ({"wandb": {"project": "p", "mode": "of"}}, "track.wandb.mode", "must be one of online, offline"),
        ({"aim": {}}, "track.aim", "is not a known field"),
    ],
)
def test_what_cannot_be_tracked_is_refused(http: httpx.Client, track: Any, param: str, says: str) -> None:
    refused = http.post("/v1/jobs", json=job_mapping(track=track))
    assert refused.status_code == 422 and refused.json()["param"] == param
    assert says in refused.json()["detail"] and "me:pw" not in refused.text
