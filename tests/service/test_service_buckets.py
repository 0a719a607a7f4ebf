"""Buckets that a job names without a storage profile are reached with credentials of the operator's, so the operator
says which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import job_mapping, ok

from shoal_planner.errors import InvalidField
from shoal_service.buckets import EVERYWHERE, read_buckets
from shoal_service.places import Places
from shoal_service.settings import Settings

MIX = {"mix": [{"uri": "s3://text/a", "storage": "store"}, {"uri": "s3://text/b"}]}


@pytest.mark.parametrize(
    "allowed, uri",
    [
        ("s3://", "s3://any/where"),
        ("s3://one, s3://two", "s3://two"),
        ("s3://one/team", "s3://one/team"),
        ("s3://one/team", "s3://one/team/run%2D7"),
        ("s3://one/team/", "s3://one//team/x"),
        ("", "file:///folder"),
        ("", "stdlib:"),
    ],
)
def test_what_is_listed_is_allowed(allowed: str, uri: str) -> None:
    read_buckets(allowed).check("checkpoint.uri", uri, profiled=False)


@pytest.mark.parametrize(
    "allowed, uri",
    [
        ("", "s3://one"),
        ("s3://one", "s3://one-b/x"),
        ("s3://one/team", "s3://one/team-b"),
        ("s3://one/team", "s3://one"),
        ("s3://one/team", "s3://one/team/../other"),
        ("s3://one/team", "s3://one/team/%2e%2e/other"),
        ("s3://one", "S3://two"),
    ],
)
def test_what_is_not_listed_is_refused(allowed: str, uri: str) -> None:
    with pytest.raises(InvalidField, match="SHOAL_AMBIENT_STORAGE") as caught:
        read_buckets(allowed).check("checkpoint.uri", uri, profiled=False)
    assert (caught.value.field, caught.value.value) == ("checkpoint.uri", uri)
    read_buckets(allowed).check("checkpoint.uri", uri, profiled=True)


@pytest.mark.parametrize(
    "job, field",
    [
        ({"checkpoint": {"uri": "s3://one/x"}}, "checkpoint.uri"),
        ({"data": {"uri": "stdlib:", "eval_uri": "s3://one/x"}}, "data.eval_uri"),
        ({"data": MIX}, "data.mix[1].uri"),
        ({"train": {"init_from": "s3://one/x", "storage": "store"}}, "train.init_from"),
        ({"track": {"tensorboard": {"log_dir": "s3://one/x"}}}, "track.tensorboard.log_dir"),
        ({"kind": "ray_train", "script": {"working_dir": "s3://one/x.zip"}}, "script.working_dir"),
        ({"data": {"uri": "s3://one", "storage": None}}, "data.uri"),
    ],
)
def test_every_place_of_a_job_is_looked_at(job: Mapping[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        Places(roots=(), buckets=read_buckets("")).check(job)
    assert caught.value.field == field
    Places(roots=(), buckets=read_buckets("s3://one,s3://text")).check(job)


def test_a_place_with_a_profile_is_the_profiles_business() -> None:
    data = {"uri": "s3://one/x", "eval_uri": "s3://one/y", "storage": "store"}
    Places(roots=(), buckets=read_buckets("")).check({"data": data, "checkpoint": {"uri": "s3://two", "storage": "b"}})


@pytest.mark.parametrize(
    "given, allowed",
    [
        ({}, EVERYWHERE),
        ({"host": "::1"}, EVERYWHERE),
        ({"host": "0.0.0.0"}, ()),
        ({"behind_proxy": True}, ()),
        ({"ambient_storage": ""}, ()),
        ({"host": "0.0.0.0", "ambient_storage": "s3://one, s3://two/x"}, ("s3://one", "s3://two/x")),
    ],
)
def test_without_a_word_only_who_is_alone_may_name_any(
    tmp_path: Path, given: dict[str, Any], allowed: tuple[str, ...]
) -> None:
    assert Settings(data_dir=tmp_path, **given).places.buckets.allowed == allowed


@pytest.mark.parametrize("text", ["one", "https://one", "s3://one/../two"])
def test_a_wrong_list_is_refused_when_the_server_starts(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=f"{text!r} must be s3://bucket"):
        Settings(data_dir=tmp_path, ambient_storage=text)


@pytest.mark.parametrize("settings", [{"ambient_storage": "s3://ours"}], indirect=True)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_job_with_another_bucket_is_refused_before_anybody_opens_it(api: httpx.Client) -> None:
    job = job_mapping(checkpoint={"uri": "s3://theirs/run"})
    for path, body in (("/v1/jobs", job), ("/v1/jobs?dry_run=1", job), ("/v1/plans", {"job": job})):
        refused = api.post(path, json=body)
        assert (refused.status_code, refused.json()["param"]) == (422, "checkpoint.uri")
        assert "checkpoint.uri = 's3://theirs/run': must lie in s3://ours" in refused.json()["detail"]
    assert ok(api.get("/v1/jobs"))["items"] == []
