"""What ranks said of the steps that they did, as their agent keeps it beside the state of these steps.

A rank says it to the supervisor. Where the two are cut off from each other, or both die, state may outlive them that
nobody has an account of: whoever goes on from it gets the account from here. Owns files; one for each job, which goes
with the job's folder.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()

Report = dict[str, Any]  # the wire form of a Stepped

_MOST = 1024  # steps; a cut-off epoch ends itself long before it has done more
_FILE = "steps.jsonl"


class StepReports:
    """Of one node, of the newest steps. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, dict[tuple[int, int], Report]] = {}  # by epoch and step, the oldest first

    def add(self, job: str, reports: Iterable[Report]) -> None:
        """What is known already is left out. What finds no room in memory would be lost with this process."""
        with self._lock:
            known = self._of(job)
            fresh = {key: report for key, report in _keyed(reports) if key not in known}
            known.update(fresh)
            if not fresh:
                return
            try:
                self._write(job, known, fresh)
            except OSError as error:
                log.warning("reports of steps not kept", job=job, error=str(error))

    def after(self, job: str, step: int) -> list[Report]:
        """Of later steps than this one, of every epoch."""
        with self._lock:
            return [report for (_, done), report in self._of(job).items() if done > step]

    def forget(self, job: str) -> None:
        with self._lock:
            self._known.pop(job, None)
            self._path(job).unlink(missing_ok=True)

    def _of(self, job: str) -> dict[tuple[int, int], Report]:
        if job not in self._known:
            try:
                lines = self._path(job).read_text(encoding="utf-8").splitlines()
            except OSError:
                lines = []
            self._known[job] = dict(_keyed(_read(lines)))
        return self._known[job]

    def _write(self, job: str, known: dict[tuple[int, int], Report], fresh: dict[tuple[int, int], Report]) -> None:
        path = self._path(job)
        path.parent.mkdir(exist_ok=True)
        if len(known) <= 2 * _MOST:
            with path.open("a", encoding="utf-8") as file:
                file.write(_lines(fresh.values()))
            return
        for key in list(known)[:-_MOST]:
            del known[key]
        scratch = path.with_name(f"{_FILE}.new")
        scratch.write_text(_lines(known.values()), encoding="utf-8")
        scratch.replace(path)

    def _path(self, job: str) -> Path:
        return self._folder / job / _FILE


def _keyed(reports: Iterable[Report]) -> Iterator[tuple[tuple[int, int], Report]]:
    return (((report["epoch"], report["step"]), report) for report in reports)


def _lines(reports: Iterable[Report]) -> str:
    """Each on a line of its own even if the file ends in the middle of one."""
    return "".join(f"\n{json.dumps(report)}" for report in reports)


def _read(lines: Iterable[str]) -> Iterator[Report]:
    """Without a line in whose middle an agent died."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)
