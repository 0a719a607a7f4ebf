"""What ranks tell of errors: those of a user's code are told as such, with their lines, and no others are."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from shoal_planner.architecture import ModelSpec
from shoal_planner.errors import InvalidField
from shoal_planner.own_model import OwnModule
from shoal_workers.endings import Ending, ending_of
from shoal_workers.errors import EpochAbandoned, OutOfDeviceMemory, PeerLost, UserCodeError
from shoal_workers.own_modules import OwnBlock
from shoal_workers.wire import Connection

OURS = ModelSpec(layers=1, hidden=8, heads=2, ffn=8, vocab=8)
THEIRS = ModelSpec(layers=1, hidden=8, heads=2, ffn=8, vocab=8, module=OwnModule(entrypoint="users:build"))
CODE = """
import numpy as np
import torch

class Layer(torch.nn.Module):
    def __init__(self, raises):
        super().__init__()
        self.raises = raises

    def forward(self, x):
        return self.raises(x)

def plain(x):
    raise ValueError("of mine")

def library(x):
    return np.concatenate([x.numpy(), 3])

def shapes(x):
    return x @ torch.ones(3, 3)

def leaves(x):
    raise SystemExit(3)

def times_out(x):
    raise TimeoutError("of my server")

def connects(x):
    import socket
    socket.create_connection(("127.0.0.1", 1), timeout=5)

def remembers(x):
    raise MemoryError("for my table")

def stops(x):
    raise KeyboardInterrupt

def gives_up(x):
    class GivesUp(BaseException):
        pass
    raise GivesUp("enough")
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "users_code_of_this_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    import users_code_of_this_test

    return users_code_of_this_test


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    sys.modules.pop("users_code_of_this_test", None)


def ending(users: ModuleType, raises: Callable[[torch.Tensor], Any], model: ModelSpec = THEIRS) -> Ending | None:
    """Of what a block of the user's raises so."""
    block = OwnBlock(users.Layer(raises), torch.float32)
    try:
        block(torch.zeros(1, 2, 2))
    except BaseException as error:
        return ending_of(error, model, lambda lack: f"lacks: {lack}")
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("function", "said", "line"),
    [
        ("plain", "ValueError: of mine", 14),
        ("library", "must have same number of dimensions", 17),
        ("shapes", "mat1 and mat2 shapes cannot be multiplied", 20),
        ("leaves", "SystemExit: 3", 23),
        ("times_out", "TimeoutError: of my server", 26),
        ("connects", "ConnectionRefusedError", 30),
        ("remembers", "MemoryError: for my table", 33),
        ("stops", "KeyboardInterrupt", 36),
        ("gives_up", "GivesUp: enough", 41),
    ],
)
def test_errors_of_the_users_code_are_theirs(users: ModuleType, function: str, said: str, line: int) -> None:
    found = ending(users, getattr(users, function))
    assert found is not None
    assert (found.fatal, found.code) == (True, "user_code_failed")
    assert said in found.problem
    assert f"users_code_of_this_test.py, line {line}, in {function}" in found.problem
    assert "own_modules" not in found.problem and "torch/nn" not in found.problem


def raising(error: BaseException) -> Callable[[torch.Tensor], Any]:
    def raises(x: torch.Tensor) -> Any:
        raise error

    return raises


def wrapping(error: BaseException) -> Callable[[torch.Tensor], Any]:
    def raises(x: torch.Tensor) -> Any:
        try:
            raise error
        except Exception as inner:
            raise RuntimeError("a layer failed") from inner

    return raises


@pytest.mark.parametrize("passed_on", [raising, wrapping])
def test_what_a_peer_or_a_device_did_is_not_theirs(users: ModuleType, passed_on: Any) -> None:
    assert ending(users, passed_on(EpochAbandoned("another began"))) is None
    lost = ending(users, passed_on(PeerLost(1, "a send", "closed")))
    assert lost is not None and (lost.fatal, lost.local, lost.code) == (False, False, "rank_failed")
    lack = ending(users, passed_on(OutOfDeviceMemory("a:0", 8, 4, "weights")))
    assert lack is not None and lack.local and lack.problem.startswith("lacks: a:0 would need 8 bytes")


@pytest.mark.parametrize(("field", "code"), [("data.uri", "data_broken"), ("train.init_from", "rank_failed")])
def test_a_field_that_cannot_be_used_is_told_in_a_sentence(users: ModuleType, field: str, code: str) -> None:
    found = ending(users, raising(InvalidField(field, "/a", "is not there")), OURS)
    assert found == Ending(problem=f"{field} = '/a': is not there", local=True, code=code)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
        *(
            OSError(number, "of a node")
            for number in (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.EROFS)
        ),
    ],
)
def test_what_a_node_cannot_do_is_the_nodes(users: ModuleType, error: BaseException) -> None:
    found = ending(users, raising(error))
    assert found is not None and (found.fatal, found.local) == (False, True)


def test_what_ours_could_not_do_for_theirs_is_the_nodes(users: ModuleType) -> None:
    """As where a layer of theirs has a product whose parts are on several ranks."""

    def asks_a_peer(x: torch.Tensor) -> None:
        gone = socket.socket()
        connection = Connection(gone)
        gone.close()
        connection.set_timeout(1.0)

    found = ending(users, asks_a_peer)
    assert found is not None and (found.fatal, found.local) == (False, True)
    assert "Bad file descriptor" in found.problem


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "GeneratorExit('x')", "TimeoutError('x')", "SystemExit(3)"])
def test_whatever_is_raised_while_modules_are_built_is_told(tmp_path: Path, raised: str) -> None:
    """Not as a traceback of ours."""
    (tmp_path / "leaves_early.py").write_text(f"def build():\n    raise {raised}\n")
    module = {"entrypoint": "leaves_early:build"}
    order = {"module": module, "seed": 0, "seq_len": 8, "precision": "fp32", "paths": [str(tmp_path)]}
    command = [sys.executable, "-m", "shoal_workers.own_looking"]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"leaves_early.py, line 2, in build: raise {raised}" in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_of_ours_are_ours() -> None:
    """Also where a library that we called raised them, and whatever the model is."""
    for model in (OURS, THEIRS):
        try:
            np.concatenate([np.zeros(2), 3])  # type: ignore[list-item]
        except ValueError as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this file's line
            found = ending_of(error, model, str)
        assert found is not None and (found.fatal, found.local) == (False, True)
    refused = ending_of(UserCodeError("module 3 gives a tuple"), THEIRS, str)
    assert refused == Ending(problem="module 3 gives a tuple", fatal=True, code="user_code_failed")
