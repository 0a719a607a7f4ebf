"""The metrics of a job that loses a node, as TensorBoard's and MLflow's own readers find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from running import Running, check_history, job_mapping
from tracked import (
    mlflow_holds,
    mlflow_runs,
    single,
    tensorboard_holds,
    tensorboard_texts,
    told_by_rest,
    wandb_holds,
)
from waiting import eventually

STEPS = 48
EVALUATED = [8, 16, 24, 32, 40, 48]
LIMIT_S = 120.0


def complete(running: Running, job_id: str) -> bool:
    found = running.client.get(job_id)["trackers"]
    assert [each["problem"] for each in found if not each["complete"]] == []
    return True


@pytest.mark.long
def test_readers_find_the_metrics_of_the_job_across_a_recovery(running: Running, tmp_path: Path) -> None:
    mlflow = f"sqlite:///{tmp_path / 'mlflow.db'}"
    track = {
        "tensorboard": {"log_dir": (tmp_path / "tb").as_uri()},
        "mlflow": {"tracking_uri": mlflow, "experiment_name": "survival", "run_name": "loses a node"},
        "wandb": {"project": "survival", "mode": "offline", "dir": str(tmp_path / "wb")},
    }
    job: dict[str, Any] = job_mapping(STEPS) | {"track": track}
    job["train"] |= {"eval_every": 8, "eval_batches": 1}
    job_id = running.submit(job)
    running.until_step(job_id, 10)
    node = running.plan(job_id)["plan"]["pipelines"][-1]["stages"][0]["replicas"][0]["node"]
    running.kill(node)
    recovery = running.until_event(job_id, "recovery_done")
    events = running.finish(job_id)
    assert recovery["nodes_lost"] == [node]
    assert [event["step"] for event in events if event["kind"] == "evaluation_done"] == EVALUATED

    eventually(lambda: complete(running, job_id), LIMIT_S)
    rest = told_by_rest(running.client.metrics(job_id))
    assert [step for step, _ in rest["train/loss"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in rest["eval/loss"]] == EVALUATED
    run_folder = tmp_path / "tb" / f"e2e-{job_id}"
    assert tensorboard_holds(run_folder) == single(rest)
    recoveries = [event["step"] for event in events if event["kind"] == "recovery_done"]
    assert [step for step, _ in tensorboard_texts(run_folder, "shoal/recoveries")] == recoveries
    (run,) = mlflow_runs(mlflow, "survival", job_id)
    assert mlflow_holds(mlflow, run) == rest
    assert (run.info.run_name, run.info.status) == ("loses a node", "FINISHED")
    found, _ = wandb_holds(tmp_path / "wb")
    assert {name: points for name, points in found.items() if name != "shoal/recoveries"} == rest


@pytest.mark.long
def test_a_killed_control_plane_goes_on_with_trackers_where_it_was(running: Running, tmp_path: Path) -> None:
    """While the job trains, and it loses a node while nobody writes to its trackers."""
    mlflow = f"sqlite:///{tmp_path / 'mlflow.db'}"
    track = {"tensorboard": {"log_dir": (tmp_path / "tb").as_uri()}, "mlflow": {"tracking_uri": mlflow}}
    job_id = running.submit(job_mapping(STEPS) | {"track": track})
    eventually(lambda: max(each["step"] for each in running.client.get(job_id)["trackers"]) >= 5, LIMIT_S)
    node = running.plan(job_id)["plan"]["pipelines"][-1]["stages"][0]["replicas"][0]["node"]
    psutil.Process(running.shoal.server_pid).kill()
    running.kill(node)
    running.shoal.start_server()
    events = running.finish(job_id)
    check_history(events, STEPS)
    eventually(lambda: complete(running, job_id), LIMIT_S)
    rest = told_by_rest(running.client.metrics(job_id))
    assert tensorboard_holds(tmp_path / "tb" / f"e2e-{job_id}") == single(rest)
    (run,) = mlflow_runs(mlflow, "Default", job_id)
    assert mlflow_holds(mlflow, run) == rest
