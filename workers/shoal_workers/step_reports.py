"""What ranks said of their steps and evaluations, as their agent keeps it beside the state of these steps.

A rank says it to the supervisor. Where the two are cut off from each other, or both die, state may outlive them that
nobody has an account of: whoever goes on from it gets the account from here. Owns files; one for each job, which goes
with the job's folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog

from shoal_recovery.crc import checksum
from shoal_recovery.journal import EvaluationDone

log = structlog.get_logger()

Report = dict[str, Any]  # the wire form of a Stepped or EvaluationDone

_MOST = 4096  # so many does a rank know, too, by the time that it can tell them
_FILE = "steps.jsonl"
_LEAST_FREE_BYTES = 2**23  # snapshots come first: a seal that finds no room would end an epoch

_Key = tuple[int, int, bool]  # epoch, step and whether it is of the evaluation after that step


class StepReports:
    """Of one node, of the newest steps. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, dict[_Key, str]] = {}  # by job, the oldest first
        self._without_room: set[str] = set()  # jobs of which that was said

    def add(self, job: str, reports: Iterable[Report]) -> None:
        """What is known already is left out. What finds no room in memory would be lost with this process."""
        with self._lock:
            known = self._of(job)
            fresh = {key: json.dumps(report) for key, report in _keyed(reports) if key not in known}
            if not fresh:
                return
            known.update(fresh)
            pruned = list(known)[:-_MOST] if len(known) > 2 * _MOST else ()
            for key in pruned:
                del known[key]
            try:
                self._write(job, known if pruned else fresh, anew=bool(pruned))
            except OSError as error:
                if job not in self._without_room:  # or it would be said at each step
                    self._without_room.add(job)
                    log.warning("reports of steps not kept", job=job, error=str(error))

    def after(self, job: str, epoch: int, step: int) -> list[Report]:
        """Of later steps of this epoch than this one, and of evaluations from it on: that comes after the report of its
        step, which may have been the last that was heard."""
        with self._lock:
            known = self._of(job).items()
            return [
                json.loads(text) for (in_epoch, at, is_last), text in known if in_epoch == epoch and at + is_last > step
            ]

    def forget(self, job: str) -> None:
        with self._lock:
            self._known.pop(job, None)
            self._without_room.discard(job)
            with contextlib.suppress(OSError):
                self._path(job).unlink()

    def _of(self, job: str) -> dict[_Key, str]:
        if job not in self._known:
            try:
                lines = self._path(job).read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                lines = []
            self._known[job] = {key: json.dumps(report) for key, report in _keyed(_read(lines))}
        return self._known[job]

    def _write(self, job: str, reports: dict[_Key, str], *, anew: bool) -> None:
        path = self._path(job)
        if shutil.disk_usage(self._folder).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, "what is free is for snapshots")
        path.parent.mkdir(exist_ok=True)
        if not anew:
            with path.open("a", encoding="utf-8") as file:
                file.write(_lines(reports.values()))
            return
        scratch = path.with_name(f"{_FILE}.new")
        scratch.write_text(_lines(reports.values()), encoding="utf-8")
        scratch.replace(path)

    def _path(self, job: str) -> Path:
        return self._folder / job / _FILE


def _keyed(reports: Iterable[Report]) -> Iterator[tuple[_Key, Report]]:
    """Without what says nothing: ranks, which run code of users, wrote it."""
    for report in reports:
        key = (report.get("epoch"), report.get("step")) if isinstance(report, dict) else ()
        match key:
            case (int(epoch), int(step)):
                yield (epoch, step, report.get("kind") == EvaluationDone.__name__), report
            case _:
                log.warning("report of a step without its epoch or step")


def _lines(texts: Iterable[str]) -> str:
    """Each behind its checksum, on a line of its own even if the file ends in the middle of one."""
    return "".join(f"\n{checksum(text.encode())} {text}" for text in texts)


def _read(lines: Iterable[str]) -> Iterator[Report]:
    """Without a line in whose middle an agent died, or that is not as it was written."""
    for line in lines:
        found, _, text = line.partition(" ")
        if found and found == checksum(text.encode()):
            yield json.loads(text)
