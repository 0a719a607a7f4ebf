"""A model that is a user's own code, on real raylets: it trains and survives the loss of a node, beside modules with
names of ours; and what is wrong with the code is said in the user's own lines, and never taken for a preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_jobs import MODEL, STEPS, own_job, plain_losses, write_code
from running import Running

from shoal.demo_report import counting_steps


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write_code(tmp_path)


@pytest.mark.long
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
