"""What a supervisor knows of where samples begin in the data: the marks that ranks told with the steps they did.

A mark that was told with step s is of no later a sample than step s + 1 begins with, and says what is so whatever
became of the step. So none is ever wrong, only too late: who begins at step s is given the newest ones that are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from threading import Lock

from shoal_workers.rows import Row

_KEPT = 64  # of a stream: a step's manifest is written some steps after it
_OF_MARK = 4  # numbers of a row that are the mark itself, its index first; those before them name the stream


class DataMarks:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._told: defaultdict[tuple[int, ...], list[tuple[int, Row]]] = defaultdict(list)

    def hear(self, step: int, rows: Iterable[Sequence[int]]) -> None:
        """From anybody, in any order; `step` is the one that was done."""
        with self._lock:
            for row in rows:
                told = self._told[tuple(row[:-_OF_MARK])]
                told.append((step, list(row)))
                told.sort(key=lambda one: (one[0], one[1][-_OF_MARK]))
                del told[:-_KEPT]

    def at(self, step: int, stored: Iterable[Sequence[int]] = ()) -> list[Row]:
        """For who goes on after this step; `stored` are those that stood with its state."""
        self.hear(step, stored)
        with self._lock:
            usable = [[row for told_step, row in told if told_step <= step] for told in self._told.values()]
        return sorted(max(rows, key=lambda row: int(row[-_OF_MARK])) for rows in usable if rows)
