"""The Ray actor around a user's script: it starts the script's process, in the runtime environment that the job asks
for, keeps the newest lines that it prints, and knows how it ended. Owns that process, which ends with it.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray

from shoal_workers.actor import die_with_parent

_MOST_LINES = 5000  # kept for a supervisor that is away
_MOST_AT_ONCE = 200
_LONGEST = 2000
_GRACE_S = 5.0
_STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # for terminals alone
# What Ray Train asks itself less often than a job can wait; and notices, which come from Shoal.
_TRAIN_ENV = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}


@ray.remote
class ScriptActor:
    """`order` are the fields of a ScriptOrder that are known beforehand."""

    def __init__(self, order: dict[str, Any], arguments: list[str]) -> None:
        die_with_parent()
        self._lines: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)
        self._num_lines = 0
        self._lock = threading.Lock()
        self._report = Path(tempfile.mkdtemp(prefix="shoal-script-")) / "failed.json"
        self._told: dict[str, str] | None = None
        ends, self._lifeline = os.pipe()
        context = ray.get_runtime_context()
        full = {**order, "lifeline": ends, "report": str(self._report), "raylet": context.get_node_id()}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "shoal_workers.script_main", json.dumps(full), *arguments],
            env=_environment(context),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(ends,),
            start_new_session=True,
        )
        os.close(ends)
        self._read = threading.Thread(target=self._listen, name="output", daemon=True)
        self._read.start()

    def look(self, after: int) -> dict[str, Any]:
        """Lines after number `after` (the first is 1), as many as go at once; the number of the last of them; and,
        once the process has ended and all its lines are told, its exit status and what it failed with."""
        ended = self._process.poll() is not None and not self._read.is_alive()
        with self._lock:
            first = max(after, self._num_lines - len(self._lines))
            last = min(first + _MOST_AT_ONCE, self._num_lines)
            begin = len(self._lines) - (self._num_lines - first)
            lines = [self._lines[begin + index] for index in range(last - first)]
        over = ended and last == self._num_lines
        return {
            "lines": lines,
            "left_out": first - after,
            "last": last,
            "exit": self._process.returncode if over else None,
            "failed": self._failed() if over else None,
        }

    def stop(self) -> None:
        """In order, if the script takes the hint."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def pids(self) -> dict[str, int]:
        return {"actor": os.getpid(), "script": self._process.pid}

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            # Of what a progress bar has drawn over and over, a reader wants the last.
            line = _STYLE.sub("", raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2])[:_LONGEST]
            with self._lock:
                self._lines.append(line)
                self._num_lines += 1

    def _failed(self) -> dict[str, str] | None:
        """Read once; nothing of it stays behind."""
        with contextlib.suppress(OSError, ValueError):
            self._told = json.loads(self._report.read_text())
        shutil.rmtree(self._report.parent, ignore_errors=True)
        return self._told


def _environment(context: Any) -> dict[str, str]:
    """What a process needs to be a Ray driver of its own, in the runtime environment of this actor."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
    from ray._private.utils import remove_ray_internal_flags_from_env

    inherited = {**_TRAIN_ENV, **os.environ}
    remove_ray_internal_flags_from_env(inherited)
    config = {"runtime_env": json.loads(context.get_runtime_env_string() or "{}"), "metadata": {}}
    return {**inherited, "RAY_ADDRESS": context.gcs_address, RAY_JOB_CONFIG_JSON_ENV_VAR: json.dumps(config)}
