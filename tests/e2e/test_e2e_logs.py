"""What ranks print reaches the control plane from real raylets, and outlives their processes, nodes and jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from running import LIMIT_S, Running, job_mapping
from waiting import eventually

MODEL = '''"""It says what it does, and gives up when it is told to."""
import pathlib
import sys

from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 64))  # enough for several nodes

    def forward(self, x):
        print("WARNING: a layer at work", file=sys.stderr)
        if pathlib.Path(FAIL).exists():
            print("the last words", end="", flush=True)
            raise ValueError("told to give up")
        return x + self.inner(x)


def build(layers):
    return [nn.Embedding(256, 64), *(Layer() for _ in range(layers)), nn.Linear(64, 256)]
'''


def lines(running: Running, job_id: str, **wanted: Any) -> list[dict[str, Any]]:
    return list(running.client.logs(job_id, **wanted))


def test_lines_of_ranks_outlive_their_node_and_their_job(running: Running, tmp_path: Path) -> None:
    fail = tmp_path / "fail"
    (tmp_path / "model.py").write_text(f"FAIL = {str(fail)!r}\n{MODEL}")
    job = job_mapping(5000)
    job["model"] = {"entrypoint": "model:build", "arguments": {"layers": 6}}
    job_id = running.submit({**job, "code": {"working_dir": tmp_path.as_uri()}})
    running.until_step(job_id, 3)
    plan = running.plan(job_id)["plan"]
    # Others hold state, or run the embedding or the head alone, and print nothing.
    with_layers = [
        stage
        for pipeline in plan["pipelines"]
        for stage in pipeline["stages"]
        if any(last > first for first, last in stage["layers"])
    ]
    used = {replica["node"] for stage in with_layers for replica in stage["replicas"] if replica["samples"]}
    for node in used:  # what was measured before the first attempt has printed, too
        of_node = {"node": node, "attempt": 1, "search": "a LAYER", "tail": 1}
        eventually(lambda wanted=of_node: lines(running, job_id, **wanted), LIMIT_S)
    victim = min(used - {"big-0"})
    told = lines(running, job_id, node=victim, attempt=1, level="warning")[0]
    assert (told["attempt"], told["level"], told["text"]) == (1, "warning", "WARNING: a layer at work")
    assert told["rank"] is not None
    running.kill(victim)
    running.until_event(job_id, "recovery_done")
    assert lines(running, job_id, node=victim, attempt=1, level="warning")[0] == told
    eventually(lambda: lines(running, job_id, attempt=2, search="a layer", tail=1), LIMIT_S)
    fail.touch()
    assert running.client.wait(job_id, timeout_s=LIMIT_S)["status"]["code"] == "user_code_failed"
    (failed,) = [event for event in running.events(job_id, "state_changed") if event["state"] == "failed"]

    def why() -> list[str]:
        return [line["text"] for line in lines(running, job_id, event=failed["seq"], level="error")]

    eventually(lambda: "ValueError: told to give up" in why(), LIMIT_S)
    assert "Traceback (most recent call last):" in why()
    assert any("the last words" in line["text"] for line in lines(running, job_id, search="last words"))
    page = httpx.get(
        f"{running.shoal.url}/jobs/{job_id}",
        params={"event": failed["seq"], "search": "told to give up"},
        headers={"Authorization": f"Bearer {running.shoal.token}"},
        timeout=60,
    )
    assert '<td class="text">ValueError: told to give up</td>' in page.text
    assert f"?event={failed['seq']}#part-logs" in page.text, "failures lead to their lines"
