"""A recovery as a tree of spans, from its entry in the job's journal: what tracing tools draw as a waterfall. Pure; how
spans leave is trace_export.py's.

Detection and decision begin and end when they did. Of restoring and rebuilding the journal has the time of the slowest
rank: they follow the decision one after the other, as in each rank, and `resume` is what is left until ranks stepped
again. Ids follow from job and entry, so whoever makes a tree anew makes the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Value = str | int | float | tuple[str, ...]
_NS = 1_000_000_000
_SEQUENCE = ("detect", "decide", "restore", "rebuild")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Times are nanoseconds since 1970, ids numbers of 128 and 64 bits; the root has no `parent_id`."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Whose recovery it is."""

    job_id: str
    project: str
    name: str


def spans_of(job: Traced, seq: int, at_s: float, payload: Mapping[str, Any]) -> tuple[Span, ...]:
    """The root first; `at_s` and `payload` are of the entry `recovery_done` with this number."""
    trace_id = _id(f"{job.job_id} {seq}", 16)
    end_ns = round(at_s * _NS)
    start_ns = end_ns - round(float(payload["total_s"]) * _NS)
    root = Span(
        name="recovery",
        trace_id=trace_id,
        span_id=_id(f"{job.job_id} {seq} recovery", 8),
        parent_id=None,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=_of_recovery(job, seq, payload),
    )
    found, from_ns = [root], start_ns
    for name in (*_SEQUENCE, "resume"):
        took_ns = end_ns - from_ns if name == "resume" else round(float(payload[f"{name}_s"]) * _NS)
        until_ns = min(end_ns, from_ns + took_ns)
        found.append(
            Span(
                name=name,
                trace_id=trace_id,
                span_id=_id(f"{job.job_id} {seq} {name}", 8),
                parent_id=root.span_id,
                start_ns=from_ns,
                end_ns=until_ns,
                attributes=_of_bytes(payload) if name == "restore" else {},
            )
        )
        from_ns = until_ns
    return tuple(found)


def _of_recovery(job: Traced, seq: int, payload: Mapping[str, Any]) -> dict[str, Value]:
    plain = ("cause", "reason", "epoch", "step", "redone_steps", "lost_steps", "plan_before", "plan_after")
    several = ("nodes_lost", "nodes_joined", "nodes_drained")
    return {
        "shoal.job.id": job.job_id,
        "shoal.job.name": job.name,
        "shoal.project": job.project,
        "shoal.journal.seq": seq,
        **{f"shoal.recovery.{name}": payload[name] for name in plain if payload.get(name) not in (None, "")},
        **{f"shoal.recovery.{name}": tuple(payload[name]) for name in several if payload.get(name)},
    }


def _of_bytes(payload: Mapping[str, Any]) -> dict[str, Value]:
    return {f"shoal.restored_bytes.{source}": int(count) for source, count in payload["num_bytes"].items()}


def _id(text: str, num_bytes: int) -> int:
    """Never 0, which is none."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:num_bytes]) or 1
