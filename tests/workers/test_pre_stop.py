"""What a pod runs before it is stopped: it waits for ranks, and no longer than it may."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest
from waiting import eventually

from shoal_workers.pre_stop import main, num_computing, wait_for_leave


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def wait(self, s: float) -> None:
        self.now_s += s

    def __call__(self) -> float:
        return self.now_s


def waited(ranks: Callable[[float], int], limit_s: float) -> tuple[bool, float]:
    """`ranks` says how many there are so many seconds after the beginning."""
    clock = Clock()
    begun_s = clock()
    left = wait_for_leave(limit_s, lambda: ranks(clock() - begun_s), clock, clock.wait)
    return left, clock() - begun_s


def test_it_waits_until_no_rank_was_there_for_a_while() -> None:
    assert waited(lambda _: 0, 110.0) == (True, 3.0)
    left, took_s = waited(lambda at_s: int(at_s < 20 or 21 < at_s < 22), 110.0)
    assert left and took_s == pytest.approx(25, abs=1), "between two plans there is none for a moment"


def test_it_waits_no_longer_than_it_may() -> None:
    assert waited(lambda _: 2, 30.0) == (False, 30.0)
    assert waited(lambda _: 0, 0.0) == (False, 0.0)


@pytest.mark.parametrize("name", ["RankActor", "RayTrainWorker"])
def test_who_computes_is_known_by_the_title_of_the_process(name: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _TITLED, name], stdin=subprocess.PIPE) as process:
        same = [psutil.Process(process.pid)]  # others on this machine come and go
        assert num_computing(same) == 0
        eventually(lambda: num_computing(same) == 1, 60)
        assert num_computing() >= 1
        process.communicate()
    assert num_computing(same) == 0


# As Ray does it, idle and at work.
_TITLED = """
import sys
from ray._raylet import setproctitle
setproctitle(f"ray::{sys.argv[1]}.execute")
sys.stdin.read()
"""


def test_workers_of_scripts_are_called_so() -> None:
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker

    from shoal_workers.actor import RankActor

    names = RayTrainWorker.__name__, RankActor.__ray_metadata__.class_name  # type: ignore[attr-defined]
    assert names == ("RayTrainWorker", "RankActor")


@pytest.mark.parametrize("arguments", [[], ["soon"], ["1", "2"]])
def test_wrong_usage_is_told(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage: python -m"):
        main(arguments)
