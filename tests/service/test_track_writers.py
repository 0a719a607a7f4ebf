"""A writer's process that is killed after a write that nobody noted: the next one makes the same of it, once."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from control_plane import job_mapping
from tracked import mlflow_holds, mlflow_runs, single, tensorboard_holds, wandb_holds

from shoal_planner.job import job_to_mapping, parse_job
from shoal_planner.track_spec import Tool
from shoal_service.sinks import Order, SinkFailed
from shoal_service.track_child import Child
from shoal_service.track_feed import Batch, Scalars, flat
from shoal_service.tracking_hosts import Reach

LIMIT_S = 120.0


def order(tool: Tool, folder: Path, **changes: Any) -> Order:
    track = {
        "tensorboard": {"log_dir": (folder / "tb").as_uri()},
        "mlflow": {"tracking_uri": f"sqlite:///{folder / 'mlflow.db'}"},
        "wandb": {"project": "p", "mode": "offline", "dir": str(folder / "wb")},
    }
    spec = job_to_mapping(parse_job(job_mapping(track=track)))
    plain: dict[str, Any] = {"tool": tool, "job_id": "job_1", "name": "a name/of ours", "spec": spec, "url": None}
    plain |= {"created_at_s": 1.7e9, "generation": 1, "position": {}, "folder": str(folder)}
    return Order(**plain | changes)


def steps(first: int, last: int) -> Batch:
    return Batch(
        steps=tuple(
            Scalars(step=step, at_s=1.7e9 + step, values={"train/loss": 1 / step, "train/lr": 3e-4})
            for step in range(first, last + 1)
        )
    )


def held(tool: Tool, folder: Path) -> Any:
    if tool == "tensorboard":
        return tensorboard_holds(folder / "tb" / "a-name-of-ours-job_1")
    if tool == "wandb":
        return wandb_holds(folder / "wb")[0]
    (run,) = mlflow_runs(f"sqlite:///{folder / 'mlflow.db'}", "Default", "job_1")
    return mlflow_holds(f"sqlite:///{folder / 'mlflow.db'}", run)


async def started(tool: Tool) -> Child:
    """MLflow writes to a file here, and needs nothing of the operator's for that."""
    mine = tool != "mlflow"
    return await Child.start(LIMIT_S, Reach(credentials=mine, private=mine))


async def killed(child: Child) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    await child.close(0.0)


@pytest.mark.parametrize("tool", ["tensorboard", "mlflow", "wandb"])
async def test_what_was_written_and_not_noted_is_there_once(tool: Tool, tmp_path: Path) -> None:
    first = await started(tool)
    noted = (await first.open(order(tool, tmp_path))).position
    position = await first.write(steps(1, 3))
    await first.write(steps(4, 6))
    await killed(first)
    # Killed when it had opened the run, which nobody noted.
    second = await started(tool)
    await second.open(order(tool, tmp_path, position=noted if tool == "mlflow" else position))
    await killed(second)
    third = await started(tool)
    opened = await third.open(order(tool, tmp_path, position=position))
    known = 3 if opened.step is None else opened.step
    await third.write(steps(known + 1, 9))
    await third.close(LIMIT_S)
    expected = {
        "train/loss": [(step, 1 / step) for step in range(1, 10)],
        "train/lr": [(step, 3e-4) for step in range(1, 10)],
    }
    assert held(tool, tmp_path) == (single(expected) if tool == "tensorboard" else expected)


@pytest.mark.parametrize("tool", ["tensorboard", "mlflow"])
async def test_a_run_that_was_made_and_not_noted_is_found_again(tool: Tool, tmp_path: Path) -> None:
    for last in (2, 5):
        child = await started(tool)
        await child.open(order(tool, tmp_path))
        await child.write(steps(1, last))
        await killed(child)
    assert [step for step, _ in held(tool, tmp_path)["train/loss"]] == [1, 2, 3, 4, 5]


async def test_event_files_end_and_new_ones_begin(tmp_path: Path) -> None:
    from shoal_service.sink_tensorboard import TensorBoardSink

    plain = order("tensorboard", tmp_path)
    sink = TensorBoardSink(plain, segment_bytes=500)
    sink.open()
    for step in range(1, 31):
        position = sink.write(steps(step, step))
    again = TensorBoardSink(dataclasses.replace(plain, position=position), segment_bytes=500)
    again.open()
    again.write(steps(31, 40))
    run = tmp_path / "tb" / "a-name-of-ours-job_1"
    assert len(list(run.iterdir())) > 3
    assert [step for step, _ in tensorboard_holds(run)["train/loss"]] == list(range(1, 41))


async def test_a_tool_that_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line; the process of the test goes on."""
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = job_to_mapping(parse_job(job_mapping(track={"wandb": {"project": "p"}})))
    child = await Child.start(LIMIT_S, Reach(credentials=True, private=True))
    with pytest.raises(SinkFailed, match="API key"):
        await child.open(order("wandb", tmp_path, spec=spec))
    await child.close(0.0)


def test_fields_of_a_job_are_parameters_by_their_paths() -> None:
    spec = {"name": "n", "train": {"lr": 1e-3, "betas": (0.9, 0.95), "clip_norm": None}, "track": {"deep": {"x": True}}}
    assert flat(spec) == {"name": "n", "train.lr": 1e-3, "train.betas": "[0.9, 0.95]", "track.deep.x": True}
