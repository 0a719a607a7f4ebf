"""What every worker process of a drill's Ray cluster runs first: in the one that will supervise, supervisors draw plans
as they do on a ground of processes. All others do without what that would have them load."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_TESTS = Path(__file__).parents[1]
_SUPERVISOR = "shoal_workers.supervisor"


def environment() -> Mapping[str, str]:
    """What the processes of a Ray cluster must be given for it; the first is the way in which Ray itself tells workers
    of a `worker_process_setup_hook`."""
    paths = [str(_TESTS), str(_TESTS / "planner"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "faults.worker_hook.prepare",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def prepare() -> None:
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Once, for the module of supervisors."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _SUPERVISOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_prepare(module: ModuleType) -> None:
            load(module)
            _prepare(module.Supervisor)

        spec.loader.exec_module = load_and_prepare  # type: ignore[method-assign]
        return spec


def _prepare(supervisor: Any) -> None:
    begin = supervisor.__init__

    def begin_and_draw(self: Any, **given: Any) -> None:
        from faults.drawn_plans import draw_plans

        begin(self, **given)
        draw_plans(self)

    supervisor.__init__ = begin_and_draw
