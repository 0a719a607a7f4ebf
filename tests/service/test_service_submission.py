"""Submitting jobs: what is created, what is refused, and that a refusal creates nothing."""

from __future__ import annotations

import html
import itertools
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from control_plane import Connector, job_mapping, ok
from lora_ground import save_llama
from servers import READER

from shoal_planner.job import parse_job
from shoal_recovery.first_weights import fingerprint
from shoal_service.submission import MOST_JOB_BYTES


def refusal(response: Any, status: int = 422) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert {"type", "title", "status", "detail", "code", "param"} <= set(problem)
    return problem


def no_jobs(api: httpx.Client) -> bool:
    return ok(api.get("/v1/jobs"))["items"] == []


def test_a_job_is_created_queued_and_waits_for_a_cluster(api: httpx.Client) -> None:
    response = api.post("/v1/jobs", json=job_mapping())
    assert response.status_code == 201
    job = response.json()
    assert job["id"].startswith("job_")
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert parse_job(job["spec"]) == parse_job(job_mapping())
    assert job["wish"] == "run"
    assert job["status"]["state"] == "queued"
    assert job["status"]["reason"] == "waits for a cluster to connect"
    assert job["status"]["steps"] == 60
    shown = ok(api.get(f"/v1/jobs/{job['id']}"))
    assert shown.pop("share")["nodes"] == []
    assert shown == {**job, "cluster": None, "problem": None, "trackers": []}


def test_yaml_is_the_same_job(api: httpx.Client) -> None:
    text = yaml.safe_dump(job_mapping())
    job = ok(api.post("/v1/jobs", content=text, headers={"Content-Type": "application/yaml"}))
    assert job["spec"] == ok(api.post("/v1/jobs", json=job_mapping()))["spec"]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"modle": {}}, "modle", ("did you mean 'model'",)),
        ({"model": {"hiden": 64}}, "model.hiden", ("64", "did you mean 'hidden'")),
        ({"model": {"heads": 5}}, "model.heads", ("5", "must divide hidden (64)")),
        ({"model": {"kv_heads": 3}}, "model.kv_heads", ("3", "must divide heads (4)")),
        ({"model": {"layers": 0}}, "model.layers", ("0", "at least 1")),
        ({"model": {"layers": "many"}}, "model.layers", ("'many'", "whole number")),
        ({"model": {"preset": "llama-77b"}}, "model.preset", ("llama-77b", "did you mean llama-7b")),
        ({"train": {"lr": -1}}, "train.lr", ("-1", "more than zero")),
        ({"limits": {"deadline": "tomorrow"}}, "limits.deadline", ("tomorrow", "must be a moment")),
        ({"train": {"schedule": "gpipe"}}, "train.schedule", ("'gpipe'", "interleaved", "zero_bubble")),
        ({"data": {"uri": "ftp://b/x"}}, "data.uri", ("ftp://b/x", "or begin with")),
        ({"name": ""}, "name", ("1 to 100",)),
    ],
)
def test_fields_are_refused_by_name(
    api: httpx.Client, changes: dict[str, Any], param: str, words: tuple[str, ...]
) -> None:
    problem = refusal(api.post("/v1/jobs", json=job_mapping(**changes)))
    assert problem["param"] == param
    assert problem["detail"].startswith(f"{param} = ")
    assert all(word in problem["detail"] for word in words), problem["detail"]
    assert no_jobs(api)


def sized(num_bytes: int) -> dict[str, Any]:
    """A job of exactly so many bytes as JSON without spaces."""
    job = job_mapping()
    job["labels"] = {"more": ""}
    job["name"] = "\N{GREEK SMALL LETTER ALPHA}"  # two bytes of UTF-8, six of escaped JSON
    missing = num_bytes - len(json.dumps(job, ensure_ascii=False, separators=(",", ":")).encode())
    job["labels"]["more"] = "x" * missing
    return job


@pytest.mark.parametrize("way", ["json", "yaml", "dry_run", "plan", "clone", "page"])
def test_a_job_that_is_too_large_is_refused_wherever_it_is_given(api: httpx.Client, way: str) -> None:
    job = sized(MOST_JOB_BYTES + 1)
    match way:
        case "json":
            answer = api.post("/v1/jobs", json=job)
        case "yaml":
            headers = {"Content-Type": "application/yaml"}
            answer = api.post("/v1/jobs", content=yaml.safe_dump(job), headers=headers)
        case "dry_run":
            answer = api.post("/v1/jobs", json=job, params={"dry_run": "1"})
        case "plan":
            answer = api.post("/v1/plans", json={"job": job})
        case "clone":
            first = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
            labels = {"overrides": {"labels": {"more": "x" * MOST_JOB_BYTES}}}
            answer = api.post(f"/v1/jobs/{first}/clone", json=labels)
        case _:
            answer = api.post("/new/preview", data={"job": json.dumps(job)})
            if answer.headers["content-type"].startswith("text/html"):
                assert f"at most {MOST_JOB_BYTES} are taken" in answer.text
                return
    problem = refusal(answer, 413)
    assert problem["code"] == "job_too_large"
    assert f"at most {MOST_JOB_BYTES} are taken" in problem["detail"]
    if way != "clone":
        assert problem["detail"].startswith(f"the job has {MOST_JOB_BYTES + 1} bytes as JSON")
        assert no_jobs(api)


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 8))


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("".join(f"k{n}: [1, 2, 3, abc, {{x: y}}]\n" for n in range(6000)), 400, ("line 1112", "10000 values")),
        (BOMB, 400, ("line 5", "10000 values")),
        (f"a: &a {'x' * 1000}\nb: [{', '.join(['*a'] * 400)}]", 400, ("line 2", "320000 characters")),
        ("- 1\n- &a [*a]", 400, ("line 2", "*a stands inside of what it names")),
        ("name: &a [*a]", 400, ("line 1", "*a stands inside of what it names")),
        ("[" * 200 + "]" * 200, 400, ("line 1", "100 levels")),
        ("name: 0x" + "f" * 10_000, 400, ("line 1", "10002 characters")),
        ("name: 1" + ":01" * 1000 + ".5", 400, ("line 1",)),
        ("#" * 262_145, 413, ("262145 bytes", "at most 262144")),
        ("2020-01-01: x", 422, ("a name that is no text",)),
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs?dry_run=1", "/new/preview"])
def test_text_that_costs_more_to_read_than_to_send_is_refused(
    api: httpx.Client, path: str, text: str, status: int, words: tuple[str, ...]
) -> None:
    if path.startswith("/v1"):
        detail = refusal(api.post(path, content=text, headers={"Content-Type": "application/yaml"}), status)["detail"]
    else:
        answer = api.post(path, data={"job": text})
        assert answer.status_code == status
        detail = html.unescape(answer.text)
    assert all(word in detail for word in words), detail[:1000]
    assert no_jobs(api)


def test_json_that_is_too_long_is_not_read(api: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    problem = refusal(api.post("/v1/jobs", content=b"[" + b" " * 262_144, headers=headers), 413)
    assert problem["code"] == "job_too_large"


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/jobs", '{"name": "a", "model": {}, "name": "b"}', "name"),
        ("/v1/jobs", '{"name": "a", "model": {"layers": 1, "layers": 2}}', "layers"),
        ("/v1/plans", '{"job": {"name": "a", "name": "b"}}', "name"),
        ("/v1/projects", '{"id": "one", "id": "two"}', "id"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_name(api: httpx.Client, path: str, body: str, key: str) -> None:
    problem = refusal(api.post(path, content=body, headers={"Content-Type": "application/json"}), 400)
    assert problem["code"] == "malformed_body"
    assert problem["detail"] == f"body: the key {key!r} stands twice in one object"


def test_a_job_may_name_a_part_of_itself_again(api: httpx.Client) -> None:
    text = yaml.safe_dump(job_mapping()) + "labels: {one: &a few words, other: *a}\n"
    answer = api.post("/v1/jobs", content=text, headers={"Content-Type": "application/yaml"})
    assert answer.status_code == 201, answer.text
    assert answer.json()["spec"]["labels"] == {"one": "few words", "other": "few words"}


def test_a_job_that_is_just_as_large_as_it_may_be_is_looked_at(api: httpx.Client) -> None:
    assert refusal(api.post("/v1/jobs", json=sized(MOST_JOB_BYTES)))["param"].startswith("labels")


def script_job(pip: list[str], store: str) -> dict[str, Any]:
    return {
        "kind": "ray_train",
        "name": "s",
        "script": {"path": "/x.py", "pip": pip},
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"uri": store},
        "metric": "loss",
    }


@pytest.mark.parametrize(
    ("pip", "index", "words"),
    [
        (["einops==0.8.1", "evaluate >= "], 1, "'evaluate >= '"),
        (["einops=0.8"], 0, "'einops=0.8'"),
        (["two words"], 0, "'two words'"),
        (["torch", "numpy", "[x]"], 2, "'[x]'"),
        (["a==1; python_version"], 0, "'a==1; python_version'"),
    ],
)
def test_requirements_that_pip_could_not_read_are_refused(
    api: httpx.Client, pip: list[str], index: int, words: str
) -> None:
    job = job_mapping() | {"model": {"entrypoint": "mine:build"}, "code": {"pip": pip}}
    problem = refusal(api.post("/v1/jobs", json=job))
    assert problem["param"] == f"code.pip[{index}]"
    assert words in problem["detail"] and "must be a requirement, as in" in problem["detail"]
    script = script_job(pip, "file:///nowhere")
    assert refusal(api.post("/v1/jobs", json=script))["param"] == f"script.pip[{index}]"
    assert no_jobs(api)


@pytest.mark.parametrize(
    "requirement",
    [
        "einops",
        "einops==0.8.1",
        "evaluate[all]>=0.4,<1; python_version > '3.10'",
        "mine @ https://example.org/mine-1.0-py3-none-any.whl",
        "git+https://example.org/mine.git@main",
        "https://example.org/mine-1.0-py3-none-any.whl",
        "--extra-index-url https://example.org/simple",
    ],
)
def test_requirements_that_pip_reads_are_taken(api: httpx.Client, tmp_path: Path, requirement: str) -> None:
    job = script_job([requirement], tmp_path.as_uri())
    assert ok(api.post("/v1/jobs", json=job))["spec"]["script"]["pip"] == [requirement]


def test_data_must_be_there_readable_and_large_enough(api: httpx.Client, tmp_path: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_text("short")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, words in (
        (tmp_path / "missing.txt", "does not exist"),
        (small, "holds 5 bytes; train.seq_len = 32 needs at least 33"),
        (empty, "holds 0 bytes"),
    ):
        problem = refusal(api.post("/v1/jobs", json=job_mapping(data={"uri": path.as_uri()})))
        assert problem["param"] == "data.uri"
        assert str(path) in problem["detail"] and words in problem["detail"]
    problem = refusal(api.post("/v1/jobs", json=job_mapping(data={"uri": "file://relative/path"})))
    assert "absolute path" in problem["detail"]
    evaluates = {"eval_every": 5, "eval_batches": 1}
    data = {"uri": "stdlib:", "eval_uri": small.as_uri()}
    problem = refusal(api.post("/v1/jobs", json=job_mapping(data=data, train=evaluates)))
    assert problem["param"] == "data.eval_uri"
    assert "holds 5 bytes; train.seq_len = 32 and evaluations on 8 sequences needs at least 257" in problem["detail"]
    assert no_jobs(api)
    small.write_text("long enough " * 10)
    assert ok(api.post("/v1/jobs", json=job_mapping(data={"uri": small.as_uri()})))["id"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_data(api: httpx.Client, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("x" * 100)
    secret.chmod(0)
    problem = refusal(api.post("/v1/jobs", json=job_mapping(data={"uri": secret.as_uri()})))
    assert "ermission denied" in problem["detail"]


def test_checkpoint_place_must_be_writable(api: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.write_text("in the way")
    problem = refusal(api.post("/v1/jobs", json=job_mapping(checkpoint={"uri": f"{file.as_uri()}/ckpt"})))
    assert problem["param"] == "checkpoint.uri"
    assert "cannot be written" in problem["detail"] and str(file) in problem["detail"]
    assert no_jobs(api)
    place = tmp_path / "ckpt"
    assert ok(api.post("/v1/jobs", json=job_mapping(checkpoint={"uri": place.as_uri()})))["id"]


@pytest.mark.parametrize(
    ("uri", "environment", "words"),
    [
        ("{place}", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "refuses the credentials"),
        ("{place}", dict(zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), READER, strict=True)), "denies"),
        ("s3://vanished/x", {}, "has no bucket 'vanished'"),
        ("gs://bucket/x", {}, "must begin with file:// or s3://"),
        ("{place}", {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}, "does not answer"),
    ],
)
def test_a_store_that_cannot_be_written_is_refused(
    uri: str, environment: dict[str, str], words: str, s3_uri: str, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is created, by field and value, as a real S3 server says."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = uri.format(place=s3_uri)
    problem = refusal(api.post("/v1/jobs", json=job_mapping(checkpoint={"uri": place})))
    assert problem["param"] == "checkpoint.uri"
    assert problem["detail"].startswith(f"checkpoint.uri = {place!r}")
    assert words in problem["detail"]
    assert no_jobs(api)


def test_a_job_that_no_node_can_hold(api: httpx.Client, connector: Connector) -> None:
    ok(connector.renew())
    huge = job_mapping(model={"layers": 80, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248})
    problem = refusal(api.post("/v1/jobs", json=huge))
    assert problem["code"] == "no_plan_fits"
    assert "GiB" in problem["detail"]
    problem = refusal(api.post("/v1/jobs", json=job_mapping(limits={"device_types": ["H100-80G"]})))
    assert problem["code"] in ("no_plan_fits", "invalid_field")
    assert "H100-80G" in problem["detail"]
    assert no_jobs(api)


@pytest.mark.parametrize(
    ("content", "content_type", "status", "words"),
    [
        ("name: a\nmodel: [1\ntrain: 2\n", "application/yaml", 400, "line 3"),
        ("name: a\nname: b\n", "application/yaml", 400, "line 2"),
        ('{"name": "a",\n oops}', "application/json", 400, "line 2"),
        ("just text", "application/yaml", 422, "mapping"),
        ("[]", "application/json", 422, "mapping"),
        ("a=b", "application/x-www-form-urlencoded", 415, "application/yaml"),
        (b"\xff\xfe", "application/yaml", 400, "UTF-8"),
        ("#" * 17_000_000, "application/yaml", 413, "16777216"),
        ("[" * 100_000, "application/json", 400, "nested"),
        (f'{{"name": {"9" * 5000}}}', "application/json", 400, "digits"),
        (f"name: {'9' * 5000}", "application/yaml", 400, "characters"),
        ("", "application/yaml", 422, "job is empty"),
        ("null", "application/json", 422, "job is empty"),
    ],
)
def test_malformed_bodies(api: httpx.Client, content: Any, content_type: str, status: int, words: str) -> None:
    problem = refusal(api.post("/v1/jobs", content=content, headers={"Content-Type": content_type}), status)
    assert words in problem["detail"]
    assert no_jobs(api)


def test_an_idempotency_key_makes_one_job(api: httpx.Client) -> None:
    key = {"Idempotency-Key": "k1"}
    first = ok(api.post("/v1/jobs", json=job_mapping(), headers=key))
    text = yaml.safe_dump(job_mapping())
    again = api.post("/v1/jobs", content=text, headers={**key, "Content-Type": "application/yaml"})
    assert (again.status_code, again.json()["id"]) == (201, first["id"])
    problem = refusal(api.post("/v1/jobs", json=job_mapping(name="other"), headers=key), 409)
    assert problem["code"] == "idempotency_key_reused"
    assert "k1" in problem["detail"] and problem["job_id"] == first["id"]
    assert len(ok(api.get("/v1/jobs"))["items"]) == 1


def test_pages_of_jobs(api: httpx.Client) -> None:
    ids = [ok(api.post("/v1/jobs", json=job_mapping(name=f"n{index}")))["id"] for index in range(5)]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = ok(api.get("/v1/jobs", params={"limit": 2, **({"cursor": cursor} if cursor else {})}))
        assert len(page["items"]) <= 2
        seen += [job["id"] for job in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(seen) == sorted(ids)
    assert seen == sorted(seen, reverse=True)
    assert ok(api.get("/v1/jobs", params={"state": "running"}))["items"] == []
    for params, param in (({"limit": 0}, "limit"), ({"limit": 999}, "limit"), ({"state": "odd"}, "state")):
        problem = refusal(api.get("/v1/jobs", params=params))
        assert problem["param"] == param
        assert str(params[param]) in problem["detail"]
    assert refusal(api.get("/v1/jobs", params={"cursor": "%%%"}))["param"] == "cursor"


def test_previews_create_nothing(api: httpx.Client, connector: Connector) -> None:
    cluster = {"nodes": [{"name": "n", "count": 2, "device": "A100-80G", "devices": 1}]}
    plan = ok(api.post("/v1/plans", json={"job": job_mapping(), "cluster": cluster}))
    assert plan["pipelines"] and plan["predicted"]["step_s"] > 0 and plan["seed"] == 0
    assert refusal(api.post("/v1/plans", json={"job": job_mapping()}), 409)["code"] == "no_cluster"
    ok(connector.renew())
    nodes = {
        replica["node"]
        for pipeline in ok(api.post("/v1/plans", json={"job": job_mapping()}))["pipelines"]
        for stage in pipeline["stages"]
        for replica in stage["replicas"]
    }
    assert nodes <= {"big-0", "big-1", "spot-0", "spot-1"}
    problem = refusal(api.post("/v1/plans", json={"job": job_mapping(), "cluster": {"nodes": []}}))
    assert problem["param"] == "cluster.nodes" and "at least one node" in problem["detail"]
    problem = refusal(api.post("/v1/plans", json={"job": job_mapping(model={"heads": 3}), "cluster": cluster}))
    assert problem["param"] == "model.heads"
    for changes in ({"sharding": "none"}, {"schedule": "zero_bubble"}):
        found = ok(api.post("/v1/plans", json={"job": job_mapping(train=changes), "cluster": cluster}))
        assert found["schedule"] == changes.get("schedule", "1f1b")
        assert (found["sharding"]["optimizer"] == "none") == ("sharding" in changes)
    assert no_jobs(api)


NUMBERS = (
    "job.train.lr",
    "job.model.rope_theta",
    "cluster.nodes[0].price_per_hour",
    "cluster.nodes[0].host_memory_gib",
    "cluster.devices.T4.memory_gib",
    "cluster.links[0].latency_ms",
)


def test_numbers_that_are_none_are_refused_everywhere(api: httpx.Client) -> None:
    for param, value in itertools.product(NUMBERS, ("NaN", "Infinity", "9" * 400, "1e999")):
        asked: Any = {
            "job": job_mapping(model={"rope_theta": 1.0}),
            "cluster": {
                "nodes": [{"name": "n", "device": "T4", "price_per_hour": 1, "host_memory_gib": 1}],
                "devices": {"T4": {"memory_gib": 1}},
                "links": [{"from": "x", "to": "y", "gbit_per_s": 1, "latency_ms": 1}],
            },
        }
        at = asked
        *parents, last = param.replace("[0]", ".0").split(".")
        for name in parents:
            at = at[int(name)] if name == "0" else at[name]
        at[last] = "PLACE"
        content = json.dumps(asked).replace('"PLACE"', value)
        problem = refusal(api.post("/v1/plans", content=content, headers={"Content-Type": "application/json"}))
        assert problem["param"] == param.removeprefix("job.")
        assert "must be a finite number" in problem["detail"] or "too large" in problem["detail"]


def test_unknown_routes_and_methods_are_problems(api: httpx.Client) -> None:
    assert refusal(api.get("/v1/nope"), 404)["code"] == "no_such_route"
    assert refusal(api.delete("/v1/jobs"), 405)["code"] == "method_not_allowed"
    problem = refusal(api.get("/v1/jobs/job_x"), 404)
    assert problem["code"] == "job_not_found" and "job_x" in problem["detail"]


def test_openapi_documents_the_refusals(api: httpx.Client) -> None:
    paths = ok(api.get("/openapi.json"))["paths"]
    assert {"400", "401", "403", "409", "422"} <= set(paths["/v1/jobs"]["post"]["responses"])
    for path, operations in paths.items():
        for operation in operations.values():
            if "health" not in path:
                assert "application/problem+json" in operation["responses"]["401"]["content"]


def test_a_job_with_adapters_knows_from_then_on_what_they_are_beside(api: httpx.Client, tmp_path: Path) -> None:
    save_llama(tmp_path / "base")
    found = fingerprint((tmp_path / "base").as_uri(), None)
    document = job_mapping(train={"lora": {"rank": 4}}) | {"model": {"hf": (tmp_path / "base").as_uri()}}
    spec = ok(api.post("/v1/jobs", json=document))["spec"]
    assert spec["train"]["lora"] == {"rank": 4, "alpha": 8.0, "targets": "all-linear", "dropout": 0.0, "base": found}
    assert "lora" not in spec["model"]
    assert ok(api.post("/v1/jobs", json=spec))["spec"] == spec
    document["train"]["lora"]["base"] = "sha256:other"
    problem = refusal(api.post("/v1/jobs", json=document))
    assert problem["param"] == "train.lora.base"
    assert f"is not that of {(tmp_path / 'base').as_uri()}, {found}" in problem["detail"]
    document["train"]["lora"] = {"rank": 4, "targets": ["q", "x"]}
    assert refusal(api.post("/v1/jobs", json=document))["param"] == "train.lora.targets[1]"
