"""A model that is a user's own code, on real raylets: it trains and survives the loss of a node, beside modules with
names of ours; and what is wrong with the code is said in the user's own lines, and never taken for a preemption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import BATCH, Running, job_mapping

from shoal.demo_report import counting_steps
from shoal_planner.job import parse_job
from shoal_workers.data import training_samples

STEPS = 30
WORKERS = '''"""A user's own module, named as one of Shoal's folders."""
import torch
from torch import nn

from service import WIDTH


class Layer(nn.Module):
    tensor_parallel = {"up": "column", "down": "row"}
    tensor_parallel_heads = 2

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(torch.relu(self.up(self.norm(x + self.mix * before))))
'''
SERVICE = "WIDTH = 64\n"
MODEL = """from torch import nn

from workers import Layer
from service import WIDTH


def build(layers):
    return [nn.Embedding(256, WIDTH), *(Layer() for _ in range(layers)), nn.Linear(WIDTH, 256)]
"""
PLAIN = """import json, sys
import torch
import torch.nn.functional as F
from model import build

seed, layers, rows, train = json.load(sys.stdin)
torch.manual_seed(seed)
model = torch.nn.Sequential(*build(layers=layers))
matrices = [tensor for tensor in model.parameters() if tensor.ndim > 1]
vectors = [tensor for tensor in model.parameters() if tensor.ndim == 1]
groups = [{"params": matrices, "weight_decay": train["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=train["lr"], betas=train["betas"], eps=train["eps"])
losses = []
for step, batch in enumerate(rows, start=1):
    for group in optimizer.param_groups:
        group["lr"] = train["lr"] * min(1.0, step / train["warmup_steps"])
    batch = torch.tensor(batch)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder as users have it."""
    for name, text in (("workers.py", WORKERS), ("service.py", SERVICE), ("model.py", MODEL)):
        (tmp_path / name).write_text(text)
    return tmp_path


def own_job(code: Path, entrypoint: str = "model:build", steps: int = STEPS, **around: Any) -> dict[str, Any]:
    job = job_mapping(steps)
    job["model"] = {"entrypoint": entrypoint, "arguments": {"layers": 6}}
    return {**job, "code": {"working_dir": code.as_uri(), **around}}


def plain_losses(code: Path, job: dict[str, Any]) -> list[float]:
    """A loop around the same modules on the same samples, in a process that knows nothing of Shoal."""
    spec = parse_job(job_mapping(job["train"]["steps"]))  # its samples are the same
    samples, train = training_samples(spec), spec.train
    rows = [samples.read(range(step * BATCH, (step + 1) * BATCH)).tolist() for step in range(train.steps)]
    known = {name: getattr(train, name) for name in ("lr", "betas", "eps", "weight_decay", "warmup_steps")}
    order = json.dumps([train.seed, 6, rows, known])
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PLAIN]
    done = subprocess.run(command, input=order, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout)
    return losses


def test_it_trains_loses_a_node_and_finishes(running: Running, code: Path) -> None:
    job = own_job(code)
    job_id = running.submit(job)
    running.until_step(job_id, 5)
    plan = running.plan(job_id)["plan"]
    used = {replica["node"] for each in plan["pipelines"] for stage in each["stages"] for replica in stage["replicas"]}
    running.kill(min(used - {"big-0"}))
    events = running.finish(job_id)
    counted = counting_steps(events)
    assert [event["step"] for event in counted] == list(range(1, STEPS + 1))
    assert [event["loss"] for event in counted] == pytest.approx(plain_losses(code, job), rel=1e-4)
    assert [event["cause"] for event in events if event["kind"] == "recovery_done"] == ["node_lost"]
    (seen,) = [event for event in events if event["kind"] == "model_seen"]
    shape = seen["model"]["module"]["shape"]
    assert (shape["layers"], shape["hidden"], shape["vocab"], shape["heads"]) == (6, 64, 256, 2)


LATE = """from torch import nn

import workers

class Layer(workers.Layer):
    def forward(self, x):
        if x.shape[0] > 0 and self.mix.abs().max() > 0.5 + 2e-3:  # after some steps
            raise RuntimeError("the mix has gone too far")
        return super().forward(x)


def build(layers):
    from service import WIDTH
    return [nn.Embedding(256, WIDTH), *(Layer() for _ in range(layers)), nn.Linear(WIDTH, 256)]
"""


ENDS = LATE.replace('raise RuntimeError("the mix has gone too far")', "__import__('os')._exit(3)")


@pytest.mark.parametrize(
    ("text", "entrypoint", "around", "code_word", "said"),
    [
        (LATE, "model:build", {}, "user_code_failed", ["the mix has gone too far", "model.py, line 8, in forward"]),
        (
            "import flash_attention_9\n" + MODEL,
            "model:build",
            {},
            "user_code_failed",
            ["No module named 'flash_attention_9'", "model.py, line 1"],
        ),
        (MODEL, "model:biuld", {}, "user_code_failed", ["model.entrypoint = 'model:biuld'", "did you mean 'build'?"]),
        (MODEL, "modle:build", {}, "user_code_failed", ["there is no module 'modle' in the job's code"]),
        ("import os\nos._exit(3)\n", "model:build", {}, "user_code_failed", ["its process ended 3 times"]),
        (
            MODEL.replace("256", "64"),
            "model:build",
            {},
            "user_code_failed",
            ["model.vocab = 64: must be at least 256 where the tokens are bytes"],
        ),
        (MODEL + "  return\n", "model:build", {}, "user_code_failed", ["IndentationError", "model.py, line 9"]),
        (
            MODEL,
            "model:build",
            {"pip": ["shoal-has-no-such-package==9.9"]},
            "environment_failed",
            ["shoal-has-no-such-package==9.9"],
        ),
    ],
    ids=["error", "import", "function", "module", "exit", "vocab", "syntax", "pip"],
)
@pytest.mark.long
def test_what_is_wrong_with_the_code_is_said(
    running: Running, code: Path, text: str, entrypoint: str, around: dict[str, Any], code_word: str, said: list[str]
) -> None:
    (code / "model.py").write_text(text)
    job_id = running.submit(own_job(code, entrypoint, **around))
    job = running.client.wait(job_id, timeout_s=300)
    status = job["status"]
    assert (status["state"], status["code"]) == ("failed", code_word), status
    for words in said:
        assert words in status["reason"]
    kinds = [event["kind"] for event in running.events(job_id)]
    assert "node_lost" not in kinds and "recovery_done" not in kinds


def test_a_folder_that_is_not_there_is_named(running: Running, code: Path) -> None:
    job = own_job(code / "nowhere")
    status = running.client.wait(running.submit(job), timeout_s=60)["status"]
    assert (status["state"], status["code"]) == ("failed", "environment_failed")
    assert f"there is no {code}/nowhere where the job is supervised" in status["reason"]


@pytest.mark.long
def test_code_that_ends_its_process_is_no_preemption_for_ever(running: Running, code: Path) -> None:
    (code / "model.py").write_text(ENDS)
    job_id = running.submit(own_job(code))
    status = running.client.wait(job_id, timeout_s=300)["status"]
    assert (status["state"], status["code"]) == ("failed", "user_code_failed"), status
    assert "Ranks ended 3 times in a row without a step" in status["reason"]
    assert {event["ranks_alone"] for event in running.events(job_id, "node_lost")} == {True}
