"""What became of the spot nodes of a pool over time, read from recordings, and what can be counted in it.

A pool is what fails together: one kind of instance in one zone. Owns the formats and their checks; not what the counts
mean for nodes to come (`preemption`).
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_planner.errors import InvalidField

HOUR_S = 3600.0
# A loss of at least this many nodes at one moment is a shock of the pool.
BULK_NODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChange:
    """At one moment `num_nodes` came (more than zero) or were taken away (less)."""

    at_s: float
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHistory:
    """The changes of a pool between two moments, in the order of time; it is empty before the first."""

    pool: str
    start_s: float
    end_s: float
    changes: tuple[PoolChange, ...]

    def __post_init__(self) -> None:
        live, reached_s = 0, self.start_s
        for index, change in enumerate(self.changes):
            path = f"{self.pool}.changes[{index}]"
            if not reached_s <= change.at_s <= self.end_s:
                problem = f"must lie between {reached_s:g} and {self.end_s:g}: changes stand in the order of time"
                raise InvalidField(f"{path}.at_s", change.at_s, problem)
            reached_s, live = change.at_s, live + change.num_nodes
            if live < 0:
                raise InvalidField(f"{path}.num_nodes", change.num_nodes, "takes away more nodes than there are")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a history says. `losses` are (nodes lost, nodes that were there) of each moment of loss."""

    pool: str
    exposure_node_h: float
    losses: tuple[tuple[int, int], ...]

    @property
    def lost_nodes(self) -> int:
        return sum(lost for lost, _ in self.losses)

    @property
    def plural_nodes(self) -> int:
        """Those lost while there were several, so that they could have been lost together."""
        return sum(lost for lost, live in self.losses if live >= BULK_NODES)

    @property
    def bulk_nodes(self) -> int:
        """Those lost in shocks."""
        return sum(lost for lost, _ in self.losses if lost >= BULK_NODES)

    def bulk_shares(self) -> tuple[float, ...]:
        """The share of the pool that each of its shocks took."""
        return tuple(lost / live for lost, live in self.losses if lost >= BULK_NODES)


def observe(history: PoolHistory) -> Observed:
    """Node-hours that the pool was there for, and its losses."""
    losses: list[tuple[int, int]] = []
    node_s, live, since_s = 0.0, 0, history.start_s
    for change in history.changes:
        node_s += live * (change.at_s - since_s)
        if change.num_nodes < 0:
            losses.append((-change.num_nodes, live))
        live, since_s = live + change.num_nodes, change.at_s
    node_s += live * (history.end_s - since_s)
    return Observed(pool=history.pool, exposure_node_h=node_s / HOUR_S, losses=tuple(losses))


def counted_history(pool: str, rows: Sequence[tuple[float, int]]) -> PoolHistory:
    """From (seconds, nodes there from then on); the last row marks the end. Raises InvalidField."""
    if not rows:
        raise InvalidField(pool, [], "must have at least one row")
    counts = [0, *(count for _, count in rows)]
    changes = tuple(
        PoolChange(at_s=at_s, num_nodes=count - before)
        for (at_s, count), before in zip(rows, counts, strict=False)
        if count != before
    )
    return PoolHistory(pool=pool, start_s=rows[0][0], end_s=rows[-1][0], changes=changes)


def event_history(pool: str, rows: Sequence[tuple[float, str, str]], *, end_s: float | None = None) -> PoolHistory:
    """From (seconds, "add" or "remove", node) in the order of time. Rows of one moment are one event; without `end_s`
    the history ends with its last row. Raises InvalidField."""
    if not rows:
        raise InvalidField(pool, [], "must have at least one row")
    changes: list[PoolChange] = []
    live: set[str] = set()
    for at_s, moment in itertools.groupby(rows, key=lambda row: row[0]):
        before = frozenset(live)
        for _, op, node in moment:
            _apply(live, op, node, f"{pool} at {at_s:g} s")
        # What is lost goes first: nodes that have only just come are not among those that a loss is a share of.
        counts = (-len(before - live), len(live - before))
        changes.extend(PoolChange(at_s=at_s, num_nodes=count) for count in counts if count)
    return PoolHistory(
        pool=pool, start_s=rows[0][0], end_s=rows[-1][0] if end_s is None else end_s, changes=tuple(changes)
    )


def _apply(live: set[str], op: str, node: str, path: str) -> None:
    if op not in ("add", "remove"):
        raise InvalidField(f"{path}.op", op, "must be add or remove")
    if (op == "add") == (node in live):
        raise InvalidField(f"{path}.node", node, "is there already" if op == "add" else "is not there")
    if op == "add":
        live.add(node)
    else:
        live.remove(node)


def read_history(text: str, pool: str, *, end_s: float | None = None) -> PoolHistory:
    """From CSV with the columns t_s,available (counts) or t_s,op,node (events). Raises InvalidField."""
    header, *rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row] or [[]]
    if tuple(header) not in (("t_s", "available"), ("t_s", "op", "node")):
        raise InvalidField(f"{pool}.columns", ",".join(header), "must be t_s,available or t_s,op,node")
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise InvalidField(f"{pool} line {line}", ",".join(row), f"must have {len(header)} columns")
    times = [_seconds(row[0], f"{pool} line {line}.t_s") for line, row in enumerate(rows, start=2)]
    for line, (before_s, at_s) in enumerate(itertools.pairwise(times), start=3):
        if at_s < before_s:
            raise InvalidField(f"{pool} line {line}.t_s", at_s, f"must not lie before {before_s:g}, of the line above")
    if len(header) == 2:
        counts = [_count(row[1], f"{pool} line {line}.available") for line, row in enumerate(rows, start=2)]
        return counted_history(pool, list(zip(times, counts, strict=True)))
    events = [(at_s, op, node) for at_s, (_, op, node) in zip(times, rows, strict=True)]
    return event_history(pool, events, end_s=end_s)


def _seconds(text: str, path: str) -> float:
    try:
        found = float(text)
    except ValueError as error:
        raise InvalidField(path, text, "must be a number") from error
    if not math.isfinite(found):
        raise InvalidField(path, text, "must be a finite number")
    return found


def _count(text: str, path: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidField(path, text, "must be a whole number, zero or more")
    return int(text)
