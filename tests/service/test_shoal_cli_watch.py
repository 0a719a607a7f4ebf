"""Looking on from the command line: lines and bars, exit statuses, what else a job's history has, completion, and the
first words of somebody who types `shoal` alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, ControlPlane, Story, job_mapping, ok, story
from rich.console import Console
from servers import free_ports

from shoal import Client, cli
from shoal.cli_progress import LiveView, PlainView, duration, view_on
from shoal_planner.job import parse_job
from shoal_recovery.journal import Entry


@pytest.fixture
def shell(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("SHOAL_SERVER", plane.url)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(plane.data_dir))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.run(list(arguments))
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def submitted(http: httpx.Client, **changes: Any) -> str:
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping(**changes)))["id"])
    ok(Connector(http=http).renew(lease_s=300))
    return job_id


def told() -> list[Entry]:
    return story(job_mapping(), started_at_s=time.time()).entries


def ended(state: str, reason: str) -> list[Entry]:
    short = Story(job=parse_job(job_mapping()), cluster=Connector(http=httpx.Client()).cluster, now_s=time.time())
    short.state("starting", "planned", "starting")
    if state == "cancelled":
        short.state("cancelling", "asked", "its user wants it to stop")
    short.state(state, "some_code", reason)
    return short.entries


def program(plane: ControlPlane, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from shoal.cli import main; main()", *arguments]
    return subprocess.Popen(command, env=plane.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_watching_a_job_to_its_end(plane: ControlPlane, http: httpx.Client) -> None:
    job_id = submitted(http)
    watching = program(plane, "watch", job_id)
    assert watching.stdout is not None
    first_line = watching.stdout.readline()  # it looks on from here
    entries = told()
    for first in range(0, len(entries), 7):
        ok(Connector(http=http).send(job_id, entries[first : first + 7]))
    out, err = watching.communicate(timeout=60)
    assert (watching.returncode, err) == (0, "")
    lines = out.splitlines()
    assert first_line.startswith(f"{job_id} tiny: ")
    assert any("spot-1: its connection closed" in line for line in lines)
    assert any("recovery_done" in line for line in lines) and not any("step_done" in line for line in lines)
    # A line for each twentieth of its 60 steps that it saw, and no escape codes where nobody looks at a screen.
    assert "step 30 of 60" in out and "step 31 of 60" not in out and "\x1b" not in out
    assert "succeeded" in lines[-1]


def on_a_terminal(plane: ControlPlane, *arguments: str) -> str:
    """What somebody sees who types that, until it has ended well."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from shoal.cli import main; main()", *arguments]
    environment = {**plane.environment(), "TERM": "xterm-256color", "COLUMNS": "160"}
    with subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as shown:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # the end of it
            while piece := os.read(ours, 65536):
                seen += piece
    os.close(ours)
    assert shown.returncode == 0, seen.decode()
    return seen.decode()


def test_on_a_terminal_a_bar_stays_below(plane: ControlPlane, http: httpx.Client) -> None:
    job_id = submitted(http)
    ok(Connector(http=http).send(job_id, told()))
    lines = [(number, time.time(), "info", 1, 0, f"printed line [{number}]") for number in (1, 2)]
    sources = [{"node": "big-0", "life": "a", "lines": lines}]
    batch = {"cluster_id": "local", "holder": "connector-1", "sources": sources}
    ok(http.post(f"/v1/jobs/{job_id}/logs", json=batch))
    followed = on_a_terminal(plane, "logs", job_id, "-f")
    assert "printed line [1]" in followed and "printed line [2]" in followed
    for seen in (followed, on_a_terminal(plane, "watch", job_id)):
        assert "tiny succeeded" in seen and "100%" in seen and "step 60 of 60" in seen and "\x1b[" in seen


