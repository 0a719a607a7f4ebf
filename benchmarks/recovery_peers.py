"""The peers of the recovery benchmark: torchft and Ray Train in an environment of their own, and blows against them.

Owns that environment, the peers' processes and what a blow cost them, by what they themselves wrote down. Each side
gets the model, the data and, in the step after the kill, as many samples per survivor as Shoal's survivors.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.step_log import DoneStep, read_steps

_ROOT = Path(__file__).parents[1]
_ENVIRONMENT = _ROOT / ".venv-peers"
_REQUIREMENTS = Path(__file__).parent / "peers" / "requirements.txt"
NUM_WORKERS = 3
_STEPS_BEFORE = 25  # five past a checkpoint of Ray Train: halfway to the next
_STEPS_AFTER = 10
_LIMIT_S = 180.0
_POLL_S = 0.05  # of files that others write: nothing to wait on
_TOLD_LINES = 15  # of the log of a driver that ended


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBlow:
    """`kill_to_new_s` ends with the first step that had never been done; steps that are done again are not new. Peers
    do not tell safe steps from others: all that were done and are done again are lost."""

    kill_to_commit_s: float
    kill_to_ready_s: float
    kill_to_new_s: float
    lost_steps: int
    redone_steps: int
    store_bytes: int
    rejoin_s: float | None
    step_s: float


def peer_python() -> Path:
    """Of the peers' environment, which is made if it is not there, or if it was made for other versions."""
    stamp = _ENVIRONMENT / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != _REQUIREMENTS.read_text():
        shutil.rmtree(_ENVIRONMENT, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", _ENVIRONMENT], check=True)
        pip = [str(_ENVIRONMENT / "bin" / "pip"), "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)  # first and by name, as for Shoal itself
        subprocess.run([*pip, "-r", str(_REQUIREMENTS), str(_ROOT)], check=True)
        shutil.copy(_REQUIREMENTS, stamp)
    return _ENVIRONMENT / "bin" / "python"


def peers(folder: Path, job: Mapping[str, Any]) -> dict[str, Torchft | RayTrain]:
    """By the names of their results; each is a context that starts it."""
    part = int(job["train"]["global_batch"]) // (NUM_WORKERS - 1)  # as many as a survivor of Shoal's has
    job = {**job, "train": {**job["train"], "global_batch": part * NUM_WORKERS}}
    return {
        "torchft": Torchft(folder / "torchft", job, part),
        "ray_train": RayTrain(folder / "ray_train", job, part, elastic=False),
        "ray_train_elastic": RayTrain(folder / "ray_train_elastic", job, part, elastic=True),
    }


class _Peer(abc.ABC):
    """A context: what `_start` has started ends with it."""

    def __init__(self, folder: Path, job: Mapping[str, Any], part: int | None) -> None:
        """`part`: samples that each worker has in a step; None: those who take part share the job's batch."""
        self._part = () if part is None else (part,)
        self._folder, self._steps, self._job = folder, folder / "steps", _written(folder, job)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @abc.abstractmethod
    def _start(self) -> None:
        """Returns when steps are done."""

    def samples(self) -> int:
        """That the state of now has been trained on: of steps that were done again the last time counts."""
        steps = read_steps(self._steps)
        samples = {step.step: step.samples for step in steps}
        return sum(num for step, num in samples.items() if step <= steps[-1].step)

    def num_computing(self) -> int:
        """Workers of the newest step."""
        return read_steps(self._steps)[-1].size

    def _running(self, command: Sequence[object], log: str) -> subprocess.Popen[str]:
        return self._stack.enter_context(_running(list(map(str, command)), self._folder / log))


class Torchft(_Peer):
    """Three replica groups of one process, under a lighthouse that drops whom it has not heard for 0.5 s."""

    def _start(self) -> None:
        port = _free_port()
        self._lighthouse = f"http://127.0.0.1:{port}"
        limits = ["--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000", "--heartbeat_timeout_ms=500"]
        lighthouse = peer_python().with_name("torchft_lighthouse")
        self._running([lighthouse, f"--bind=127.0.0.1:{port}", *limits], "lighthouse.log")
        self._replicas = {index: self._replica(index) for index in range(NUM_WORKERS)}
        self._await(lambda steps: _count(steps, NUM_WORKERS) >= _STEPS_BEFORE * NUM_WORKERS)

    def strike(self) -> PeerBlow:
        """A replica group dies, and comes back when the others have gone on without it."""
        before = read_steps(self._steps)
        victim = self._replicas[NUM_WORKERS - 1]
        began_s = time.time()
        victim.kill()
        del self._replicas[NUM_WORKERS - 1]
        without = self._await(lambda steps: _since(steps, began_s, NUM_WORKERS - 1) >= 2 * _STEPS_AFTER)
        blow = _blow(before, without, began_s, lambda step: step.size == NUM_WORKERS - 1)
        again_s = time.time()
        self._replicas[NUM_WORKERS - 1] = self._replica(NUM_WORKERS - 1)
        whole = self._await(lambda steps: _since(steps, again_s, NUM_WORKERS) >= NUM_WORKERS * _STEPS_AFTER)
        return _with_rejoin(blow, whole, again_s)

    def lose(self) -> None:
        self._replicas.pop(min(self._replicas)).kill()

    def gain(self) -> None:
        index = next(index for index in range(NUM_WORKERS) if index not in self._replicas)
        self._replicas[index] = self._replica(index)

    def _await(self, enough: Callable[[Sequence[DoneStep]], bool]) -> tuple[DoneStep, ...]:
        return _await(self._steps, enough, self._replicas.values())

    def _replica(self, index: int) -> subprocess.Popen[str]:
        command = [peer_python(), "-m", "benchmarks.peers.torchft_replica", self._lighthouse, str(index)]
        return self._running([*command, self._steps, self._job, *self._part], f"replica-{index}.log")


class RayTrain(_Peer):
    """Three workers of Ray Train on as many raylets; with `elastic`, `least` will do."""

    def __init__(
        self, folder: Path, job: Mapping[str, Any], part: int | None, *, elastic: bool, least: int = NUM_WORKERS - 1
    ) -> None:
        super().__init__(folder, job, part)
        self._least = least if elastic else NUM_WORKERS

    def _start(self) -> None:
        command = [peer_python(), "-m", "benchmarks.peers.ray_train_job", self._least, self._folder, self._job]
        command += self._part
        self._driver = self._running(command, "driver.log")
        self._await(lambda steps: max((step.step for step in steps), default=0) >= _STEPS_BEFORE)

    def strike(self) -> PeerBlow:
        """A node with a worker dies; the job starts again from its last checkpoint."""
        before = read_steps(self._steps)
        old = {step.worker for step in before}
        began_s = self._order("kill")
        newest = max(step.step for step in before)
        after = self._await(
            lambda steps: max((s.step for s in steps if s.worker not in old), default=0) >= newest + _STEPS_AFTER
        )
        blow = _blow(before, after, began_s, lambda step: step.worker not in old)
        loaded = max(path.stat().st_size for path in (self._folder / "storage").rglob("state.pt"))
        workers = {step.worker for step in after} - old
        return dataclasses.replace(blow, store_bytes=loaded * len(workers))

    def lose(self) -> None:
        self._order("kill")

    def gain(self) -> None:
        self._order("add")

    def _order(self, what: str) -> float:
        """When it was done."""
        assert self._driver.stdin is not None and self._driver.stdout is not None
        self._driver.stdin.write(f"{what}\n")
        self._driver.stdin.flush()
        if not (answer := self._driver.stdout.readline()):
            said = (self._folder / "driver.log").read_text(errors="replace").splitlines()[-_TOLD_LINES:]
            raise RuntimeError("\n".join([f"the driver of the peer ended before it was told to {what}:", *said]))
        return float(answer)

    def _await(self, enough: Callable[[Sequence[DoneStep]], bool]) -> tuple[DoneStep, ...]:
        return _await(self._steps, enough, (self._driver,))


def _blow(
    before: Sequence[DoneStep], after: Sequence[DoneStep], began_s: float, recovered: Callable[[DoneStep], bool]
) -> PeerBlow:
    """`recovered`: whether a step was done by those who went on."""
    done = [step for step in after if step.done_s < began_s]
    newest = max(step.step for step in done)
    resumed = [step for step in after if step.done_s > began_s and recovered(step)]
    first = resumed[0]
    new = next(step for step in resumed if step.step > newest)
    return PeerBlow(
        kill_to_commit_s=first.done_s - began_s,
        kill_to_ready_s=min(step.ready_s for step in resumed if step.step == first.step) - began_s,
        kill_to_new_s=new.done_s - began_s,
        lost_steps=newest - (first.step - 1),
        redone_steps=newest - (first.step - 1),
        store_bytes=0,
        rejoin_s=None,
        step_s=statistics.median(step.done_s - step.ready_s for step in resumed[len(resumed) // 2 :]),
    )


def _with_rejoin(blow: PeerBlow, steps: Sequence[DoneStep], again_s: float) -> PeerBlow:
    """The longest that a survivor stood between two steps while the newcomer was taken in, beyond a step's own time."""
    gaps = []
    for _, own in itertools.groupby(sorted(steps, key=lambda step: (step.worker, step.done_s)), lambda s: s.worker):
        times = [step.done_s for step in own]
        gaps += [late - early for early, late in itertools.pairwise(times) if early > again_s - blow.step_s]
    return dataclasses.replace(blow, rejoin_s=max(gaps) - statistics.median(gaps))


def _count(steps: Sequence[DoneStep], size: int) -> int:
    return sum(step.size == size for step in steps)


def _since(steps: Sequence[DoneStep], began_s: float, size: int) -> int:
    return sum(step.size == size and step.done_s > began_s for step in steps)


def _await(
    folder: Path, enough: Callable[[Sequence[DoneStep]], bool], processes: Iterable[subprocess.Popen[str]]
) -> tuple[DoneStep, ...]:
    """All steps, once they are enough. Raises RuntimeError when that takes too long, or a process has ended."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not enough(steps := read_steps(folder)):
        if time.monotonic() > deadline_s or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"the peer did not come so far: {steps[-1:]}, see {folder.parent}")
        time.sleep(_POLL_S)
    return steps


def _written(folder: Path, job: Mapping[str, Any]) -> Path:
    (folder / "steps").mkdir(parents=True)
    path = folder / "job.json"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Takes lines and answers with lines; its whole group ends with the context."""
    paths = [str(_ROOT), *(str(_ROOT / folder) for folder in ("planner", "service", "workers", "recovery"))]
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
