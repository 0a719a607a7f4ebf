"""What is told of single recoveries beyond their bars: a waterfall of phases one after the other, and what the object
store alone would have taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal_recovery.journal import CheckpointCommitted, RecoveryDone
from shoal_service import jobs
from shoal_service.known_by import Tellings
from shoal_service.timeline import PHASES, SOURCES, Event, Segment, bytes_per_s, duration, num_bytes, recoveries, stack

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
    """`seconds` that all bytes of a recovery would take at `bytes_per_s`, at which this job's own recoveries have read
    from the store, or, where none has, its checkpoints were brought there (`by_uploads`). None where there are neither.
    """

    seconds: float | None
    bytes_per_s: float | None
    by_uploads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """What came from one kind of source, or (`is_bad`) what did not come from one source as it was sealed there. `took`
    is from the first byte to the last of the slowest rank; it and `speed` are empty where nobody has measured it."""

    source: str
    size: str
    took: str
    speed: str
    verdict: str
    is_bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLine:
    """What one rank (`to`) took of one shard that `holder` had."""

    shard: str
    holder: str
    to: str
    size: str
    took: str
    speed: str
    verdict: str


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
    read_per_s = _rate(
        (event.payload["num_bytes"].get("store", 0), event.payload.get("source_s", {}).get("store", 0.0))
        for event in events
        if event.kind == RecoveryDone.kind
    )
    rate = read_per_s or _rate(
        (event.payload["num_bytes"], event.payload["duration_s"])
        for event in events
        if event.kind == CheckpointCommitted.kind
    )
    if rate is None:
        return StoreAlone(seconds=None, bytes_per_s=None)
    wanted = sum(int(payload["num_bytes"].get(source, 0)) for source in SOURCES)
    return StoreAlone(seconds=wanted / rate, bytes_per_s=rate, by_uploads=read_per_s is None)


def _rate(parts: Iterable[tuple[float, float]]) -> float | None:
    """Of (bytes, seconds), in bytes per second."""
    timed = [(count, seconds) for count, seconds in parts if count > 0 and seconds > 0]
    return sum(count for count, _ in timed) / sum(seconds for _, seconds in timed) if timed else None


def source_lines(payload: Mapping[str, Any]) -> tuple[SourceLine, ...]:
    """Of a recovery's entry in the journal, nearest source first. Ranks use nothing that was moved before its checksum
    agrees with what it was sealed with."""
    speeds, took_s = bytes_per_s(payload), payload.get("source_s", {})
    good = [
        SourceLine(
            source=source,
            size=num_bytes(payload["num_bytes"][source]),
            took=milliseconds(took_s[source]) if source in speeds else "",
            speed=f"{num_bytes(speeds[source])}/s" if source in speeds else "",
            verdict="not moved" if source == "own" else "checksums agree",
            is_bad=False,
        )
        for source in SOURCES
        if payload["num_bytes"].get(source)
    ]
    bad = [
        SourceLine(
            source=f"{failed['source']}: {failed['object']}, step {failed['step']}",
            size=num_bytes(failed["num_bytes"]),
            took="",
            speed="",
            verdict=f"not used: {failed['problem']}. Instead: {', '.join(failed['instead'])}",
            is_bad=True,
        )
        for failed in payload.get("failed_sources", ())
    ]
    return (*good, *bad)


def shard_lines(payload: Mapping[str, Any]) -> tuple[ShardLine, ...]:
    """Of a recovery's entry in the journal, the largest first. What did not agree with its checksum is none of them."""
    return tuple(
        ShardLine(
            shard=each["shard"],
            holder=_holder(each["source"], each["node"]),
            to=each["to"],
            size=num_bytes(each["num_bytes"]),
            took=milliseconds(each["took_s"]),
            speed=f"{num_bytes(each['num_bytes'] / each['took_s'])}/s" if each["took_s"] > 0 else "",
            verdict="checksums agree",
        )
        for each in payload.get("shards", ())
    )


def _holder(source: str, node: str) -> str:
    return f"{node}, {'the same node' if source == 'node' else source}" if node else "object store"


MAX_CARDS = 5  # recoveries that are shown in full; of older ones a line each
MAX_LINES = 60


def in_full(recoveries: Sequence[Event]) -> Sequence[Event]:
    return recoveries[-MAX_CARDS:]


def recoveries_panel(
    found: Sequence[Event], stored: Sequence[Event], first_step_s: Mapping[int, float], history: Sequence[Event] = ()
) -> dict[str, Any]:
    """`stored` are checkpoints that were brought to the object store. `cards` are the newest recoveries, newest first,
    each with its waterfall, its sources and what the store alone would have taken; `lines` what came before these, and
    `total` bytes and seconds by source over all of them. `history` tells how nodes came to be known to go."""
    drawn, tellings = recoveries(found, jobs.rfc3339), Tellings(history)
    cards = [
        {
            "item": item,
            "falls": waterfall(event.payload, first_step_s.get(event.seq)),
            "alone": store_alone(event.payload, (*found, *stored)),
            "lines": source_lines(event.payload),
            "shards": shard_lines(event.payload),
            "num_shards": event.payload.get("num_shards", 0),
            "told": tuple(known.sentence for known in tellings.of(event)),
            "seq": event.seq,
        }
        for item, event in zip(drawn[-MAX_CARDS:], in_full(found), strict=True)
    ]
    counts = {source: sum(int(event.payload["num_bytes"].get(source, 0)) for event in found) for source in SOURCES}
    return {
        "cards": cards[::-1],
        "lines": drawn[:-MAX_CARDS][::-1][:MAX_LINES],
        "hidden": max(0, len(drawn) - MAX_CARDS - MAX_LINES),
        "total": _timed(stack(counts, sum(counts.values()) or 1, num_bytes), found),
        "count": len(drawn),
    }


def _timed(parts: Sequence[Segment], found: Sequence[Event]) -> tuple[Segment, ...]:
    """With the seconds that they took in all, where anybody told."""
    took_s = {name: sum(float(event.payload.get("source_s", {}).get(name, 0.0)) for event in found) for name in SOURCES}
    return tuple(
        replace(part, text=f"{part.text} in {duration(took_s[part.name])}") if took_s[part.name] > 0 else part
        for part in parts
    )
