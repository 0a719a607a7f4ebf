"""What a process prints goes to files on its node, which the agent reads (`log_spool`): nobody who reads can hold the
process up, and what it said last is there after it was killed.

Owns the names of these files, what native code that crashes leaves there, and when a process turns to another one: with
each epoch, so that every line is known to be of it, and when one is large, so that what was read can be deleted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

LOGS = "logs"  # the folder of all jobs' files, in that of the node

_LARGE_BYTES = 8 * 2**20
_LOOK_S = 0.5
_TRIES = 3
_NOBODY = "-"

# What Python writes down when native code dies of a signal, before it dies of it: the list is that of `faulthandler`.
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",  # as versions before 3.13 have it
}
_LAST_BYTES = 2**16


@dataclass(frozen=True, slots=True, order=True)
class FileName:
    """`number` counts the files of one process. `rank` is None of a process that is no rank."""

    epoch: int
    rank: int | None
    pid: int
    number: int

    def __str__(self) -> str:
        rank = _NOBODY if self.rank is None else self.rank
        return f"{self.epoch}.{rank}.{self.pid}.{self.number}.log"

    @staticmethod
    def read(text: str) -> FileName | None:
        """None of a file that is none of ours."""
        parts = text.split(".")
        if len(parts) != 5 or parts[4] != "log":
            return None
        epoch, rank, pid, number = parts[:4]
        try:
            return FileName(int(epoch), None if rank == _NOBODY else int(rank), int(pid), int(number))
        except ValueError:
            return None


def ended_by(folder: Path, pid: int) -> str | None:
    """The signal that this process, as it says in its files in `folder`, died of; None: it says nothing of that, as who
    is killed from outside. Raises OSError."""
    names = [
        name for path in folder.glob("*.log") if (name := FileName.read(path.name)) is not None and name.pid == pid
    ]
    if not names:
        return None
    # One that had this number before it may have left files, too.
    newest = max(names, key=lambda name: ((folder / str(name)).stat().st_mtime_ns, name.number))
    with (folder / str(newest)).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        said = _FATAL.findall(file.read().decode(errors="replace"))
    return _SIGNALS.get(said[-1], "SIGABRT") if said else None  # what Python finds wrong itself ends in an abort, too


class LogFile:
    """Where one process writes for one job. Any thread may call."""

    def __init__(self, folder: Path, large_bytes: int = _LARGE_BYTES) -> None:
        self._folder = folder
        self._large_bytes = large_bytes
        self._lock = threading.Lock()
        self._epoch, self._number = 0, 0
        self._rank: int | None = None

    def turn_to(self, epoch: int, rank: int | None) -> int:
        """A descriptor to write to from here on. Raises OSError."""
        with self._lock:
            self._epoch, self._rank = epoch, rank
            return self._next()

    def after(self, descriptor: int) -> int | None:
        """The one to go on with where this one is large by now. Raises OSError."""
        with self._lock:
            return self._next() if os.fstat(descriptor).st_size > self._large_bytes else None

    def _next(self) -> int:
        self._number += 1
        path = self._folder / str(FileName(self._epoch, self._rank, os.getpid(), self._number))
        for _ in range(_TRIES):
            self._folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the agent has just removed the folder, which was empty
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        raise FileNotFoundError(f"{self._folder} is removed again and again")


class Output:
    """Standard output and standard error of this process. Training goes on where they cannot be kept: then they stay
    what they were."""

    def __init__(self, file: LogFile) -> None:
        self._file = file

    def take(self) -> None:
        """From here on; what the process prints before it has an epoch counts as of epoch 0."""
        self.turn_to(0, None)
        faulthandler.enable(file=2, all_threads=False)  # whatever file that is by then
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(line_buffering=True, errors="backslashreplace")
        threading.Thread(target=self._watch, name="output", daemon=True).start()

    def turn_to(self, epoch: int, rank: int | None) -> None:
        try:
            self._become(self._file.turn_to(epoch, rank))
        except OSError as error:
            log.warning("output is not kept", epoch=epoch, why=str(error))

    def _watch(self) -> None:
        turn = threading.Event()
        while not turn.wait(_LOOK_S):
            try:
                if (following := self._file.after(1)) is not None:
                    self._become(following)
            except OSError as error:
                log.warning("output is kept in one file", why=str(error))

    def _become(self, descriptor: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):  # it was closed
                stream.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
