"""The command line as users run it: exit statuses, what goes to which stream, sentences that name field and value."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from control_plane import CLUSTER, Connector, ControlPlane, Story, job_mapping, ok, story
from servers import free_ports

from shoal import cli
from shoal.local_shoal import LocalOptions, LocalShoal, LocalShoalFailed
from shoal_planner.job import parse_job


def shoal(*arguments: str, plane: ControlPlane | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    base = plane.environment() if plane else dict(os.environ)
    return subprocess.run(
        [sys.executable, "-c", "from shoal.cli import main; main()", *arguments],
        env={**base, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_package_runs_as_the_program_does() -> None:
    command = [sys.executable, "-m", "shoal"]
    said = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert (said.returncode, said.stdout) == (0, shoal("--help").stdout)
    wrong = subprocess.run([*command, "plan"], capture_output=True, text=True, timeout=120, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, shoal("plan").stderr)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_mapping(model={"layers": 2}, train={"global_batch": 2})))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """In this process, where nothing depends on it being another one."""
    status = cli.run(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_plan_and_score_agree(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, cluster = str(files / "job.yaml"), str(files / "cluster.yaml")
    status, out, err = run(capsys, "plan", job, "--cluster", cluster, "--json", "--seed", "3", "--explain")
    assert (status, err, out.count("\n")) == (0, "", 1)
    plan = json.loads(out)
    assert plan["seed"] == 3 and plan["pipelines"] and plan["truncated"] is False
    (files / "plan.json").write_text(out)
    status, out, err = run(capsys, "score", str(files / "plan.json"), job, "--cluster", cluster, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["predicted"] == plan["predicted"]
    assert json.loads(out)["plan_id"] == plan["plan_id"]
    status, out, err = run(capsys, "score", str(files / "plan.json"), job, "--cluster", cluster)
    assert status == 0 and "PIPELINE" in out and "predicted" in out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("job.yaml", "name: a\nmodel: [1\ntrain: 2\n", ("job.yaml, line 3", "not valid YAML")),
        ("job.yaml", yaml.safe_dump(job_mapping(model={"hiden": 1})), ("model.hiden = 1", "did you mean 'hidden'")),
        ("job.yaml", yaml.safe_dump(job_mapping(model={"heads": 5})), ("model.heads = 5", "must divide hidden (64)")),
        ("job.yaml", None, ("job.yaml", "No such file")),
        ("cluster.yaml", "devices: {}\n", ("cluster.yaml", "nodes = None", "at least one node")),
        ("job.yaml", "", ("job.yaml: the job is empty",)),
        ("cluster.yaml", "", ("cluster.yaml: the cluster is empty",)),
        (
            "cluster.yaml",
            "nodes:\n  - {name: a, device: T4, host_memory_gib: .inf}\n",
            ("nodes[0].host_memory_gib = inf: must be a finite number",),
        ),
        (
            "cluster.yaml",
            f"nodes:\n  - {{name: a, device: T4, disk_gib: {'9' * 400}}}\n",
            ("cluster.yaml, line 2:", "a whole number has 400 characters"),
        ),
        ("cluster.yaml", "nodes:\n  - {name: a, device: T4, price_per_hour: .nan}\n", ("= nan", "finite number")),
        (
            "cluster.yaml",
            f"nodes:\n  - {{name: a, device: T4, devices: 0x{'f' * 9000}}}\n",
            ("cluster.yaml, line 2:", "a whole number has 9002 characters"),
        ),
        ("cluster.yaml", "nodes:\n  - {name: a, device: T4, group_gb_per_s: -3}\n", ("= -3.0: must be more than",)),
        ("cluster.yaml", "nodes:\n  - {name: a, device: T4, device_group: 2}\n", ("must be at most devices (1)",)),
        (
            "cluster.yaml",
            "nodes:\n  - {name: a, device: T4}\ndevices: {T4: {memory_gib: .inf}}\n",
            ("devices.T4.memory_gib = inf: must be a finite number",),
        ),
        (
            "cluster.yaml",
            "nodes:\n  - {name: a, device: T4}\nlinks: [{from: a, to: b, gbit_per_s: .nan, latency_ms: 1}]\n",
            ("links[0].gbit_per_s = nan: must be a finite number",),
        ),
        ("cluster.yaml", "nodes: []\n", ("cluster.yaml", "nodes = []", "at least one node")),
        ("cluster.yaml", "nodes:\n  - {name: a, device: X9}\n", ("cluster.yaml", "'X9'", "not a known device type")),
        (
            "cluster.yaml",
            "nodes:\n  - {name: a, device: T4}\ndevices: {T4: {memory_gib: 0.1}}\n",
            ("no plan of this job fits", "which has"),
        ),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, words: tuple[str, ...]
) -> None:
    path = files / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    status, out, err = run(capsys, "plan", str(files / "job.yaml"), "--cluster", str(files / "cluster.yaml"), "--json")
    assert (status, out) == (2, "")
    assert err.startswith("shoal: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_tp_must_divide_heads(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replica = {"node": "big-0", "devices": [0, 1, 2], "tp": 3, "samples": 2}
    stage = {"layers": [[0, 2]], "replicas": [replica]}
    plan = {"pipelines": [{"micro_batch": 2, "micro_batches": 1, "stages": [stage]}]}
    (files / "plan.json").write_text(json.dumps(plan))
    job, cluster = str(files / "job.yaml"), str(files / "cluster.yaml")
    status, _, err = run(capsys, "score", str(files / "plan.json"), job, "--cluster", cluster)
    assert status == 2 and "tp = 3: must divide heads (4)" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonsense",), "'nonsense'"),
        (("plan", "job.yaml", "--cluster", "c", "--seed", "x"), "'--seed'"),
        (("submit",), "'JOB'; 'shoal submit --help' says what there is"),
        (("token", "create", "--nope"), "'shoal token create --help' says what there is"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_a_server_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for server, problem in (("foo", "must be a URL that begins with http"), ("http://a:b", "is not a URL")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHOAL_SERVER", server)
            status, out, err = run(capsys, "list")
        assert (status, out) == (2, "")
        assert f"server = '{server}': {problem}" in err and "SHOAL_SERVER" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"shoal {metadata.version('shoal')}\n", "")


def test_without_a_server_the_sentence_says_where_and_what_to_do(files: Path) -> None:
    server = f"http://127.0.0.1:{free_ports(1)[0]}"
    for arguments in (("list", "--json"), ("submit", str(files / "job.yaml"))):
        done = shoal(*arguments, SHOAL_SERVER=server, SHOAL_TOKEN="x")
        assert (done.returncode, done.stdout) == (1, "")
        assert server in done.stderr and "shoal up" in done.stderr and "Traceback" not in done.stderr
    # A mistake in the file is found without any server.
    (files / "job.yaml").write_text("name: a\nnme: b\n")
    done = shoal("submit", str(files / "job.yaml"), SHOAL_SERVER=server)
    assert done.returncode == 2 and "nme = 'b'" in done.stderr


def test_a_wrong_token(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_SERVER", plane.url)
    monkeypatch.setenv("SHOAL_TOKEN", "wrong")
    status, out, err = run(capsys, "list")
    assert (status, out) == (1, "")
    assert "SHOAL_TOKEN" in err


def test_a_job_that_wants_its_own_schedule_and_sharding_is_planned_and_submitted(
    plane: ControlPlane, http: httpx.Client, tmp_path: Path
) -> None:
    job, cluster = tmp_path / "job.json", tmp_path / "cluster.json"
    job.write_text(json.dumps(job_mapping(train={"sharding": "none", "schedule": "zero_bubble"})))
    cluster.write_text(json.dumps({"nodes": [{"name": "n", "device": "A100-80G", "count": 2}]}))
    planned = shoal("plan", str(job), "--cluster", str(cluster), "--json")
    assert planned.returncode == 0
    found = json.loads(planned.stdout)
    assert (found["sharding"]["optimizer"], found["schedule"]) == ("none", "zero_bubble")
    done = shoal("submit", str(job), "--json", plane=plane)
    assert (done.returncode, done.stderr) == (0, "")
    (held,) = ok(http.get("/v1/jobs"))["items"]
    assert held["id"] == json.loads(done.stdout)["id"]


def test_from_submit_to_the_end(plane: ControlPlane, http: httpx.Client, files: Path) -> None:
    done = shoal("submit", str(files / "job.yaml"), "--json", plane=plane)
    assert (done.returncode, done.stderr) == (0, "")
    job_id = json.loads(done.stdout)["id"]
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    following = subprocess.Popen(
        [sys.executable, "-c", "from shoal.cli import main; main()", "wait", job_id, "--json"],
        env=plane.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    ok(connector.send(job_id, story(job_mapping(), started_at_s=time.time()).entries))
    out, _ = following.communicate(timeout=60)
    assert following.returncode == 0
    assert json.loads(out)["status"]["state"] == "succeeded"


def test_commands_about_a_job(
    plane: ControlPlane,
    http: httpx.Client,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHOAL_SERVER", plane.url)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(plane.data_dir))
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping()))["id"])
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    told = story(job_mapping(), started_at_s=time.time()).entries
    ok(connector.send(job_id, told[:30]))

    def answer(*arguments: str) -> Any:
        status, out, err = run(capsys, *arguments, "--json")
        assert (status, err, out.count("\n")) == (0, "", 1)
        return json.loads(out)

    assert job_id in [job["id"] for job in answer("list")["items"]]
    assert answer("status", job_id)["status"]["state"] in ("running", "recovering")
    assert [event["seq"] for event in answer("events", job_id)["items"]] == list(range(1, 31))
    assert len(answer("nodes")["items"]) == 4
    drill = answer("preempt", "spot-1", "--grace", "30")
    assert (drill["node"], drill["notice_s"], drill["cluster_id"]) == ("spot-1", 30.0, "local")
    status, _, err = run(capsys, "preempt", "spot-9")
    assert status == 2 and "node = 'spot-9': no cluster has such a node" in err
    assert answer("sign-in")["url"].startswith(plane.url)
    for arguments, words in (
        (("list",), job_id),
        (("status", job_id), "spot-1"),
        (("events", job_id), "node_lost"),
        (("nodes",), "on demand"),
        (("preempt", "spot-1"), "spot-1 of cluster local is told that it goes away at 20"),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, err) == (0, "") and words in out
    status, out, err = run(capsys, "wait", job_id, "--timeout", "0.2")
    assert (status, out) == (4, "") and job_id in err
    status, _, err = run(capsys, "pause", job_id)
    assert status == 1 and "cannot be paused: checkpoint.uri is not set" in err
    status, _, err = run(capsys, "resume", job_id)
    assert status == 1 and "is running, not paused: there is nothing to resume" in err
    assert answer("limits", job_id, "--priority", "-7", "--max-devices", "6")["spec"]["limits"]["max_devices"] == 6
    assert answer("status", job_id)["share"]["priority"] == -7
    status, _, err = run(capsys, "limits", job_id, "--budget-usd", "5")
    assert status == 2 and "limits.budget_usd = 5.0: needs a checkpoint.uri" in err
    assert answer("cancel", job_id)["wish"] == "cancelled"
    ok(connector.send(job_id, told))
    assert run(capsys, "events", job_id, "-f")[1].count("\n") == len(told)
    status, _, err = run(capsys, "status", "job_nope")
    assert status == 2 and "job_nope" in err
    status, _, err = run(capsys, "list", "--state", "odd")
    assert status == 2 and "odd" in err


def test_a_job_that_failed_is_status_1(plane: ControlPlane, http: httpx.Client) -> None:
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping()))["id"])
    connector = Connector(http=http)
    ok(connector.renew(lease_s=300))
    told = Story(job=parse_job(job_mapping()), cluster=connector.cluster, now_s=time.time())
    told.state("starting", "planned", "starting")
    told.state("failed", "loss_not_finite", "the loss of step 7 is not a number")
    ok(connector.send(job_id, told.entries))
    done = shoal("wait", job_id, "--json", plane=plane)
    assert done.returncode == 1
    assert json.loads(done.stdout)["status"]["state"] == "failed"
    assert "the loss of step 7 is not a number" in done.stderr


def test_the_client_needs_neither_web_stack_nor_torch() -> None:
    code = (
        "import sys; import shoal, shoal.cli; "
        "heavy = {'torch', 'ray', 'fastapi', 'sqlalchemy', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_control_plane_needs_neither_torch_nor_ray() -> None:
    blocked = "import sys; sys.modules.update({name: None for name in ('torch', 'ray', 'boto3')}); "
    subprocess.run([sys.executable, "-c", f"{blocked} import shoal_service.server"], check=True, timeout=60)


def test_a_port_that_is_taken_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shoal = LocalShoal(LocalOptions(cluster={"nodes": []}, data_dir=tmp_path, port=port))
        with pytest.raises(LocalShoalFailed, match=f"^--port {port}: cannot be listened on: Address already in use; "):
            shoal.start_server()
    assert not list(tmp_path.iterdir())
