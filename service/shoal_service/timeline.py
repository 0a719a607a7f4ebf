"""Where the bars of a job's timeline stand: a lane of its states, one of what was rented, one per node, recoveries;
and the bars of each recovery, by phase and by source of bytes. Pure geometry and words; timeline.html draws it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal_recovery.journal import (
    NodeJoined,
    NodeLost,
    NodeNoticed,
    NodeRecovered,
    NodeSlowed,
    NodeStays,
    NoticeEnded,
    PlanAdopted,
    RecoveryDone,
    StateChanged,
)
from shoal_recovery.journal_scripts import WorkersStarted
from shoal_recovery.journal_shares import ShareTaken
from shoal_service.presence import arrivals, departures

LABEL_WIDTH = 118.0
WIDTH = 1000.0
LANE = 22.0
GAP = 6.0
AXIS = 24.0
HEAD = 16.0  # strip for the names of recoveries
_NAME = 26.0  # of a recovery
_WORD = 56.0  # beside a mark
MAX_NODES = 24
PHASES = ("detect", "decide", "restore", "rebuild")
SOURCES = ("own", "node", "peer", "store")
KINDS = (
    *(StateChanged.kind, PlanAdopted.kind, RecoveryDone.kind),
    *(NodeLost.kind, NodeJoined.kind, NodeNoticed.kind, NodeStays.kind, NoticeEnded.kind),
    *(NodeSlowed.kind, NodeRecovered.kind, WorkersStarted.kind, ShareTaken.kind),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A stretch of a lane; `style` names its look (a state, or `node`)."""

    x: float
    width: float
    style: str
    text: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """`href` leads to more of it on the page, where there is more."""

    x: float
    text: str
    title: str
    href: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    y: float
    name: str
    bands: tuple[Band, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    height: float
    lanes: tuple[Lane, ...]
    recoveries: tuple[Mark, ...]
    ticks: tuple[Mark, ...]
    hidden_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a stacked bar; lengths are in percent of the widest bar of its kind."""

    name: str
    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    number: int
    at: str
    cause: str
    reason: str
    epoch: int
    step: int
    total: str
    redone_steps: int
    lost_steps: int
    phases: tuple[Segment, ...]
    sources: tuple[Segment, ...]
    total_bytes: str
    plans: str
    failed_sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A journal entry as plain values, in order."""

    seq: int
    at_s: float
    kind: str
    payload: Mapping[str, Any]


Rented = Sequence[tuple[float, str, str]]


def timeline(events: Sequence[Event], *, created_at_s: float, end_at_s: float, rented: Rented = ()) -> Timeline:
    """`end_at_s` is now, or when the job ended; `rented` is what came of renting for it: when, a word, a sentence."""
    # Journals carry the clocks of their clusters, which may be behind ours.
    created_at_s = min(created_at_s, events[0].at_s) if events else created_at_s
    end_at_s = max(end_at_s, events[-1].at_s) if events else end_at_s
    scale = _Scale(created_at_s, max(end_at_s, created_at_s + 1.0))
    nodes = node_spans(events, end_at_s)
    paces, told = _pace_marks(events, scale), _notices(events, end_at_s)
    links = {(event.payload["node"], event.at_s): event_link(event.seq) for event in events if "node" in event.payload}
    eventful = [
        name
        for name, spans in nodes.items()
        if len(spans) > 1 or spans[0][2] is not None or spans[0][3] or name in paces or name in told
    ]
    shown = sorted(nodes) if len(nodes) <= MAX_NODES else sorted(eventful)[:MAX_NODES]
    lanes = [_job_lane(events, scale, created_at_s)]
    if rented:
        asked = (Mark(x=scale(at_s), text=word, title=reason) for at_s, word, reason in rented)
        lanes.append(Lane(y=HEAD + LANE + GAP, name="rented", bands=(), marks=_spread(asked, _WORD)))
    for name in shown:
        y = HEAD + len(lanes) * (LANE + GAP)
        lanes.append(_node_lane(name, nodes[name], scale, y, paces.get(name, ()), told.get(name, ()), links))
    recoveries = [event for event in events if event.kind == RecoveryDone.kind]
    marks = _spread(
        Mark(
            x=scale(event.at_s),
            text=f"R{number}",
            title=f"R{number}: {event.payload['reason']}",
            href=f"#recovery-{number}",
        )
        for number, event in enumerate(recoveries, start=1)
    )
    height = HEAD + len(lanes) * (LANE + GAP) + AXIS
    return Timeline(
        height=height, lanes=tuple(lanes), recoveries=marks, ticks=scale.ticks(), hidden_nodes=len(nodes) - len(shown)
    )


def event_link(seq: int) -> str:
    """From the page of a job: to an entry of its journal, however old, with the lines printed around it."""
    return f"?event={seq}#event-{seq}"


def _spread(marks: Iterable[Mark], width: float = _NAME) -> tuple[Mark, ...]:
    """Without the texts that would stand on the one before."""
    free, found = 0.0, []
    for mark in marks:
        stands = mark.x >= free
        found.append(mark if stands else replace(mark, text=""))
        free = mark.x + width if stands else free
    return tuple(found)


class _Scale:
    """Wall time to x."""

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s, self._span_s = first_s, last_s - first_s

    def __call__(self, at_s: float) -> float:
        share = min(1.0, max(0.0, (at_s - self._first_s) / self._span_s))
        return round(LABEL_WIDTH + share * (WIDTH - LABEL_WIDTH), 2)

    def ticks(self) -> tuple[Mark, ...]:
        step_s = next((nice for nice in _NICE_S if self._span_s / nice <= 8), self._span_s / 8)
        count = int(self._span_s // step_s)
        return tuple(
            Mark(
                x=self(self._first_s + index * step_s),
                text=f"+{duration(index * step_s)}" if index else "start",
                title="",
            )
            for index in range(count + 1)
        )


_NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800)


def _job_lane(events: Sequence[Event], scale: _Scale, created_at_s: float) -> Lane:
    changes = [(created_at_s, "queued", "submitted")]
    changes += [
        (event.at_s, str(event.payload["state"]), str(event.payload["reason"]))
        for event in events
        if event.kind == StateChanged.kind
    ]
    ends = [*(at_s for at_s, _, _ in changes[1:]), float("inf")]
    bands = tuple(
        Band(x=scale(at_s), width=_width(scale(at_s), scale(end)), style=state, text=state, title=f"{state}: {reason}")
        for (at_s, state, reason), end in zip(changes, ends, strict=True)
    )
    return Lane(y=HEAD, name="job", bands=bands, marks=())


def _width(x: float, end_x: float) -> float:
    return round(max(end_x - x, 1.5), 2)


Span = tuple[float, float, Mapping[str, Any] | None, bool]


def node_spans(events: Sequence[Event], end_at_s: float) -> dict[str, list[Span]]:
    """Per node: (from, until, how the job lost it, or gave it back to rest, or None, whether it joined later)."""
    spans: dict[str, list[Span]] = {}
    alive: dict[str, tuple[float, bool]] = {}
    for event in events:
        for name in arrivals(event.kind, event.payload):
            alive.setdefault(name, (event.at_s, event.kind == NodeJoined.kind))
        for name in sorted(departures(event.kind, event.payload, alive)):
            since_s, joined = alive.pop(name)
            spans.setdefault(name, []).append((since_s, event.at_s, event.payload, joined))
    for name, (since_s, joined) in alive.items():
        spans.setdefault(name, []).append((since_s, end_at_s, None, joined))
    return spans


def _pace_marks(events: Sequence[Event], scale: _Scale) -> dict[str, list[Mark]]:
    """By node, where it became a straggler and where it counted as none again."""
    words = {NodeSlowed.kind: "slow", NodeRecovered.kind: "not slow"}
    found: dict[str, list[Mark]] = {}
    for event in events:
        if event.kind in words:
            node, reason = str(event.payload["node"]), str(event.payload["reason"])
            link = event_link(event.seq)
            mark = Mark(x=scale(event.at_s), text=words[event.kind], title=f"{node}: {reason}", href=link)
            found.setdefault(node, []).append(mark)
    return found


def _until(lost: Mapping[str, Any]) -> str:
    if "state" in lost:
        return " until the job was paused"
    return " until it was given to other jobs" if "version" in lost else " until it was lost"


def _notices(events: Sequence[Event], end_at_s: float) -> dict[str, list[tuple[float, float, str]]]:
    """By node, from when until when somebody said that it goes away, and who and why."""
    open_since: dict[str, tuple[float, str]] = {}
    found: dict[str, list[tuple[float, float, str]]] = {}
    for event in events:
        if event.kind == NodeNoticed.kind:
            said = event.payload
            words = f"goes away in {duration(said['lead_s'])} ({said['source']}: {said['why']})"
            open_since.setdefault(said["node"], (event.at_s, words))
        elif event.kind in (NoticeEnded.kind, NodeLost.kind) and event.payload["node"] in open_since:
            since_s, words = open_since.pop(event.payload["node"])
            found.setdefault(event.payload["node"], []).append((since_s, event.at_s, words))
    for name, (since_s, words) in open_since.items():
        found.setdefault(name, []).append((since_s, end_at_s, words))
    return found


def _node_lane(
    name: str,
    spans: Sequence[Span],
    scale: _Scale,
    y: float,
    paces: Sequence[Mark],
    notices: Sequence[tuple[float, float, str]],
    links: Mapping[tuple[str, float], str],
) -> Lane:
    bands, marks = [], list(paces)
    for since_s, until_s, lost, joined in spans:
        x = scale(since_s)
        until = "" if lost is None else _until(lost)
        title = f"{name}: {'joined, ' if joined else ''}in the cluster{until}"
        bands.append(Band(x=x, width=_width(x, scale(until_s)), style="node", text="", title=title))
        if joined:
            marks.append(Mark(x=x, text="joined", title=f"{name} joined", href=links.get((name, since_s), "")))
        if lost is not None and "outcome" in lost:
            went = f"{name} went, as announced ({lost['source']})"
            marks.append(Mark(x=scale(until_s), text="gone", title=went, href=links.get((name, until_s), "")))
        elif lost is not None and "evidence" in lost:
            evidence = f"{name} was lost: {lost['evidence']} (noticed after {duration(lost['detect_s'])})"
            marks.append(Mark(x=scale(until_s), text="lost", title=evidence, href=links.get((name, until_s), "")))
    for since_s, until_s, words in notices:
        x = scale(since_s)
        bands.append(Band(x=x, width=_width(x, scale(until_s)), style="leaving", text="", title=f"{name} {words}"))
        marks.append(Mark(x=x, text="notice", title=f"{name} {words}", href=links.get((name, since_s), "")))
    return Lane(y=y, name=name, bands=tuple(bands), marks=tuple(marks))


def recoveries(events: Sequence[Event], rfc3339: Any) -> tuple[Recovery, ...]:
    found = [event for event in events if event.kind == RecoveryDone.kind]
    longest_s = max((_total_s(event.payload) for event in found), default=0.0) or 1.0
    most_bytes = max((sum(event.payload["num_bytes"].values()) for event in found), default=0) or 1
    return tuple(
        Recovery(
            number=number,
            at=rfc3339(event.at_s),
            cause=event.payload["cause"],
            reason=event.payload["reason"],
            epoch=event.payload["epoch"],
            step=event.payload["step"],
            total=duration(event.payload["total_s"]),
            redone_steps=event.payload["redone_steps"],
            lost_steps=event.payload["lost_steps"],
            phases=_phases(event.payload, longest_s),
            sources=_sources(event.payload, most_bytes),
            total_bytes=num_bytes(sum(event.payload["num_bytes"].values())),
            plans=" to ".join(filter(None, (event.payload.get("plan_before"), event.payload.get("plan_after")))),
            failed_sources=tuple(map(failed_source, event.payload.get("failed_sources", ()))),
        )
        for number, event in enumerate(found, start=1)
    )


def failed_source(failed: Mapping[str, Any]) -> str:
    """A sentence on what could not be used, and what was."""
    what = f"{num_bytes(failed['num_bytes'])} of step {failed['step']} from the {failed['source']} ({failed['object']})"
    return f"{what} were not used: {failed['problem']}. Instead: {', '.join(failed['instead'])}"


def bytes_per_s(payload: Mapping[str, Any]) -> dict[str, float]:
    """Of a recovery, by source, where anything came from it."""
    took_s = payload.get("source_s", {})
    counts = payload["num_bytes"]
    return {name: counts[name] / took_s[name] for name in SOURCES if counts.get(name) and took_s.get(name)}


def _sources(payload: Mapping[str, Any], most_bytes: float) -> tuple[Segment, ...]:
    speeds = bytes_per_s(payload)
    parts = stack({name: payload["num_bytes"].get(name, 0) for name in SOURCES}, most_bytes, num_bytes)
    return tuple(
        replace(part, text=f"{part.text}, {num_bytes(speeds[part.name])}/s") if part.name in speeds else part
        for part in parts
    )


def _total_s(payload: Mapping[str, Any]) -> float:
    return float(max(payload["total_s"], sum(payload[f"{phase}_s"] for phase in PHASES)))


def _phases(payload: Mapping[str, Any], longest_s: float) -> tuple[Segment, ...]:
    parts = {phase: float(payload[f"{phase}_s"]) for phase in PHASES}
    rest_s = _total_s(payload) - sum(parts.values())
    if rest_s > 0.001:
        parts["rest"] = rest_s
    return stack(parts, longest_s, duration)


def stack(parts: Mapping[str, float], whole: float, show: Any) -> tuple[Segment, ...]:
    """Parts of a stacked bar beside each other, of which `whole` would fill it."""
    segments, x = [], 0.0
    for name, value in parts.items():
        width = round(100 * value / whole, 3)
        segments.append(Segment(name=name, x=round(x, 3), width=width, text=show(value)))
        x += width
    return tuple(segments)


def duration(seconds: float) -> str:
    """For people: 43 ms, 1.25 s, 2 min 5 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 0.9995:
        return f"{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{seconds:.2f}".rstrip("0").rstrip(".") + " s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def num_bytes(count: float) -> str:
    """For people, in decimal units: 0 B, 812 B, 4.1 MB."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:.3g} {unit}"
