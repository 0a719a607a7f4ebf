"""A user's script in its own process, and what is set of its trainers: without a cluster."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayActorError
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from shoal_workers.script_places import slots
from shoal_workers.script_words import loss_of, metrics_of
from shoal_workers.train_policy import Link, Reporter, died_with_its_node
from shoal_workers.train_shim import TrainerOrder, run_of, scaling_of

TRAINER: dict[str, Any] = {
    "job": "job_x",
    "attempt": 1,
    "storage": "s3://bucket/runs",
    "keep": None,
    "min_workers": 2,
    "max_workers": 4,
    "resources": {"CPU": 2.0},
}
ORDER = TrainerOrder(**TRAINER)
LIMIT_S = 120.0


def order_of(tmp_path: Path, lifeline: int, **what: str | None) -> str:
    order = {
        "path": None,
        "entrypoint": None,
        "lifeline": lifeline,
        "report": str(tmp_path / "report.json"),
        "secrets": {},
    }
    return json.dumps({**order, "raylet": "", "trainer": TRAINER, **what})


def start(tmp_path: Path, *arguments: str, **what: str | None) -> tuple[subprocess.Popen[str], int]:
    """The process, and the end of its lifeline that keeps it alive."""
    ends, held = os.pipe()
    command = [sys.executable, "-m", "shoal_workers.script_main", order_of(tmp_path, ends, **what), *arguments]
    process = subprocess.Popen(
        command, cwd=tmp_path, pass_fds=(ends,), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    os.close(ends)
    return process, held


def outcome(tmp_path: Path, *arguments: str, **what: str | None) -> tuple[int, str, dict[str, str]]:
    """Exit status, output, and what it wrote down of its failure."""
    process, held = start(tmp_path, *arguments, **what)
    said, _ = process.communicate(timeout=LIMIT_S)
    os.close(held)
    report = tmp_path / "report.json"
    return process.returncode, said, json.loads(report.read_text()) if report.exists() else {}


def test_a_script_is_main_and_has_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "train.py").write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.WORD)\n")
    assert outcome(tmp_path, "--lr", "1", path="train.py") == (0, "__main__ ['--lr', '1'] beside\n", {})


def test_an_entrypoint_is_a_module_or_a_function_of_one(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("def main():\n    print('called')\nprint(__name__)\n")
    assert outcome(tmp_path, entrypoint="package.train")[:2] == (0, "__main__\n")
    assert outcome(tmp_path, entrypoint="package.train:main")[:2] == (0, "package.train\ncalled\n")


def test_what_a_script_fails_with_is_told_in_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def deep():\n    raise ValueError('boom')\n\ndeep()\n")
    status, _, report = outcome(tmp_path, path="train.py")
    assert (status, report["code"], report["problem"]) == (1, "script_failed", "ValueError: boom")
    assert report["traceback"].count("File") == 2 and "line 2, in deep" in report["traceback"]


def test_a_script_says_how_it_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    assert outcome(tmp_path, path="train.py") == (3, "", {})


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ({"path": "none.py"}, "script.path = 'none.py': there is no such file"),
        ({"entrypoint": "nowhere"}, "script.entrypoint = 'nowhere': there is no module 'nowhere'"),
        ({"entrypoint": "nowhere.train:main"}, "there is no module 'nowhere'"),
        ({"entrypoint": "json:nothing"}, "script.entrypoint = 'json:nothing': module 'json' has no function 'nothing'"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, what: dict[str, str], problem: str) -> None:
    status, said, report = outcome(tmp_path, **what)
    assert (status, report["code"], report["traceback"]) == (1, "script_missing", "")
    assert problem in report["problem"] and problem in said


def test_a_script_ends_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import threading\nprint('runs', flush=True)\nthreading.Event().wait()\n")
    process, held = start(tmp_path, path="train.py")
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    os.close(held)
    assert process.wait(LIMIT_S) == -9
    process.stdout.close()


def test_scaling_is_the_jobs_and_the_rest_the_scripts() -> None:
    said: dict[str, str] = {}
    given = ScalingConfig(num_workers=8, use_gpu=True, placement_strategy="SPREAD")
    made = scaling_of(given, ORDER, said)
    assert (made.num_workers, made.use_gpu, made.resources_per_worker) == ((2, 4), False, {"CPU": 2.0})
    assert made.placement_strategy == "SPREAD"
    assert said == {
        "num_workers": "2 to 4 (the script said 8)",
        "resources_per_worker": "{'CPU': 2.0} (the script said nothing)",
        "use_gpu": "False (the script said True)",
    }
    assert given.num_workers == 8, "the script's own is left as it is"


def test_storage_and_name_are_the_jobs_and_failures_are_counted_as_the_script_says() -> None:
    said: dict[str, str] = {}
    config = CheckpointConfig(num_to_keep=9, checkpoint_score_attribute="loss")
    given = RunConfig(
        name="mine", storage_path="/home", failure_config=FailureConfig(max_failures=2), checkpoint_config=config
    )
    made = run_of(given, ORDER, 1, said)
    assert (made.name, made.storage_path, made.failure_config.max_failures) == ("job_x", "s3://bucket/runs", 2)
    assert made.checkpoint_config is config
    assert run_of(given, ORDER, 2, {}).name == "job_x-2"
    assert set(said) == {"storage_path", "name", "failure_config"}
    kept = run_of(given, TrainerOrder(**{**TRAINER, "keep": 3}), 1, said).checkpoint_config
    assert (kept.num_to_keep, kept.checkpoint_score_attribute) == (3, "loss")
    assert said["checkpoint_config.num_to_keep"] == "3 (the script said 9)"


def test_figures_are_what_json_can_carry() -> None:
    reported = {
        "loss": torch.tensor(0.5),
        "accuracy": np.float32(0.25),
        "step": np.int64(3),
        "done": True,
        "bad": math.nan,
        "note": "x" * 600,
        "table": [1, 2],
    }
    found = metrics_of(reported)
    assert json.loads(json.dumps(found)) == found
    assert (found["loss"], found["accuracy"], found["done"], found["bad"]) == (0.5, 0.25, True, "nan")
    assert (found["step"], len(found["note"]), found["table"]) == (3, 500, "[1, 2]")
    assert (loss_of(found, "loss"), loss_of(found, "bad"), loss_of(found, "none")) == (0.5, None, None)


def test_a_worker_that_died_with_its_node_is_told_from_one_that_only_died() -> None:
    """By Ray's own words, also where workers were only being started."""
    gone = RayActorError(error_msg="The actor died because its node has died. Node Id: 69c7")
    killed = RayActorError(error_msg="The actor is dead because its worker process has died.")
    seen = WorkerHealthCheckFailedError("no answer", failure=gone)
    assert died_with_its_node(ControllerError(gone)) and not died_with_its_node(ControllerError(killed))
    assert not died_with_its_node(ControllerError(RuntimeError("its node has died")))
    assert died_with_its_node(WorkerGroupError("", {0: RuntimeError("connection reset"), 1: seen}))
    assert not died_with_its_node(WorkerGroupError("", {0: killed}))


