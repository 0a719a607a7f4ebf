"""What is asked of an agent about the lines that were printed on its node; part of `messages`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_workers.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogs:
    """Lines after number `after` that processes of this node printed, answered by LogsAre within `wait_s` even where
    there are none. Lines up to `have` are kept elsewhere, and may be forgotten. Numbers hold for one `life` of the
    agent alone; where it is another one they are taken for 0."""

    life: str
    after: int
    have: int
    max_bytes: int
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsAre:
    """Rows of (number, job, time of day in seconds, level, epoch, rank or None, text)."""

    life: str
    rows: list[Row]
