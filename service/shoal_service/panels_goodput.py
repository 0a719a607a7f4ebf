"""What the goodput panel shows: bars of wall and device time, in words and percent. The sums are goodput.py's."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.goodput import PRODUCTIVE, REDONE, STALLED, Goodput
from shoal_service.timeline import Segment, duration, stack
from shoal_service.words import percent

WINDOWS = {"all": None, "24h": 86400.0, "1h": 3600.0}
NAMES = {
    PRODUCTIVE: "steps that count",
    STALLED: "steps that count, held up by copies of state",
    REDONE: "steps done again",
    "evaluation": "evaluations",
    "detect": "recovery: detect",
    "decide": "recovery: decide",
    "restore": "recovery: restore",
    "rebuild": "recovery: rebuild",
    "rest": "recovery: rest",
    "starting": "planning and starting",
    "waiting": "waiting for nodes",
    "paused": "paused by users",
    "other": "not told apart",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPanel:
    """`rows` are (name of the part for its colour, words, time, share)."""

    window: str
    ratio: str
    elapsed: str
    bar: tuple[Segment, ...]
    rows: tuple[tuple[str, str, str, str], ...]
    devices: tuple[Segment, ...]
    device_rows: tuple[tuple[str, str, str, str], ...]
    device_ratio: str
    bubble: str


def goodput_panel(found: Goodput, window: str = "all") -> GoodputPanel:
    """`window` is one of WINDOWS."""
    parts = {name: seconds for name, seconds in found.parts.items() if seconds > 0}
    whole_s = max(found.elapsed_s, sum(parts.values())) or 1.0
    devices = _devices(found)
    held_s = sum(devices.values()) or 1.0
    return GoodputPanel(
        window=window,
        ratio="-" if found.ratio is None else percent(found.ratio),
        elapsed=duration(found.elapsed_s),
        bar=stack(parts, whole_s, duration),
        rows=tuple(
            (name, NAMES[name], duration(seconds), percent(seconds / whole_s)) for name, seconds in parts.items()
        ),
        devices=stack(devices, held_s, hours),
        device_rows=tuple(
            (name, _DEVICE_NAMES[name], hours(seconds), percent(seconds / held_s)) for name, seconds in devices.items()
        ),
        device_ratio=percent(devices[PRODUCTIVE] / held_s) if devices else "",
        bubble=duration(found.bubble_s) if found.bubble_s >= 0.001 else "",
    )


_DEVICE_NAMES = {
    PRODUCTIVE: "steps that count",
    REDONE: "steps done again",
    "idle": "held without such work: recoveries, starting, copies, devices that the plan leaves out",
}


def _devices(found: Goodput) -> dict[str, float]:
    if not found.held_device_s or found.productive_device_s is None or found.redone_device_s is None:
        return {}
    worked_s = found.productive_device_s + found.redone_device_s
    return {
        PRODUCTIVE: found.productive_device_s,
        REDONE: found.redone_device_s,
        "idle": max(0.0, found.held_device_s - worked_s),
    }


def hours(device_s: float) -> str:
    """As in "3.25 device-hours", or seconds where it is little."""
    return f"{device_s / 3600:,.3g} device-hours" if device_s >= 360 else f"{device_s:,.0f} device-seconds"