def test_watching_until_a_step(plane: ControlPlane, http: httpx.Client, shell: Any) -> None:
    job_id = submitted(http)
    entries = told()
    ok(Connector(http=http).send(job_id, entries[:15]))
    status, out, err = shell("watch", job_id, "--until-step", "5", "--json")
    assert status == 0 and json.loads(out)["id"] == job_id and out.count("\n") == 1
    assert f"{job_id} tiny" in err  # what is for people does not disturb what is for programs
    status, out, _ = shell("watch", "--until-step", "5")
    assert status == 0 and out.startswith(job_id)  # the newest one, by itself
    ok(http.post(f"/v1/jobs/{job_id}/cancel"))


def test_statuses_of_those_who_wait(plane: ControlPlane, http: httpx.Client, shell: Any) -> None:
    for state, expected in (("failed", 1), ("cancelled", 3)):
        job_id = submitted(http)
        if state == "cancelled":
            ok(http.post(f"/v1/jobs/{job_id}/cancel"))
        if ok(http.get(f"/v1/jobs/{job_id}"))["status"]["state"] != state:  # one that has not begun ends at once
            ok(Connector(http=http).send(job_id, ended(state, f"it {state}")))
        for command in ("wait", "watch"):
            status, _, err = shell(command, job_id)
            assert status == expected and f"{job_id} {state}" in err, command
    job_id = submitted(http)
    status, out, err = shell("wait", job_id, "--timeout", "0.1")
    assert (status, out) == (4, "") and "after 0.1 s" in err
    ok(http.post(f"/v1/jobs/{job_id}/cancel"))


def test_what_else_there_is_to_see_of_a_job(
    plane: ControlPlane, http: httpx.Client, shell: Any, tmp_path: Path
) -> None:
    job_id = submitted(http)
    entries = told()
    ok(Connector(http=http).send(job_id, entries))

    def answer(*arguments: str) -> Any:
        status, out, err = shell(*arguments, "--json")
        assert (status, err, out.count("\n")) == (0, "", 1)
        return json.loads(out)

    assert [each["cause"] for each in answer("recoveries", job_id)["items"]] == ["node_lost", "node_joined"]
    assert answer("plans", job_id, "--epoch", "2")["epoch"] == 2
    assert answer("metrics", job_id, "--max-points", "12")["num_points"] == 60
    assert {each["kind"] for each in answer("events", job_id, "--kind", "node_lost")["items"]} == {"node_lost"}
    assert answer("clusters")["items"][0]["id"] == "local"
    assert len(answer("clusters", "local")["nodes"]) == 4
    etag = answer("status", job_id)["etag"]
    assert etag == http.get(f"/v1/jobs/{job_id}").headers["ETag"]
    picture = tmp_path / "plan.svg"
    for arguments, words in (
        (("recoveries", job_id), "node_joined"),
        (("recoveries", job_id), " ms  "),
        (("recoveries", job_id), "own "),
        (("recoveries", job_id), "spot-1 was lost without notice (its connection closed), seen after 62 ms"),
        (("plans", job_id, "--svg", str(picture)), "node spot-1 was lost"),
        (("metrics", job_id), "GRAD_NORM"),
        (("clusters", "local"), "A100-80G"),
    ):
        status, out, err = shell(*arguments)
        assert (status, err) == (0, "") and words in out
    assert "<svg" in picture.read_text()
    status, _, err = shell("cancel", job_id, "--if-match", '"another"')
    assert status == 1 and "has changed since" in err and "'shoal status ID --json' has the ETag of now" in err
    status, _, err = shell("plans", "job_nope")
    assert status == 2 and err.count("\n") == 1 and "'shoal list' shows your jobs" in err


def test_a_clone_may_be_rehearsed_and_a_key_makes_one_job(http: httpx.Client, shell: Any, tmp_path: Path) -> None:
    ok(Connector(http=http).renew(lease_s=300))
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_mapping()))
    status, first, _ = shell("submit", str(path), "--idempotency-key", "once")
    assert status == 0 and shell("submit", str(path), "--idempotency-key", "once")[1] == first
    before = len(ok(http.get("/v1/jobs"))["items"])
    status, out, _ = shell("clone", first.strip(), "--set", "train.steps=70", "--dry-run")
    assert status == 0 and "nothing was created" in out
    assert len(ok(http.get("/v1/jobs"))["items"]) == before
    status, out, _ = shell("plan", str(path))
    assert status == 0 and "predicted:" in out  # by the control plane, for what is connected
    status, _, err = shell("plan", str(path), "--explain")
    assert status == 2 and "--explain needs --cluster" in err
    ok(http.post(f"/v1/jobs/{first.strip()}/cancel"))


