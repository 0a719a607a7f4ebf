"""Small values: the ledger, errors that cross processes, tags, the learning rate, and measurements."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_runs import job

from shoal_workers import errors
from shoal_workers.errors import OutOfDeviceMemory
from shoal_workers.measure import measure_block, measure_embedding, measure_head
from shoal_workers.memory import DeviceMemory
from shoal_workers.optimizer import clip_scale, learning_rate
from shoal_workers.processes import ProcessLost
from shoal_workers.tags import Purpose, tag

ERRORS = [
    errors.EpochAbandoned("epoch 3 was abandoned"),
    errors.PeerLost(3, "a receive", "Connection reset by peer"),
    errors.OutOfDeviceMemory(
        "t4-0:1", 17 * 1024**3, 16 * 1024**3, "activations", (("weights", 4096), ("gradients", 8192))
    ),
    errors.OutOfHostMemory("t4-0:1", 9 * 1024**3, 8 * 1024**3, "optimizer state"),
    errors.DataError("/data/a.jsonl", "line 17", "'[1'", "is no JSON object"),
    errors.UserCodeError("module 3 gives a tuple"),
    errors.DeviceMissing("gpu:0", 0),
    errors.DataDiffers("file:///data", "a.jsonl", "3 files of 9 bytes", "are there now, and training began with 2"),
    errors.StepRefused(7, "loss or gradients are not finite on ranks [2]"),
    ProcessLost(2),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pickle_and_say_everything(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    for argument in error.args:
        parts = itertools.chain.from_iterable(argument) if isinstance(argument, tuple) else (argument,)
        assert all(str(part) in str(error) for part in parts)


def test_every_error_is_tested_to_pickle() -> None:
    defined = {item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)}
    assert defined <= {type(error) for error in ERRORS}


def test_ledger_holds_its_limit_and_remembers_its_peak() -> None:
    memory = DeviceMemory("t4-0:1", 100)
    memory.charge("weights", 60)
    memory.charge("activations", 40)
    with pytest.raises(OutOfDeviceMemory) as caught:
        memory.charge("staging", 1)
    assert (caught.value.device, caught.value.need_bytes, caught.value.limit_bytes) == ("t4-0:1", 101, 100)
    assert caught.value.in_use == (("activations", 40), ("weights", 60))
    memory.release("activations", 40)
    memory.charge("staging", 30)
    assert memory.used_bytes == 90
    assert memory.peak_bytes == 100
    assert memory.breakdown == {"weights": 60, "activations": 40}
    memory.release_all("staging")
    memory.release_all("never charged")
    assert memory.used_bytes == 60


def test_no_limit_never_refuses() -> None:
    memory = DeviceMemory("cpu", None)
    memory.charge("weights", 1 << 60)
    assert memory.peak_bytes == 1 << 60


def test_tags_tell_purposes_and_numbers_apart() -> None:
    assert len({tag(purpose, number) for purpose in Purpose for number in range(100)}) == 100 * len(Purpose)


def test_learning_rate_warms_up_linearly_then_stays() -> None:
    train = replace(job().train, lr=1.0, warmup_steps=4)
    assert [learning_rate(train, step) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(replace(train, warmup_steps=0), 1) == 1.0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_learning_rate_falls_from_the_end_of_the_warm_up_on(schedule: Any, expected: list[float]) -> None:
    """A step after the last one would have the least rate."""
    train = replace(job().train, steps=6, lr=1.0, warmup_steps=2, lr_schedule=schedule, min_lr=0.1)
    assert [learning_rate(train, step) for step in range(1, 7)] == pytest.approx(expected, abs=1e-6)
    assert learning_rate(train, 7) == pytest.approx(0.1)
    assert learning_rate(train, 1000) == pytest.approx(0.1)


def test_only_norms_above_the_limit_are_clipped() -> None:
    train = job().train
    assert clip_scale(train, 1e9) == 1.0
    train = replace(train, clip_norm=0.5)
    assert clip_scale(train, 0.4) == 1.0
    assert clip_scale(train, 2.0) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_measurements_are_of_the_cut_shapes_and_leave_threads_as_they_were(precision: str, tp: int) -> None:
    model = replace(job().model, tie_embeddings=False)
    threads = torch.get_num_threads()
    for measure in (measure_block, measure_embedding, measure_head):
        forward_s, backward_s = measure(model, 32, tp, 2, 1, precision, 3)  # type: ignore[arg-type]
        assert forward_s > 0
        assert backward_s > 0
    assert torch.get_num_threads() == threads
