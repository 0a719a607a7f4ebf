"""Trackers of a control plane that keeps what it knows in PostgreSQL: their readers find the
metrics of a job on real raylets across the loss of a node, and across the death of the control plane that wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from control_plane import start_control_plane
from plain_ray import PlainRay
from postgres import start_postgres
from running import BATCH, LIMIT_S, check_curve, job_mapping
from servers import free_ports
from tracked import mlflow_holds, mlflow_runs, single, tensorboard_holds, told_by_rest
from waiting import eventually

from shoal.client import Client

STEPS = 200  # the control plane hears of short steps half a second later; there must be some left to lose a node in


@pytest.mark.long
def test_readers_find_the_metrics_across_losses_of_a_node_and_of_a_control_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_ray: Callable[[str], PlainRay]
) -> None:
    monkeypatch.setenv("SHOAL_TRACKER_LEASE_S", "3")
    mlflow = f"sqlite:///{tmp_path / 'mlflow.db'}"
    track = {"tensorboard": {"log_dir": (tmp_path / "tb").as_uri()}, "mlflow": {"tracking_uri": mlflow}}
    with contextlib.ExitStack() as stack:
        postgres = start_postgres()
        stack.callback(postgres.close)
        (port,), database = free_ports(1), postgres.new_database()
        first = start_control_plane(tmp_path / "data", port, database_url=database)
        stack.callback(first.stop)
        client = stack.enter_context(Client(first.url, first.token))
        cluster = start_ray("one")
        cluster.add("one-z")
        cluster.connect("one", first.environment())
        job_id = client.submit(job_mapping(STEPS) | {"track": track})["id"]
        eventually(lambda: max(each["step"] for each in client.get(job_id)["trackers"]) >= 5, LIMIT_S)
        first.kill()
        cluster.kill("one-z")
        second = start_control_plane(tmp_path / "data", port, database_url=database)
        stack.callback(second.stop)
        assert client.wait(job_id, timeout_s=LIMIT_S)["status"]["state"] == "succeeded"
        events = list(client.events(job_id))
        check_curve(events, STEPS, BATCH)
        assert [event["node"] for event in events if event["kind"] == "node_lost"] == ["one-z"]
        eventually(lambda: all(each["complete"] for each in client.get(job_id)["trackers"]), LIMIT_S)
        rest = told_by_rest(client.metrics(job_id))
        assert tensorboard_holds(tmp_path / "tb" / f"e2e-{job_id}") == single(rest)
        (run,) = mlflow_runs(mlflow, "Default", job_id)
        assert mlflow_holds(mlflow, run) == rest
