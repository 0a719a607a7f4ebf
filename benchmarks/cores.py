"""Whether this machine's cores are free for a benchmark, and cores of a fixed part for some of its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
_WATCH_S = 2.0
# Short: with a long one, whoever waits for a throttled process waits for the rest of its period.
_PERIOD_US = 10_000


def free_cores() -> float:
    """How many cores nobody used for two seconds."""
    before, began_s = _idle_ticks(), time.perf_counter()
    time.sleep(_WATCH_S)
    ticks = _idle_ticks() - before
    return ticks / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - began_s)


@contextmanager
def part_of_a_core(part: float, pids: list[int]) -> Iterator[None]:
    """These processes together get this much of a core, by a quota of the kernel. OSError where that cannot be set."""
    group = _CPU_GROUPS / f"shoal-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(part * _PERIOD_US)))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (_CPU_GROUPS / "cgroup.procs").write_text(member)
        group.rmdir()


def keep_to_cores(pids: list[int]) -> None:
    """Each of these processes, with all its threads, has a core of its own in turn.

    A process that its quota made wait is continued on the core where it was: with the other one running there both
    share it, while the other core is idle until the scheduler looks again.
    """
    cores = sorted(os.sched_getaffinity(0))
    for index, pid in enumerate(pids):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[index % len(cores)]})


def _idle_ticks() -> int:
    """Idle and waiting for a disk, of all cores."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[4]) + int(fields[5])
