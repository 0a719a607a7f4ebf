"""Ranks on Ray that compute as if each had a device of its own: a hook that Ray's worker processes run first.

On a few cores several ranks that step as fast as they can leave next to nothing to whatever else a test is about: a
node that comes back needs several times as long, and as many steps. So every forward and backward of a micro-batch
waits a little, as it would for a device that computes meanwhile.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_DEVICE_S = 0.04
_TESTS = Path(__file__).parent

Changes = Mapping[str, Callable[[Any], None]]


def environment(hook: str = f"{Path(__file__).stem}.prepare") -> Mapping[str, str]:
    """What the processes of a Ray cluster must be given; the first is the way in which Ray itself tells workers of a
    `worker_process_setup_hook`."""
    paths = [str(_TESTS), str(_TESTS / "planner"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": hook, "PYTHONPATH": os.pathsep.join(paths)}


def prepare() -> None:
    change_when_loaded(WAITING)


def change_when_loaded(changes: Changes) -> None:
    """Whoever does not load such a module does without what the change would load."""
    sys.meta_path.insert(0, _Finder(changes))


def _wait_for_devices(engine: Any) -> None:
    execute, computing = engine.Engine._execute, (engine.Forward, engine.Backward, engine.WeightGradient)

    def execute_and_wait(self: Any, instruction: Any, step: int) -> None:
        execute(self, instruction, step)
        if isinstance(instruction, computing):
            time.sleep(_DEVICE_S)

    engine.Engine._execute = execute_and_wait


WAITING: Changes = {"shoal_workers.engine": _wait_for_devices}


class _Finder(MetaPathFinder):
    """Changes each of these modules once, as it is loaded."""

    def __init__(self, changes: Changes) -> None:
        self._changes = dict(changes)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec
