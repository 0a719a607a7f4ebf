"""What every worker process of a drill's Ray cluster runs first: in the one that will supervise, supervisors draw plans
as they do on a ground of processes; ranks wait for devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import waiting_devices


def environment() -> Mapping[str, str]:
    return waiting_devices.environment("faults.worker_hook.prepare")


def prepare() -> None:
    waiting_devices.change_when_loaded({**waiting_devices.WAITING, "shoal_workers.supervisor": _draw_plans})


def _draw_plans(supervisor: Any) -> None:
    begin = supervisor.Supervisor.__init__

    def begin_and_draw(self: Any, **given: Any) -> None:
        from faults.drawn_plans import draw_plans

        begin(self, **given)
        draw_plans(self)

    supervisor.Supervisor.__init__ = begin_and_draw