@pytest.mark.parametrize(
    ("offered", "wanted", "expected"),
    [
        ({"CPU": 8.0}, {"CPU": 1.0}, 8),
        ({"CPU": 8.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}, 2),
        ({"CPU": 8.0}, {"CPU": 1.0, "GPU": 1.0}, 0),
        ({"CPU": 8.0}, {"CPU": 3.0, "GPU": 0.0}, 2),
        ({}, {"CPU": 1.0}, 0),
    ],
)
def test_workers_fit_by_what_they_take(offered: dict[str, float], wanted: dict[str, float], expected: int) -> None:
    assert slots(offered, wanted) == expected


class Group:
    """Of Ray Train's workers, as far as a callback sees it."""

    _callbacks: tuple[()] = ()

    def __init__(self) -> None:
        self.running = True

    def get_workers(self) -> list[Any]:
        return []

    def has_started(self) -> bool:
        return self.running

    def shutdown(self) -> None:
        assert self.running
        self.running = False


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_group_that_ray_forgot_is_ended_before_the_next(monkeypatch: pytest.MonkeyPatch, forgotten: bool) -> None:
    """As it does where a worker dies between the start of the group and that of its function."""
    reporter = Reporter("job_x", 1, 1, "s3://bucket/runs")
    answers = {"places": {"slots": {"n1": 1, "n0": 2}}, "workers_started": {"epoch": 1}}
    monkeypatch.setattr(Link, "call", lambda link, what, *arguments: answers[what])
    group = Group()
    reporter.after_worker_group_start(group)
    if not forgotten:
        group.shutdown()
    selector = reporter.on_controller_start_worker_group(scaling_config=None, num_workers=2)
    assert (selector, group.running) == ({"ray.io/node-id": "in(n0,n1)"}, False)
