"""Jobs of kind ray_train: what their fields may be, and that fields of one kind are refused in the other."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_planner.script_spec import ScriptSpec, any_job_to_mapping, parse_any_job

SCRIPT: dict[str, Any] = {
    "kind": "ray_train",
    "name": "tuned",
    "script": {"path": "train.py", "working_dir": "file:///home/me/project", "args": ["--lr", "0.1"]},
    "workers": {"min": 2, "max": 4},
    "checkpoint": {"uri": "s3://bucket/runs"},
}
TRAIN: dict[str, Any] = {
    "name": "quickstart",
    "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 256},
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 4, "seq_len": 16, "steps": 3},
}


def refused(change: dict[str, Any], base: dict[str, Any] = SCRIPT) -> str:
    with pytest.raises(InvalidField) as refusal:
        parse_any_job(base | change)
    return str(refusal.value)


def test_a_script_is_read_and_written_as_it_is() -> None:
    job = parse_any_job(SCRIPT)
    assert isinstance(job, ScriptSpec)
    assert (job.workers.min, job.workers.max, job.workers.resources) == (2, 4, {"CPU": 1.0})
    assert parse_any_job(any_job_to_mapping(job)) == job


def test_a_job_without_a_kind_is_one_of_kind_train_and_written_as_ever() -> None:
    job = parse_any_job(TRAIN)
    assert isinstance(job, JobSpec)
    assert job == parse_any_job(TRAIN | {"kind": "train"})
    assert any_job_to_mapping(job) == job_to_mapping(job)
    assert "kind" not in job_to_mapping(job)


@pytest.mark.parametrize("name", ["model", "data", "train", "track"])
def test_what_a_script_says_itself_is_refused_by_name(name: str) -> None:
    given = {name: TRAIN.get(name, {"wandb": {"project": "p"}})}
    assert refused(given).startswith(f"{name} = ")
    assert "of no use with kind 'ray_train'" in refused(given)


@pytest.mark.parametrize("name", ["script", "workers"])
def test_what_a_script_has_is_refused_by_name_in_a_job_of_kind_train(name: str) -> None:
    message = refused({name: SCRIPT[name]}, TRAIN)
    assert message.startswith(f"{name} = ") and "belongs to a job of kind 'ray_train'" in message


def test_a_script_has_no_plan() -> None:
    with pytest.raises(InvalidField, match="kind = 'ray_train': is a script of its user's"):
        parse_job(SCRIPT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "spark"}, "kind = 'spark': must be one of train, ray_train"),
        ({"script": {}}, "script.entrypoint = None: is required where there is no script.path"),
        ({"script": {"path": "a.py", "entrypoint": "a"}}, "script.entrypoint = 'a': is given beside script.path"),
        ({"script": {"path": "a.py"}}, "script.path = 'a.py': is relative, and there is no script.working_dir"),
        ({"script": {"path": "../a.py", "working_dir": "file:///a"}}, "script.path = '../a.py': must be a file"),
        ({"script": {"entrypoint": "a b"}}, "script.entrypoint = 'a b': must be a module"),
        ({"script": {"entrypoint": "a", "working_dir": "project"}}, "script.working_dir = 'project': must be a folder"),
        ({"script": {"entrypoint": "a", "pip": [" "]}}, "script.pip[0] = ' ': must be a requirement"),
        ({"script": {"entrypoint": "a", "py_modules": ["x"]}}, "script.py_modules[0] = 'x': must be a folder"),
        ({"workers": {"min": 3, "max": 2}}, "workers.min = 3: must be at most max (2)"),
        ({"workers": {"max": 0}}, "workers.max = 0: must be"),
        ({"workers": {"max": 1, "resources": {"CPU": -1.0}}}, "workers.resources.CPU = -1.0: must be zero or more"),
        ({"workers": {"max": 1, "resources": {}}}, "workers.resources = {}: must take something"),
        ({"checkpoint": {"uri": "/tmp"}}, "checkpoint.uri = '/tmp': must begin with file:// or s3://"),
        ({"checkpoint": {"uri": "file:///a", "copies": 1}}, "checkpoint.copies = 1: is not a known field"),
        ({"checkpoint": {}}, "checkpoint.uri = None: is required"),
        ({"limits": {"budget_usd": -2}}, "limits.budget_usd = -2.0: must be more than zero"),
        ({"limits": {"min_devices": 2}}, "limits.min_devices = 2: is not a known field"),
    ],
)
def test_what_cannot_be_is_refused_with_field_and_value(change: dict[str, Any], words: str) -> None:
    assert words in refused(change)
