"""What a pod runs before it is stopped (`preStop`): it waits until no rank is on this node any more, and no worker of
Ray Train, so that jobs leave it with their state before Kubernetes ends its processes. That the pod is to go, its agent
finds out by itself.

Run as `python -m shoal_workers.pre_stop SECONDS`, the longest that it waits: a little less than the pod's grace period.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

import psutil

# The titles that Ray gives processes: of ranks, and of the workers that a user's script has.
_TITLES = ("ray::RankActor", "ray::RayTrainWorker")
_LOOK_S = 0.5
# They end between two plans, too, and may have just been started for the next one.
_QUIET_S = 3.0


def num_computing(processes: Iterable[psutil.Process] | None = None) -> int:
    """How many processes of ranks and workers live on this machine, or are among these."""
    found = 0
    for process in psutil.process_iter() if processes is None else processes:
        try:
            found += (process.cmdline() or [""])[0].startswith(_TITLES)
        except psutil.Error:  # it ended meanwhile, or is nobody's to look at
            continue
    return found


def wait_for_leave(
    limit_s: float,
    computing: Callable[[], int] = num_computing,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether none was seen for a while before `limit_s` was over."""
    begun_s = seen_s = clock()
    while (now_s := clock()) < begun_s + limit_s:
        if computing():
            seen_s = now_s
        elif now_s - seen_s >= _QUIET_S:
            return True
        wait(_LOOK_S)
    return False


def main(arguments: list[str]) -> None:
    try:
        (limit_s,) = map(float, arguments)
    except ValueError:
        sys.exit(f"usage: python -m shoal_workers.pre_stop SECONDS, not {' '.join(arguments)!r}")
    wait_for_leave(limit_s)


if __name__ == "__main__":
    main(sys.argv[1:])
