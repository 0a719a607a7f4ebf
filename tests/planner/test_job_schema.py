"""The JSON Schema of jobs: it takes what Shoal takes, refuses what a field alone shows, explains all."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from shoal.cli import run
from shoal_planner.errors import InvalidField
from shoal_planner.job_schema import job_schema
from shoal_planner.script_spec import parse_any_job

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
JOBS = [
    path
    for path in sorted(EXAMPLES.glob("*.yaml"))
    if not {"nodes", "offers"} & set(yaml.safe_load(path.read_text(encoding="utf-8")))
]
VALIDATOR = Draft202012Validator(job_schema())
QUICKSTART = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text(encoding="utf-8"))
SCRIPT = yaml.safe_load((EXAMPLES / "ray-train.yaml").read_text(encoding="utf-8"))


def changed(job: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    found = copy.deepcopy(dict(job))
    *parents, name = path.split(".")
    place = found
    for parent in parents:
        place = place.setdefault(parent, {})
    place[name] = value
    return found


def without(job: Mapping[str, Any], path: str) -> dict[str, Any]:
    found = changed(job, path, None)
    place = found
    *parents, name = path.split(".")
    for parent in parents:
        place = place[parent]
    del place[name]
    return found


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(job_schema())
    json.dumps(job_schema(), allow_nan=False)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_examples_are_jobs_and_tell_editors_so(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=http://127.0.0.1:8700/v1/schemas/job"
    assert [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    "job",
    [
        {**QUICKSTART, "model": {"preset": "qwen3-0.6b", "vocab": 256}},
        {**QUICKSTART, "model": {"hf": "file:///models/llama"}},
        changed(QUICKSTART, "train.lora", {"rank": 8, "targets": ["q", "v"]}),
        changed(
            QUICKSTART, "data", {"mix": [{"uri": "stdlib:", "weight": 2}, {"uri": "file:///x", "format": "jsonl"}]}
        ),
        changed(QUICKSTART, "checkpoint.copies", 2),
        changed(QUICKSTART, "track", {"mlflow": {"tracking_uri": "http://mlflow:5000"}}),
        changed(QUICKSTART, "kind", "train"),
        changed(SCRIPT, "labels", {"team": "search"}),
    ],
)
def test_what_jobs_may_say_is_taken(job: dict[str, Any]) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(job)] == []


@pytest.mark.parametrize(
    "job",
    [
        changed(QUICKSTART, "model.hiden", 64),
        changed(QUICKSTART, "model.layers", "8"),
        changed(QUICKSTART, "model.layers", 0),
        changed(QUICKSTART, "train.steps", 1.5),
        changed(QUICKSTART, "train.global_batch", 100_000),
        changed(QUICKSTART, "train.on_nan", "hope"),
        changed(QUICKSTART, "train.betas", [0.9]),
        changed(QUICKSTART, "checkpoint.copies", "many"),
        changed(QUICKSTART, "workers", {"max": 2}),
        changed(QUICKSTART, "labels", {"team": 7}),
        changed(QUICKSTART, "kind", "other"),
        without(QUICKSTART, "name"),
        without(QUICKSTART, "train.seq_len"),
        without(QUICKSTART, "model.hidden"),
        changed(SCRIPT, "train", {}),
        without(SCRIPT, "checkpoint"),
        {**QUICKSTART, "model": {"preset": "gpt-9"}},
        [],
    ],
)
def test_what_no_job_may_say_is_refused_as_shoal_refuses_it(job: Any) -> None:
    assert not VALIDATOR.is_valid(job)
    with pytest.raises(InvalidField):
        parse_any_job(job)


def _undescribed(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, each in schema.get("properties", {}).items():
        at = f"{path}.{name}" if path else name
        if not each.get("description"):
            yield at
        for part in (each, each.get("items", {}), *each.get("anyOf", ())):
            yield from _undescribed(part, at)


def test_every_field_is_described() -> None:
    schema = job_schema()
    assert [*_undescribed(schema["then"]), *_undescribed(schema["else"])] == []


def test_the_command_line_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "job"]) == 0
    assert json.loads(capsys.readouterr().out) == job_schema()
    assert run(["schema", "jobs"]) == 2
