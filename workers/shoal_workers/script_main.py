"""The process that a user's script runs in: `python -m shoal_workers.script_main ORDER ARGS`; `script_actor` starts it.

Owns what happens before and after the script: it attaches to the raylet that it was started by, hands trainers to
`train_shim`, and writes down what the script failed with. The script runs as `__main__` and knows nothing of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal_workers.train_shim import TrainerOrder, install

_FAILED = 1


class BadScript(Exception):
    """What the job says of its script cannot be run: `field`, its `value`, and what is wrong with it."""

    def __init__(self, field: str, value: str, problem: str) -> None:
        super().__init__(field, value, problem)
        self.field, self.value, self.problem = field, value, problem

    def __str__(self) -> str:
        return f"script.{self.field} = {self.value!r}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOrder:
    """`lifeline` is a descriptor that is closed when whoever started this process is gone, `report` the file for what
    went wrong, `raylet` the id of the Ray node to attach to."""

    path: str | None
    entrypoint: str | None
    secrets: dict[str, str]
    lifeline: int
    report: str
    raylet: str
    trainer: TrainerOrder


def main() -> int:
    order = read_order(sys.argv[1])
    arguments = sys.argv[2:]
    threading.Thread(target=_die_with, args=(order.lifeline,), name="lifeline", daemon=True).start()
    try:
        install(order.trainer, order.raylet)
        run(order, arguments)
    except SystemExit:
        raise
    except BadScript as error:
        _report(order, "script_missing", str(error), "")
        sys.stderr.write(f"{error}\n")
        return _FAILED
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, _users(error.__traceback__)))
        _report(order, "script_failed", f"{type(error).__name__}: {error}", text)
        sys.stderr.write(text)
        return _FAILED
    return 0


def read_order(text: str) -> ScriptOrder:
    value = json.loads(text)
    return ScriptOrder(**{**value, "trainer": TrainerOrder(**value["trainer"])})


def run(order: ScriptOrder, arguments: list[str]) -> None:
    """Raises BadScript, or whatever the script raises."""
    for name, held_as in order.secrets.items():
        if not os.environ.get(name):
            raise BadScript("secrets", name, f"this node has no environment variable {held_as}")
    if order.path is not None:
        path = Path(order.path).resolve()
        if not path.is_file():
            raise BadScript("path", order.path, f"there is no such file: {path}")
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
        return
    assert order.entrypoint is not None
    module, _, function = order.entrypoint.partition(":")
    sys.path.insert(0, os.getcwd())
    _check_module(order.entrypoint, module)
    sys.argv = [module, *arguments]
    if function:
        _function(order.entrypoint, module, function)()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _check_module(entrypoint: str, module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        raise BadScript("entrypoint", entrypoint, f"there is no module {error.name!r} on the import path") from error
    if found is None:
        raise BadScript("entrypoint", entrypoint, f"there is no module {module!r} on the import path")


def _function(entrypoint: str, module: str, name: str) -> Any:
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise BadScript("entrypoint", entrypoint, f"module {module!r} has no function {name!r}")
    return function


def _users(frames: TracebackType | None) -> TracebackType | None:
    """Without what is ours and runpy's: a user looks for the user's own lines."""
    while frames is not None and (
        frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__)
        or frames.tb_frame.f_code.co_filename.startswith("<frozen")
    ):
        frames = frames.tb_next
    return frames


def _report(order: ScriptOrder, code: str, problem: str, text: str) -> None:
    Path(order.report).write_text(json.dumps({"code": code, "problem": problem, "traceback": text}))


def _die_with(descriptor: int) -> None:
    """Nothing is ever written there: what is read is its end."""
    os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
