"""What every worker process of a drill's Ray cluster runs first: supervisors draw plans as they do on a ground of
processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]


def environment() -> Mapping[str, str]:
    """What the processes of a Ray cluster must be given for it; the first is the way in which Ray itself tells workers
    of a `worker_process_setup_hook`."""
    paths = [str(_TESTS), str(_TESTS / "planner"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "faults.worker_hook.prepare",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def prepare() -> None:
    from shoal_workers.supervisor import Supervisor

    begin = Supervisor.__init__

    def begin_and_draw(self: Any, **given: Any) -> None:
        from faults.drawn_plans import draw_plans

        begin(self, **given)
        draw_plans(self)

    Supervisor.__init__ = begin_and_draw  # type: ignore[method-assign]
