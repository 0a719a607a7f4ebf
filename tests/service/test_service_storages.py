"""Storage profiles: who makes them, what jobs do with them, and that no access is kept or answered but by name."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from control_plane import Connector, ControlPlane, Story, control_plane, job_mapping, ok
from servers import RunningServer

from shoal import Client, cli
from shoal_planner.errors import InvalidField
from shoal_planner.job import parse_job
from shoal_recovery.checkpoints import list_manifests
from shoal_recovery.errors import StoreRefused
from shoal_recovery.journal import CheckpointCommitted, StoreFailed
from shoal_recovery.storage_access import StoreAccess, located, split_access, without_access
from shoal_recovery.store import open_store

SECRET = "hunter2-which-is-no-name"


@pytest.fixture
def bucket(seaweedfs: RunningServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a server of which only the profile knows: nothing else of this test's environment leads there."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("SHOAL_STORAGE_TEAM_ACCESS_KEY_ID", seaweedfs.key)
    monkeypatch.setenv("SHOAL_STORAGE_TEAM_SECRET_ACCESS_KEY", seaweedfs.secret)
    keys = {"aws_access_key_id": seaweedfs.key, "aws_secret_access_key": seaweedfs.secret}
    client = boto3.client("s3", endpoint_url=seaweedfs.endpoint, region_name="us-east-1", **keys)
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        client.create_bucket(Bucket="shoal-tests")
    client.close()
    return f"shoal-tests/{uuid.uuid4().hex}"


@pytest.fixture
def access(seaweedfs: RunningServer) -> StoreAccess:
    return StoreAccess(endpoint=seaweedfs.endpoint, keys="TEAM")


def test_a_place_carries_its_access(bucket: str, access: StoreAccess) -> None:
    place = located(f"s3://{bucket}/some/prefix", access)
    assert split_access(place.removeprefix("s3://").partition("/")[0]) == ("shoal-tests", access)
    store = open_store(place)
    store.check_writable()
    store.put("a/b", b"content")
    # Whoever appends to a place, or takes its bucket apart, still has its access.
    assert open_store(f"{place}/a").read("b") == b"content"
    assert open_store(place.removesuffix("/some/prefix")).read("some/prefix/a/b") == b"content"
    assert without_access({"x": [f"{place}: does not answer"]}) == {
        "x": [f"s3://{bucket}/some/prefix: does not answer"]
    }


def test_credentials_that_are_not_here(access: StoreAccess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreRefused, match="has no SHOAL_STORAGE_TEAM_ACCESS_KEY_ID"):
        open_store(located("s3://b/c", access))
    with pytest.raises(StoreRefused, match="has no section shoal-team"):
        open_store(located("s3://b/c", StoreAccess(profile="team")))


def test_a_section_of_the_credentials_file(
    bucket: str, seaweedfs: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = f"aws_access_key_id = {seaweedfs.key}\naws_secret_access_key = {seaweedfs.secret}\n"
    (tmp_path / "credentials").write_text(f"[shoal-team]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    open_store(located(f"s3://{bucket}/x", StoreAccess(endpoint=seaweedfs.endpoint, profile="team"))).check_writable()


@pytest.mark.parametrize(
    "netloc", ["me:secret@bucket", "endpoint=ftp%3A%2F%2Fx@bucket", "keys=lower@bucket", "@bucket"]
)
def test_what_is_no_access(netloc: str) -> None:
    with pytest.raises(InvalidField) as refused:
        split_access(netloc)
    assert "secret" not in str(refused.value)


@pytest.fixture
def plane(tmp_path: Path, bucket: str) -> Iterator[ControlPlane]:
    with control_plane(tmp_path / "plane") as running:
        yield running


@pytest.fixture
def http(plane: ControlPlane) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=60) as client:
        yield client


def stored(uri: str, **storage: Any) -> dict[str, Any]:
    return job_mapping(checkpoint={"uri": uri, **storage})


def test_jobs_use_the_profiles_of_their_project(
    plane: ControlPlane,
    http: httpx.Client,
    bucket: str,
    seaweedfs: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path, uri = "/v1/projects/default/storages/minio", f"s3://{bucket}/jobs"
    refused = http.post("/v1/jobs", json=stored(uri, storage="minio"))
    assert refused.status_code == 422 and refused.json()["param"] == "checkpoint.storage"
    assert "'minio': is no storage of project default, which has: none" in refused.json()["detail"]
    body = {"endpoint": seaweedfs.endpoint, "credentials": {"environment": "TEAM"}}
    made = http.put(path, json=body)
    assert made.status_code == 201 and made.json()["credentials"] == {"environment": "TEAM", "profile": None}
    assert http.put(path, json=body).status_code == 200
    assert http.post("/v1/jobs", json=stored(uri)).status_code == 422, "nothing but the profile leads there"
    spec = stored(uri, storage="minio") | {"data": {"uri": f"s3://{bucket}/text", "storage": "minio"}}
    job = ok(http.post("/v1/jobs", json=spec))
    assert job["spec"]["checkpoint"]["uri"] == uri and job["spec"]["checkpoint"]["storage"] == "minio"
    job_id = job["id"]

    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    (wish,) = connector.wishes()["jobs"]
    told = parse_job(wish["spec"])  # as those in the cluster read it
    assert told.checkpoint.uri == located(uri, StoreAccess(endpoint=seaweedfs.endpoint, keys="TEAM"))
    assert told.checkpoint.storage is None and told.data.uri is not None and "@" in told.data.uri
    open_store(str(told.checkpoint.uri)).check_writable()

    story = Story(job=told, cluster=connector.cluster, now_s=time.time())
    story.state("starting", "planned", f"writes to {told.checkpoint.uri}")
    place = str(told.checkpoint.uri)
    story.add(CheckpointCommitted(step=1, epoch=1, uri=place, num_bytes=5, duration_s=0.1))
    story.add(StoreFailed(uri=place, step=2, problem=f"{place}: does not answer"))
    ok(connector.send(job_id, story.entries))
    answers = [http.get(f"/v1/jobs/{job_id}{rest}").text for rest in ("", "/events", "/checkpoints")]
    answers.append(http.get(f"/jobs/{job_id}").text)
    assert all("endpoint=" not in answer and "TEAM" not in answer for answer in answers)
    assert f"writes to s3://{bucket}/jobs" in answers[0]
    assert ok(http.get(f"/v1/jobs/{job_id}/checkpoints")) == {"uri": uri, "items": []}
    assert list_manifests(open_store(place), job_id) == ()

    refused = http.delete(path)
    assert (refused.status_code, refused.json()["code"]) == (409, "storage_in_use")
    assert refused.json()["job_id"] == job_id
    monkeypatch.setenv("SHOAL_SERVER", plane.url)
    monkeypatch.setenv("SHOAL_TOKEN", plane.token)
    assert cli.run(["storage", "list", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["items"]] == ["minio"]
    assert cli.run(["export", job_id, str(tmp_path / "out")]) == 2
    assert f"has no checkpoint of {job_id}" in capsys.readouterr().err  # it was looked for, and there is none yet
    assert cli.run(["generate", job_id, "--prompt", "a"]) == 2
    none_yet = "nor a checkpoint; of a job that runs 'shoal checkpoint ID' stores one"
    said = capsys.readouterr().err
    assert said.startswith(f"shoal: WHAT = '{job_id}': cannot be used: ") and none_yet in said
    assert cli.run(["storage", "set", "more", "--region", "eu-west-1", "--profile", "team"]) == 0
    assert "credentials in the section shoal-team" in capsys.readouterr().out
    assert cli.run(["storage", "delete", "more", "--json"]) == 0
    story.state("failed", "x", "it failed")
    ok(connector.send(job_id, story.entries))
    assert http.delete(path).status_code == 204 and ok(http.get("/v1/projects/default/storages"))["items"] == []


def test_what_a_profile_may_not_say(plane: ControlPlane, http: httpx.Client) -> None:
    said = []
    for body, param in (
        ({"endpoint": f"https://me:{SECRET}@minio"}, "endpoint"),
        ({"endpoint": "ftp://minio"}, "endpoint"),
        ({"endpoint": "http://minio:99999"}, "endpoint"),
        ({"endpoint": "http://minio\x00:9000"}, "endpoint"),
        ({"endpoint": "http://minio/bucket"}, "endpoint"),
        ({"region": "EU west"}, "region"),
        ({"credentials": {"environment": SECRET}}, "credentials.environment"),
        ({"credentials": {"profile": SECRET.upper()}}, "credentials.profile"),
        ({"credentials": {"environment": "A", "profile": "a"}}, "credentials"),
        ({"credentials": {"environment": SECRET * 5}}, "credentials.environment"),
        ({"secret_access_key": SECRET}, "secret_access_key"),
    ):
        refused = http.put("/v1/projects/default/storages/minio", json=body)
        assert refused.status_code == 422 and refused.json()["param"].endswith(param), refused.text
        said.append(refused.text)
    for uri in (f"s3://me:{SECRET}@bucket/x", "s3://endpoint=http%3A%2F%2Fevil&keys=TEAM@bucket/x"):
        refused = http.post("/v1/jobs", json=stored(uri))
        assert refused.status_code == 422 and "how that is reached, a storage profile" in refused.text
        said.append(refused.text)
    for wrong, words in (
        (stored("file:///tmp/x", storage="minio"), "is for places that begin with s3://"),
        (stored("s3://b/c", storage="Min io"), "must be the name of a storage profile"),
        (job_mapping(data={"storage": "minio"}), "is for places that begin with s3://"),
    ):
        refused = http.post("/v1/jobs", json=wrong)
        assert refused.status_code == 422 and words in refused.text, refused.text
    assert http.put("/v1/projects/nowhere/storages/minio", json={}).json()["code"] == "project_not_found"
    assert http.get("/v1/projects/default/storages/minio").json()["code"] == "storage_not_found"
    kept = [path.read_bytes() for path in plane.data_dir.rglob("*") if path.is_file()]
    assert not any(SECRET in text for text in said)
    assert not any(SECRET.encode() in content or SECRET.upper().encode() in content for content in kept)


def test_profiles_of_other_projects_do_not_exist(plane: ControlPlane, http: httpx.Client) -> None:
    ok(http.post("/v1/projects", json={"id": "other"}))
    ok(http.put("/v1/projects/other/storages/theirs", json={"region": "eu-1"}))
    with Client(plane.url, plane.token) as client:
        mine = client.people.create_token("m", role="admin", project="default")["secret"]
    with httpx.Client(base_url=plane.url, headers={"Authorization": f"Bearer {mine}"}) as member:
        assert member.get("/v1/projects/other/storages").status_code == 404
        assert member.put("/v1/projects/default/storages/x", json={}).status_code == 403
        refused = member.post("/v1/jobs", json=stored("s3://b/c", storage="theirs"))
        assert refused.status_code == 422 and "which has: none" in refused.text