def test_users_by_the_command_line(plane: ControlPlane, shell: Any) -> None:
    with Client(plane.url, plane.token) as client:
        user = client.people.add_member("default", "eve@example.org", "viewer")["user_id"]
    status, out, _ = shell("user", "list", "--json")
    assert status == 0 and user in [each["id"] for each in json.loads(out)["items"]]
    assert json.loads(shell("user", "admin", user, "--json")[1])["server_admin"] is True
    assert "no longer administers" in shell("user", "admin", user, "--off")[1]
    status, out, _ = shell("project", "show", "default", "--json")
    assert status == 0 and user in [each["user_id"] for each in json.loads(out)["members"]]
    assert json.loads(shell("user", "delete", user, "--json")[1]) == {"id": user, "deleted": True}
    assert user not in shell("user", "list")[1]


def job(**status: Any) -> dict[str, Any]:
    running = {"state": "running", "reason": "training", "step": 3, "steps": 60, "loss": 2.5, "tokens_per_s": 1234.5}
    return {"id": "job_1", "name": "tiny", "status": {**running, "eta_s": 75.0, **status}}


def test_a_terminal_gets_a_bar_and_everything_else_plain_lines() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    assert isinstance(view_on(screen), LiveView)
    with view_on(screen) as view:
        view.show(job())
        view.line("node [big-0] was lost")
        view.step(4, 2.25)
        view.show(job(state="recovering", reason="node small-1 was lost", step=4, loss=2.25))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[" in shown and "node [big-0] was lost" in shown
    assert "tiny recovering" in shown and "step 4 of 60, loss 2.2500, 1,234 tokens/s, 1 min 15 s to go" in shown
    assert "node small-1 was lost" in shown
    paper = Console(file=io.StringIO())
    assert isinstance(view_on(paper), PlainView)
    with view_on(paper) as view:
        view.show(job(steps=None, eta_s=None))
        view.step(4, "nan")
    assert paper.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "job_1 tiny: running: training",
        "step 4, loss nan, 1,234 tokens/s",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3600, "1 h"), (93784, "1 d 2 h"), (7260, "2 h 1 min")]
)
def test_durations_are_said_in_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def completions(plane: ControlPlane, line: str) -> list[str]:
    """Of bash, for what is typed so far."""
    words = line.split(" ")
    asked = {"_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", "from shoal.cli import main; main()"],
        env={**plane.environment(), **asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_shells_complete_commands_and_ids(plane: ControlPlane, http: httpx.Client) -> None:
    job_id = submitted(http)
    assert {"status", "submit"} <= set(completions(plane, "shoal s"))
    assert job_id in completions(plane, "shoal status job_")
    assert completions(plane, "shoal preempt sp") == ["spot-0", "spot-1"]
    ok(http.post(f"/v1/jobs/{job_id}/cancel"))


def test_the_first_words(plane: ControlPlane, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = shell()
    assert status == 0 and "The newest jobs" in out and "shoal watch" in out
    monkeypatch.setenv("SHOAL_TOKEN", "wrong")
    status, out, _ = shell()
    assert status == 0 and "does not know you" in out and "shoal login" in out
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv("SHOAL_SERVER", nobody)
    status, out, err = shell()
    assert (status, err) == (0, "") and f"No control plane answers at {nobody}" in out and "shoal up" in out
    done = subprocess.run(
        [sys.executable, "-c", "from shoal.cli import main; main()"],
        env={**os.environ, "SHOAL_SERVER": nobody},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "shoal --help" in done.stdout
