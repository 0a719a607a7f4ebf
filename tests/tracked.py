"""What trackers hold of a job, by their own readers, beside what the control plane says of it; and an MLflow server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from servers import free_ports
from waiting import eventually

Curves = Mapping[str, list[tuple[int, float]]]
_OF_STEPS = ("loss", "grad_norm", "lr", "tokens_per_s", "duration_s")
_OF_EVALUATIONS = ("loss", "perplexity", "duration_s")


def told_by_rest(metrics: Mapping[str, Any]) -> Curves:
    """`GET /v1/jobs/ID/metrics` as trackers name it: (step, value) in the order of steps."""
    assert not metrics["downsampled"]
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    groups = (("train", metrics["points"], _OF_STEPS), ("eval", metrics["evaluations"], _OF_EVALUATIONS))
    for group, points, names in groups:
        for point in points:
            for name in names:
                if point[name] is not None:
                    found[f"{group}/{name}"].append((point["step"], point[name]))
    return dict(found)


def single(curves: Curves) -> Curves:
    """In single precision, as TensorBoard keeps figures."""
    return {name: [(step, float(np.float32(value))) for step, value in points] for name, points in curves.items()}


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """What libraries warn of in their own code is none of our affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@_unwarned()
def tensorboard_reader(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return reader


def tensorboard_holds(run: Path) -> Curves:
    reader = tensorboard_reader(run)
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def tensorboard_texts(run: Path, tag: str) -> list[tuple[int, str]]:
    reader = tensorboard_reader(run)
    return [(one.step, one.tensor_proto.string_val[0].decode()) for one in reader.Tensors(tag)]


@_unwarned()
def mlflow_runs(uri: str, experiment: str, job_id: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    wanted = f"tags.`shoal.job_id` = '{job_id}'"
    return list(client.search_runs([found.experiment_id], filter_string=wanted, order_by=["attributes.start_time"]))


@_unwarned()
def mlflow_holds(uri: str, run: Any) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return {
        name: sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
    }


@_unwarned()
def wandb_holds(folder: Path) -> tuple[Curves, list[Any]]:
    """What stands in the only offline run below `folder`, and its records of other kinds than history."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    others = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            others.append(record)
            continue
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in row.items():
            if not name.startswith("_"):
                found[name].append((row["_step"], value))
    return dict(found), others


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """Its URI, once it answers. What it holds stays in `folder`."""
    port = port or free_ports(1)[0]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder / 'runs.db'}"]
    command += ["--default-artifact-root", str(folder / "files"), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}
    with (folder / "log").open("ab") as log:
        server = subprocess.Popen(
            [*command, "--workers", "1"], env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def answers() -> bool:
        assert server.poll() is None, (folder / "log").read_text(errors="replace")
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        return False

    try:
        eventually(answers, 120)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait(10)
