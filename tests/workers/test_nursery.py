"""Workers that are forked off a process that has loaded what they need: real processes, and what ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from running import lives
from waiting import eventually

from shoal_workers.nurseries import WORKER, Nurseries

_PROGRAM = """
import json, os, signal, sys
told = {"argv": sys.argv[1:], "folder": os.getcwd(), "pid": os.getpid(), "parent": os.getppid()}
told |= {"group": os.getpgid(0), "drawn": __import__("numpy").random.random()}
told |= {"files": sorted(os.listdir("/proc/self/fd"), key=int), "score": open("/proc/self/oom_score_adj").read()}
told |= {"loaded": "torch" in sys.modules, "name": __name__, "mine": os.environ.get("MINE"), "path": sys.path[0]}
print(json.dumps(told), flush=True)
if sys.argv[1] == "wait":
    signal.pause()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def nurseries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nurseries]:
    found = Nurseries(tmp_path_factory.mktemp("nursery"))
    yield found
    found.close()


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """Any process will do: nurseries only look whether it lives."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


class Worker:
    """As a raylet starts it, with a program of ours in place of Ray's."""

    def __init__(
        self, nurseries: Nurseries, raylet: subprocess.Popen[bytes], folder: Path, word: str, **more: str
    ) -> None:
        program = folder / "program.py"
        program.write_text(_PROGRAM)
        told = json.loads(nurseries.environment["SHOAL_NURSERY"]) | {"worker": str(program)}
        environment = {**os.environ, "SHOAL_NURSERY": json.dumps(told), "RAY_RAYLET_PID": str(raylet.pid), **more}
        start = 'echo 500 > /proc/self/oom_score_adj && exec "$@"'  # as raylets do with all that they start
        command = ["sh", "-c", start, "-", sys.executable, WORKER, word, "--node=here"]
        self.process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.told = json.loads(self.process.stdout.readline())

    @property
    def forked(self) -> bool:
        return bool(self.told["pid"] != self.process.pid)

    def end(self) -> int:
        with self.process:
            return self.process.wait(20)


def test_it_is_as_if_it_had_been_started_by_itself(
    nurseries: Nurseries, raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    worker = Worker(nurseries, raylet, tmp_path, "3", MINE="yes")
    assert worker.forked and worker.told["loaded"]
    for nursery in psutil.Process(worker.told["pid"]).parents()[:2]:
        assert nursery.num_threads() == 1, "a fork copies no threads"
    assert worker.told["score"].strip() == "500"
    assert worker.told["group"] == worker.told["pid"], "what it starts would outlive it"
    assert worker.told["argv"] == ["3", "--node=here"]
    assert (worker.told["folder"], worker.told["path"]) == (str(tmp_path), str(tmp_path))
    assert (worker.told["name"], worker.told["mine"]) == ("__main__", "yes")
    assert worker.end() == 3
    other = Worker(nurseries, raylet, tmp_path, "0")
    assert other.told["mine"] is None, "it has what another one was given"
    assert other.told["drawn"] != worker.told["drawn"]
    for each in (worker, other):
        assert each.told["files"][:-1] == ["0", "1", "2"], "it has files of others"  # the last one is of the listing
    assert other.told["parent"] == worker.told["parent"], "what was loaded was not used again"
    assert other.end() == 0


def test_a_raylet_finds_what_was_forked_for_it_and_what_forked_it(
    nurseries: Nurseries, raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    worker = Worker(nurseries, raylet, tmp_path, "wait")
    assert {process.pid for process in nurseries.processes(raylet.pid)} == {
        worker.told["pid"],
        worker.told["parent"],
    }
    assert nurseries.processes(os.getpid()) == []
    worker.process.kill()
    worker.end()


@pytest.mark.parametrize("of", ["who stands for it", "its nursery", "itself"])
def test_it_ends_with(of: str, nurseries: Nurseries, raylet: subprocess.Popen[bytes], tmp_path: Path) -> None:
    worker = Worker(nurseries, raylet, tmp_path, "wait")
    forked = psutil.Process(worker.told["pid"])
    victim = {"who stands for it": worker.process.pid, "its nursery": worker.told["parent"], "itself": forked.pid}[of]
    os.kill(victim, signal.SIGKILL)
    assert worker.end() != 0
    eventually(lambda: not lives(forked))
    next_one = Worker(nurseries, raylet, tmp_path, "0")
    assert next_one.forked and next_one.end() == 0


def test_it_ends_with_its_raylet(nurseries: Nurseries, tmp_path: Path) -> None:
    """The nursery, too; and who is started with another raylet has another nursery."""
    with subprocess.Popen(["sleep", "1000"]) as raylet, subprocess.Popen(["sleep", "1000"]) as other:
        worker, stays = (Worker(nurseries, each, tmp_path, "wait") for each in (raylet, other))
        ended, goes_on = ([psutil.Process(each.told[of]) for of in ("pid", "parent")] for each in (worker, stays))
        raylet.kill()
        eventually(lambda: not any(map(lives, ended)))
        assert worker.end() != 0
        assert all(map(lives, goes_on))
        other.kill()
        assert stays.end() != 0


@pytest.mark.parametrize(
    "more",
    [{"PYTHONPATH": "/elsewhere"}, {"OMP_NUM_THREADS": "7"}, {"RAY_RAYLET_PID": "999999999"}],
    ids=["other modules", "other threads", "no such raylet"],
)
def test_what_cannot_be_forked_runs_all_the_same(
    more: dict[str, str], nurseries: Nurseries, raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    worker = Worker(nurseries, raylet, tmp_path, "4", **more)
    assert not worker.forked and not worker.told["loaded"]
    assert worker.told["argv"] == ["4", "--node=here"] and worker.told["path"] == str(tmp_path)
    assert worker.end() == 4


def test_without_a_nursery_workers_run_by_themselves(raylet: subprocess.Popen[bytes], tmp_path: Path) -> None:
    nurseries = Nurseries(tmp_path)
    nurseries.close()
    worker = Worker(nurseries, raylet, tmp_path, "5")
    assert not worker.forked
    assert worker.end() == 5


def test_where_a_cluster_was_killed_the_next_one_has_its_own(raylet: subprocess.Popen[bytes], tmp_path: Path) -> None:
    Nurseries(tmp_path / "kept").close()
    second = Nurseries(tmp_path / "kept")
    try:
        worker = Worker(second, raylet, tmp_path, "0")
        assert worker.forked
        assert worker.end() == 0
    finally:
        second.close()
