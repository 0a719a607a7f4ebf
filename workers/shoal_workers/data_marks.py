"""What a supervisor knows of the data: where samples begin in it, by the marks that ranks told with the steps they did,
and which files it is made of.

A mark that was told with step s is of no later a sample than step s + 1 begins with, and says what is so whatever
became of the step. So none is ever wrong, only too late: who begins at step s is given the newest ones that are not.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from threading import Lock

from shoal_workers.data_identity import difference
from shoal_workers.errors import DataError
from shoal_workers.rows import Row

_KEPT = 64  # of a stream
_KEPT_DENSE = 32  # the newest of these: a step's manifest is written some steps after it
_OF_MARK = 4  # numbers of a row that are the mark itself, its index first; those before them name the stream

_Told = tuple[int, int, Row]  # the step, the index of the sample, and the row


class DataMarks:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._told: defaultdict[tuple[int, ...], list[_Told]] = defaultdict(list)
        self._files: list[Row] = []

    def hear(self, step: int, rows: Iterable[Sequence[int]]) -> None:
        """From anybody, in any order; `step` is the one that was done."""
        with self._lock:
            for row in rows:
                told = self._told[tuple(row[:-_OF_MARK])]
                _insert(told, (step, row[-_OF_MARK], list(row)))
                if len(told) > _KEPT:
                    del told[_dispensable([one for one, _, _ in told])]

    def known_files(self, stored: Iterable[Row] = ()) -> list[Row]:
        """Which data the marks are of (see `data_identity`), as the first rank told it, or else as it was stored."""
        with self._lock:
            self._files = self._files or list(stored)
            return self._files

    def hear_files(self, rows: list[Row]) -> DataError | None:
        """How what a rank reads differs from what the first one told."""
        return difference(self.known_files(rows), rows) if rows else None

    def at(self, step: int, stored: Iterable[Sequence[int]] = ()) -> list[Row]:
        """For who goes on after this step; `stored` are those that stood with its state."""
        found: dict[tuple[int, ...], Row] = {}
        with self._lock:
            for stream, told in self._told.items():
                at = bisect_right(told, step, key=lambda one: one[0])
                if at:
                    found[stream] = told[at - 1][2]
        for row in stored:
            stream = tuple(row[:-_OF_MARK])
            if stream not in found or found[stream][-_OF_MARK] < row[-_OF_MARK]:
                found[stream] = list(row)
        self.hear(step, found.values())
        return sorted(found.values())


def _insert(told: list[_Told], new: _Told) -> None:
    """In order of steps and of indices alike: a mark is of no use where an earlier step knows one that is as new. All
    ranks that read a stream tell the same ones."""
    step, index, _ = new
    at = bisect_right(told, step, key=lambda one: one[0])
    if at and told[at - 1][1] >= index:
        return
    outdone = [one for one in told if one[0] >= step and one[1] <= index]
    for one in outdone:
        told.remove(one)
    insort(told, new, key=lambda one: one[0])


def _dispensable(steps: Sequence[int]) -> int:
    """The place of one that leaves the smallest gap for its age: so marks get rarer the older they are, and wherever
    one goes back to, there is one not far before. The first always stays."""
    newest = steps[-1]
    places = range(1, len(steps) - _KEPT_DENSE)
    return min(places, key=lambda at: (steps[at + 1] - steps[at - 1]) / (newest - steps[at] + 1))
