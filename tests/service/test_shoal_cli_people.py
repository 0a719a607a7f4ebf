"""The command line about people: signing in on this machine, tokens, projects, and what was done."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import ControlPlane, job_mapping, ok, snapshot

from shoal import Client, cli
from shoal.connect import connector_token
from shoal.errors import NotAllowed
from shoal_planner.cluster import snapshot_to_mapping
from shoal_workers.control_plane import ControlPlane as FromCluster


@pytest.fixture
def shell(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs a command line as somebody whose own folder is `tmp_path`; returns status, standard output and error."""
    for name in ("SHOAL_SERVER", "SHOAL_TOKEN", "SHOAL_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "mine"))

    def run(*arguments: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = cli.run(list(arguments))
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def answer(shell: Any, *arguments: str) -> Any:
    status, out, err = shell(*arguments, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1), (out, err)
    return json.loads(out)


def test_login_keeps_a_token_for_its_owner_alone(shell: Any, plane: ControlPlane, tmp_path: Path) -> None:
    status, _, err = shell("login", "--server", plane.url, "--token-stdin", typed="shoal_wrong\n")
    assert status == 1 and "not known here" in err
    assert not (tmp_path / "mine").exists()
    status, out, _ = shell("login", "--server", plane.url + "/", "--token-stdin", typed=plane.token + "\n")
    assert (status, out) == (0, f"signed in to {plane.url} as administrator\n")
    kept = tmp_path / "mine/credentials.json"
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in kept.parent.iterdir()] == ["credentials.json"]
    assert answer(shell, "whoami")["server_admin"] is True  # at the same server, without a word about it
    status, out, _ = shell("logout")
    assert status == 0 and plane.token not in kept.read_text()


def test_projects_members_and_tokens(shell: Any, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SERVER", plane.url)
    monkeypatch.setenv("SHOAL_TOKEN", plane.token)
    assert answer(shell, "project", "create", "vision")["id"] == "vision"
    added = answer(shell, "project", "add", "vision", "Ada@example.org", "--role", "admin")
    assert (added["email"], added["role"]) == ("ada@example.org", "admin")
    assert [each["user_id"] for each in answer(shell, "project", "members", "vision")["items"]] == [added["user_id"]]
    status, out, _ = shell("project", "members", "vision")
    assert status == 0 and "ada@example.org" in out
    assert shell("project", "remove", "vision", "ada@example.org")[0] == 0
    assert shell("project", "remove", "vision", "ada@example.org")[0] == 2
    assert "vision" in [each["id"] for each in answer(shell, "project", "list")["items"]]

    status, secret, err = shell("token", "create", "for ci", "--project", "vision", "--days", "7")
    assert status == 0 and secret.startswith("shoal_") and secret.count("\n") == 1 and "member of project vision" in err
    monkeypatch.setenv("SHOAL_TOKEN", secret.strip())
    me = answer(shell, "whoami")
    assert [(each["id"], each["role"]) for each in me["projects"]] == [("vision", "member")]
    status, _, err = shell("project", "create", "more")
    assert status == 1 and "needs an administrator of this server" in err
    with Client() as client:
        job = client.submit(job_mapping())
        assert job["project"] == "vision" and [each["id"] for each in client.list(project="vision")] == [job["id"]]

    monkeypatch.setenv("SHOAL_TOKEN", plane.token)
    assert [each["name"] for each in answer(shell, "token", "list")["items"]] == ["for ci"]
    assert answer(shell, "token", "revoke", me["id"])["valid"] is False
    status, out, _ = shell("audit", "--project", "vision", "--action", "job.create")
    assert status == 0 and job["id"] in out and "for ci" in out
    assert len(answer(shell, "audit", "--limit", "2")["items"]) == 2
    assert shell("project", "delete", "vision")[0] == 1  # it has had a job
    assert shell("project", "delete", "nowhere")[0] == 2


def test_a_connector_speaks_for_its_cluster_alone(plane: ControlPlane, http: httpx.Client) -> None:
    with Client(plane.url, plane.token) as client:
        secret = connector_token(client, "mine")
        foreign = connector_token(client, "another")
        member = client.people.create_token("a member", role="member", project="default")["secret"]
    with Client(plane.url, secret) as client:
        assert connector_token(client, "mine") == secret  # a connector's token is taken as it is
        with pytest.raises(NotAllowed):
            client.nodes()
    with Client(plane.url, member) as client, pytest.raises(NotAllowed):
        connector_token(client, "mine")

    mine, another = (
        FromCluster(plane.url, token, cluster, holder="me")
        for token, cluster in ((secret, "mine"), (foreign, "another"))
    )
    sent = snapshot_to_mapping(snapshot())
    job_id = ok(http.post("/v1/jobs", json=job_mapping()))["id"]
    for each in (mine, another):
        each.offer(sent, {}, 60.0, fault_tolerant_head=False)
    assert [wish.id for wish in mine.wishes(0, 0.0).jobs if wish.id == job_id] == [job_id]
    assert mine.wants(job_id) and mine.wants("job_nobody_knows")
    assert not another.wants(job_id)  # or it would go on with a job that is not its own
    assert mine.history(job_id) == [] and mine.profile() is not None
    wrong = httpx.get(f"{plane.url}/v1/clusters/mine/wishes", headers={"Authorization": f"Bearer {foreign}"})
    assert (wrong.status_code, wrong.json()["code"]) == (403, "role")
    for each in (mine, another):
        each._http.close()
