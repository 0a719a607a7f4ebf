"""Jobs of kind ray_train on real raylets: users' scripts for Ray Train, as they are."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from running import LIMIT_S, Running
from servers import new_place
from waiting import eventually

EXAMPLES = Path(ray.__file__).parent / "train" / "examples" / "pytorch"
PROJECT = Path(__file__).parent.parent / "scripts" / "project"


def script_job(*args: str, **changes: Any) -> dict[str, Any]:
    """The script says that it has 8 workers with a GPU each."""
    job = {
        "kind": "ray_train",
        "name": "line",
        "script": {"path": "line.py", "working_dir": PROJECT.as_uri(), "args": list(args)},
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"uri": new_place()},
    }
    return job | changes


def figures() -> ModuleType:
    """The script's own module, which the tests do not have on their path."""
    spec = importlib.util.spec_from_file_location("figures_of_line", PROJECT / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(epochs: int) -> list[float]:
    """What the script reports, by a plain loop."""
    project = figures()
    inputs, targets = project.BATCH
    model, losses = project.initial(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_reports(running: Running, job_id: str, epochs: int) -> None:
    """Each step once in the branch that counts, with the figures of that epoch."""
    found = running.client.metrics(job_id)
    assert [point["step"] for point in found["points"]] == list(range(1, epochs + 1))
    assert [point["loss"] for point in found["points"]] == pytest.approx(reference(epochs), rel=1e-4)
    assert [told["metrics"]["epoch"] for told in found["reported"]] == list(range(1, epochs + 1))
    assert [told["metrics"]["loss"] for told in found["reported"]] == [point["loss"] for point in found["points"]]


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def printed(events: list[dict[str, Any]]) -> str:
    return "\n".join(line for event in of_kind(events, "script_printed") for line in event["lines"])


def ended(running: Running, job_id: str) -> dict[str, Any]:
    status: dict[str, Any] = running.client.wait(job_id, timeout_s=LIMIT_S)["status"]
    return status


def test_a_script_loses_a_node_of_its_workers_and_reports_every_step_once(running: Running, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job_id = running.submit(script_job("--epochs=6", "--hold=4", f"--go={go}"))
    running.until_step(job_id, 3)
    (started,) = running.events(job_id, "workers_started")
    assert len(started["nodes"]) == 2
    (seat,) = (event["node"] for event in running.events(job_id, "script_started"))
    assert seat == "big-0", "another one may be taken away"
    victim = next(node for node in started["nodes"] if node != seat)
    running.kill(victim)
    go.touch()
    events = running.finish(job_id)
    check_reports(running, job_id, 6)
    assert [event["node"] for event in of_kind(events, "node_lost")] == [victim]
    (recovery,) = of_kind(events, "recovery_done")
    assert (recovery["cause"], recovery["nodes_lost"], recovery["step"]) == ("node_lost", [victim], 3)
    assert len(of_kind(events, "script_started")) == 1
    (adjusted,) = of_kind(events, "trainer_adjusted")
    assert adjusted["settings"]["num_workers"] == "1 to 2 (the script said 8)"
    assert adjusted["settings"]["use_gpu"] == "False (the script said True)"
    stored = running.client.checkpoints(job_id)["items"]
    assert [each["step"] for each in stored] == [6, 5, 4, 3, 2, 1]
    assert "ended with loss" in printed(events)


@pytest.mark.long
def test_a_script_that_loses_its_own_node_is_started_elsewhere_and_goes_on(running: Running, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job_id = running.submit(script_job("--epochs=5", "--hold=3", f"--go={go}"))
    running.until_step(job_id, 2)
    (first,) = running.events(job_id, "script_started")
    running.kill(first["node"])
    go.touch()
    events = running.finish(job_id)
    check_reports(running, job_id, 5)
    (_, second) = of_kind(events, "script_started")
    assert (second["attempt"], second["node"] != first["node"]) == (2, True)
    assert of_kind(events, "workers_started")[-1]["step"] == 2


@pytest.mark.long
def test_a_script_trains_on_while_its_supervisor_is_replaced(running: Running, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job_id = running.submit(script_job("--epochs=5", "--hold=3", f"--go={go}"))
    running.until_step(job_id, 2)
    old = running.processes("ray::SupervisorActor")
    for process in old.values():
        process.kill()
    go.touch()
    events = running.finish(job_id)
    check_reports(running, job_id, 5)
    assert len(of_kind(events, "script_started")) == len(of_kind(events, "workers_started")) == 1
    assert not of_kind(events, "recovery_done")


@pytest.mark.long
def test_workers_are_taken_in_when_a_node_comes_and_redo_nothing(running: Running, tmp_path: Path) -> None:
    go = tmp_path / "go"
    running.kill("small-0")
    job_id = running.submit(script_job("--epochs=5", "--hold=3", f"--go={go}", workers={"min": 1, "max": 4}))
    running.until_step(job_id, 2)
    (before,) = running.events(job_id, "workers_started")
    running.shoal.add("small-0")
    running.killed.remove("small-0")
    after = running.until_event(job_id, "workers_started", lambda event: event["seq"] > before["seq"])
    go.touch()
    events = running.finish(job_id)
    check_reports(running, job_id, 5)
    assert (len(before["nodes"]), len(after["nodes"]), after["step"]) == (3, 4, 2)
    (recovery,) = of_kind(events, "recovery_done")
    assert (recovery["cause"], recovery["nodes_joined"], recovery["redone_steps"]) == ("node_joined", ["small-0"], 0)


@pytest.mark.long
def test_workers_leave_a_node_that_is_to_go_after_their_next_checkpoint(running: Running) -> None:
    job_id = running.submit(script_job("--epochs=5", "--leave=3"))
    running.until_step(job_id, 2)
    (started,) = running.events(job_id, "workers_started")
    victim = next(node for node in started["nodes"] if node != "big-0")
    running.client.preempt(victim, notice_s=600)
    events = running.finish(job_id)
    check_reports(running, job_id, 5)
    (recovery,) = of_kind(events, "recovery_done")
    assert (recovery["cause"], recovery["nodes_drained"]) == ("preemption_notice", [victim])
    assert recovery["redone_steps"] == 0 and recovery["step"] >= 3
    assert victim not in of_kind(events, "workers_started")[-1]["nodes"]


@pytest.mark.long
def test_an_error_of_the_scripts_own_ends_the_job_with_its_line(running: Running) -> None:
    job_id = running.submit(script_job("--epochs=4", "--fail=2", workers={"min": 1, "max": 1}))
    status = ended(running, job_id)
    assert (status["state"], status["code"]) == ("failed", "script_failed")
    line = next(
        number
        for number, text in enumerate((PROJECT / "line.py").read_text().splitlines(), start=1)
        if "one too many" in text
    )
    assert f"ZeroDivisionError: epoch 2 is one too many (line.py:{line}, in train_loop)" in status["reason"]
    events = running.events(job_id)
    (failed,) = of_kind(events, "script_failed")
    assert failed["rank"] == 0 and "raise ZeroDivisionError" in failed["traceback"]
    assert not of_kind(events, "node_lost") and not of_kind(events, "recovery_done")


@pytest.mark.long
def test_a_script_that_is_not_there_is_named(running: Running) -> None:
    script = {"working_dir": PROJECT.as_uri(), "entrypoint": "figures:nothing"}
    status = ended(running, running.submit(script_job(script=script)))
    assert (status["state"], status["code"]) == ("failed", "script_missing")
    assert "script.entrypoint = 'figures:nothing': module 'figures' has no function 'nothing'" in status["reason"]


@pytest.mark.long
def test_a_cancelled_script_ends_with_its_workers(running: Running, tmp_path: Path) -> None:
    job_id = running.submit(script_job("--epochs=3", "--hold=2", f"--go={tmp_path / 'never'}"))
    running.until_step(job_id, 1)
    assert running.processes("ray::RayTrainWorker")
    running.client.cancel(job_id)
    assert ended(running, job_id)["state"] == "cancelled"

    def nobody() -> bool:
        left = [*running.processes("ray::ScriptActor"), *running.processes("ray::RayTrainWorker")]
        return not left and not _scripts(running)

    eventually(nobody, 60)


def _scripts(running: Running) -> list[psutil.Process]:
    found = psutil.Process(running.shoal.cluster_pid).children(recursive=True)
    return [each for each in found if "shoal_workers.script_main" in each.cmdline()]


# --- Ray's own ---


def write_fashion_mnist(root: Path, num_train: int, num_test: int) -> None:
    """Files as the data set has them, of pixels at random: what the scripts would otherwise download."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    drawn = np.random.default_rng(3)
    for name, count in (("train", num_train), ("t10k", num_test)):
        images = drawn.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = drawn.integers(0, 10, count, dtype=np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())


@pytest.fixture(scope="session")
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The package that Ray's examples take their data from, where it can be sent to nodes from. `make setup` puts it
    beside what else is installed."""
    folder = Path(sys.prefix, "for-scripts")
    if not (folder / "torchvision").is_dir():
        folder = tmp_path_factory.mktemp("for-scripts")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, "torchvision==0.16.2"], check=True)
    return (folder / "torchvision").as_uri()


@pytest.fixture
def data_of_the_quick_start() -> Iterator[None]:
    """The script says itself where it keeps its data. Few pictures: it trains a ResNet on what may be half a core."""
    root = Path("/tmp/data/FashionMNIST")
    if root.exists():
        pytest.skip(f"{root} is somebody's")
    write_fashion_mnist(root.parent, 3_200, 64)
    yield
    shutil.rmtree(root)


@pytest.mark.long
def test_the_quick_start_of_ray_train_finishes_after_the_loss_of_a_node(
    running: Running, torchvision: str, data_of_the_quick_start: None
) -> None:
    """As it ships with Ray, whose documentation shows it. It reports nothing and stores nothing, so its workers begin
    anew. One of them is held where it is until its node is gone, or it might be through before."""
    script = {"path": str(EXAMPLES / "torch_quick_start.py"), "py_modules": [torchvision]}
    job_id = running.submit(script_job(name="quick start", script=script))
    started = running.until_event(job_id, "workers_started")
    victim = next(node for node in started["nodes"] if node != "big-0")
    there = running.shoal.pids(victim)["all"]
    held = [each for pid, each in running.processes("ray::RayTrainWorker").items() if pid in there]
    assert held
    for process in held:
        running.stop(process)
    running.kill(victim)
    events = running.finish(job_id)
    assert [event["node"] for event in of_kind(events, "node_lost")] == [victim]
    assert victim not in of_kind(events, "workers_started")[-1]["nodes"]
    assert "epoch: 2, loss:" in printed(events)
    assert of_kind(events, "trainer_adjusted")[0]["settings"]["num_workers"] == "1 to 2 (the script said 4)"


@pytest.mark.long
def test_the_first_example_of_rays_documentation_reports_its_figures(
    running: Running, torchvision: str, tmp_path: Path
) -> None:
    """It asks for 4 GPUs, reports two figures for each of 10 epochs, and keeps its data in the home folder."""
    write_fashion_mnist(tmp_path / "data", 640, 64)
    path = str(EXAMPLES / "torch_fashion_mnist_example.py")
    script = {"path": path, "env": {"HOME": str(tmp_path)}, "py_modules": [torchvision]}
    job_id = running.submit(script_job(name="fashion", script=script, metric="accuracy"))
    running.finish(job_id)
    found = running.client.metrics(job_id)
    assert [told["step"] for told in found["reported"]] == list(range(1, 11))
    for told, point in zip(found["reported"], found["points"], strict=True):
        assert set(told["metrics"]) == {"loss", "accuracy"}
        assert point["loss"] == told["metrics"]["accuracy"]
