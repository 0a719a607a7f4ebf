"""What is told of single recoveries beyond their bars: a waterfall of phases one after the other, and what the object
store alone would have taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_recovery.journal import RecoveryDone
from shoal_service import jobs
from shoal_service.timeline import PHASES, SOURCES, Event, duration, num_bytes, recoveries, stack

_MEANINGS = {
    "detect": "the blow is noticed",
    "decide": "a plan, and what comes from where",
    "restore": "bytes arrive",
    "rebuild": "groups and buffers are made",
    "rest": "what is left of it, told apart no further",
    "first step": "the first step of the new plan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """A row of the waterfall; `x` and `width` are percent of the whole."""

    name: str
    meaning: str
    x: float
    width: float
    seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAlone:
    """`seconds` that all bytes of a recovery would take at the rate at which this job's own recoveries have read from
    the store; None where none has."""

    seconds: float | None
    bytes_per_s: float | None


def waterfall(payload: Mapping[str, Any], first_step_s: float | None) -> tuple[Fall, ...]:
    """Of a recovery's entry in the journal; its phases follow each other. `first_step_s`: None where no step was done
    after it (yet)."""
    parts = [(phase, float(payload[f"{phase}_s"])) for phase in PHASES]
    rest_s = float(payload["total_s"]) - sum(seconds for _, seconds in parts)
    if rest_s > 0.001:
        parts.append(("rest", rest_s))
    if first_step_s is not None:
        parts.append(("first step", first_step_s))
    whole_s = sum(seconds for _, seconds in parts) or 1.0
    falls, x = [], 0.0
    for name, seconds in parts:
        width = 100 * seconds / whole_s
        falls.append(
            Fall(
                name=name.replace(" ", "-"),
                meaning=f"{name}: {_MEANINGS[name]}",
                x=round(x, 3),
                width=round(width, 3),
                seconds=seconds,
                text=milliseconds(seconds),
            )
        )
        x += width
    return tuple(falls)


def milliseconds(seconds: float) -> str:
    """Phases are compared with each other, so up to ten seconds they are all in one unit."""
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else duration(seconds)


def store_alone(payload: Mapping[str, Any], events: Sequence[Event]) -> StoreAlone:
    """Of a recovery, by the journal's `events`."""
    taken, took_s = 0, 0.0
    for event in events:
        if event.kind == RecoveryDone.kind:
            seconds = float(event.payload.get("source_s", {}).get("store", 0.0))
            if seconds > 0:
                taken += int(event.payload["num_bytes"].get("store", 0))
                took_s += seconds
    if not taken or not took_s:
        return StoreAlone(seconds=None, bytes_per_s=None)
    wanted = sum(int(payload["num_bytes"].get(source, 0)) for source in SOURCES)
    return StoreAlone(seconds=wanted * took_s / taken, bytes_per_s=taken / took_s)


MAX_CARDS = 5  # recoveries that are shown in full; of older ones a line each
MAX_LINES = 60


def in_full(recoveries: Sequence[Event]) -> Sequence[Event]:
    return recoveries[-MAX_CARDS:]


def recoveries_panel(found: Sequence[Event], first_step_s: Mapping[int, float]) -> dict[str, Any]:
    """`cards` are the newest ones, newest first, each with its waterfall and what the store alone would have taken;
    `lines` what came before these, and `total` bytes and seconds by source over all of them."""
    drawn = recoveries(found, jobs.rfc3339)
    cards = [
        {
            "item": item,
            "falls": waterfall(event.payload, first_step_s.get(event.seq)),
            "alone": store_alone(event.payload, found),
            "seq": event.seq,
        }
        for item, event in zip(drawn[-MAX_CARDS:], in_full(found), strict=True)
    ]
    counts = {source: sum(int(event.payload["num_bytes"].get(source, 0)) for event in found) for source in SOURCES}
    return {
        "cards": cards[::-1],
        "lines": drawn[:-MAX_CARDS][::-1][:MAX_LINES],
        "hidden": max(0, len(drawn) - MAX_CARDS - MAX_LINES),
        "total": stack(counts, sum(counts.values()) or 1, num_bytes),
        "count": len(drawn),
    }
