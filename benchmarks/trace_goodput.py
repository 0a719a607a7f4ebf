"""Goodput of a job on nodes that come and go as in a real trace of spot instances.

Usage: python -m benchmarks.trace_goodput [--json] [--seconds N] [--rounds N] [--seq-len N] [--device-s S]
       [--only NAME,NAME]

The trace is that of four V100 instances in us-east-2a (public, of SkyPilot), of which a window of 16.7 hours is
replayed within `--seconds`. One to three nodes are there, as many as the trace had instances. A loss is SIGKILL to all
processes of the node at once, and a node that comes is empty. `shoal` (the number of copies left to the planner, no
checkpoints), `torchft` (replica groups of one, a heartbeat limit of 0.5 s, no checkpoints either) and
`ray_train_elastic` (one to three workers, a checkpoint every ten steps to the local disk, without which it would begin
again) train the same model and take turns.

Whoever is there shares a batch of six samples and keeps all of the state, as replicas of torchft and Ray Train do:
the same training, step by step, however many nodes there are. `torchft_shrinking` has two samples on each node instead,
as torchft's own example has: what is lost with a step in flight is less, as steps on one node are a third as long, but
it is another training, with as small a batch as there are few nodes.

`samples_per_s` counts every step once that the last state has in it: steps that were lost and done again do not count
twice. `resting_samples_per_s` is the rate with so many nodes and no changes, from a job of its own. `goodput` is what
was done of the samples that the same nodes would have done at these rates: what coming and going leaves of a system's
own speed. Nodes are shares of one machine's cores, so that two nodes are faster than two thirds of three; hence a rate
for each number of nodes.

For the same reason whatever goes on beside ranks is at their expense, which on nodes with a GPU has cores of its own.
With `--device-s` ranks wait so many seconds a sample instead of computing (`benchmarks.peers.waiting_model`): what is
left to share is what all systems do on processors besides.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.recovery_job import JOB, SHARED_BATCH, TrainingJob, waiting_job, with_models_of_peers
from benchmarks.recovery_peers import NUM_WORKERS, RayTrain, Torchft
from benchmarks.reporting import answer

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "sky_preem_4node_aws08032023_us-east-2a_v100_1.csv"
BEGIN_S, END_S = 90_000.0, 150_000.0
_REST_S = 10.0  # after a change
_RATED_S = 30.0
_LIMIT_S = 120.0
_POLL_S = 0.05


def job(seq_len: int, device_s: float = 0.0) -> dict[str, Any]:
    """The state is 12 bytes a parameter, whatever a step takes: so long samples are what training has, and short ones
    favour whoever keeps nothing. With `device_s` a step waits so long for each sample, and computes next to nothing."""
    if device_s:
        return waiting_job(device_s)
    return {**JOB, "train": {**JOB["train"], "global_batch": SHARED_BATCH, "sharding": "none", "seq_len": seq_len}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """So many nodes are there from `at_s` on, counted from the beginning of the replay."""

    at_s: float
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """`rates` are samples per second at rest, by the number of nodes."""

    samples: int
    seconds: float
    samples_per_s: float
    goodput: float
    rates: Mapping[int, float]


class Contender(Protocol):
    """A job under way on NUM_WORKERS nodes."""

    def lose(self) -> None:
        """One of the nodes that are there dies."""

    def gain(self) -> None:
        """One more is there, from now on or soon."""

    def samples(self) -> int:
        """That the state of now has been trained on."""

    def num_computing(self) -> int:
        """Nodes that the job runs on now."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--device-s", type=float, default=0.0, help="a sample waits so long, whatever --seq-len says")
    parser.add_argument("--only", default=",".join(_CONTENDERS), help="systems, separated by commas")
    arguments = parser.parse_args()
    changes = replayed(TRACE, arguments.seconds)
    runs: defaultdict[str, list[Replayed]] = defaultdict(list)
    problems: dict[str, str] = {}
    wanted = arguments.only.split(",")
    if unknown := sorted(set(wanted) - set(_CONTENDERS)):
        parser.error(f"--only {unknown[0]}: there are {', '.join(_CONTENDERS)}")
    wanted_job = job(arguments.seq_len, arguments.device_s)
    chosen = {side: _CONTENDERS[side] for side in wanted}
    for _, (side, begin) in itertools.product(range(arguments.rounds), chosen.items()):
        try:
            with _begun(begin, wanted_job) as contender:
                rates = at_rest(contender)
            with _begun(begin, wanted_job) as contender:
                runs[side].append(play(contender, changes, arguments.seconds, rates))
            print(side, runs[side][-1], file=sys.stderr, flush=True)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            problems[side] = str(error)
    results: dict[str, float | None] = {}
    for side, found in runs.items():
        for figure in ("samples_per_s", "goodput"):
            results[f"{figure}.{side}"] = statistics.median(getattr(one, figure) for one in found)
        for nodes in range(1, NUM_WORKERS + 1):
            results[f"resting_samples_per_s.{side}.{nodes}"] = statistics.median(one.rates[nodes] for one in found)
    for figure, side in itertools.product(("samples_per_s", "goodput"), filter(chosen.__contains__, _PEERS)):
        ours, theirs = (results.setdefault(f"{figure}.{one}", None) for one in ("shoal", side))
        ratio = "ratio" if figure == "samples_per_s" else "goodput_ratio"
        results[f"{ratio}.{side}"] = None if ours is None or theirs is None else ours / theirs
    told: dict[str, Any] = {side: list(map(asdict, found)) for side, found in runs.items()}
    answer(
        "trace_goodput",
        results,
        {**told, "problems": problems, "train": wanted_job["train"], "device_s": arguments.device_s}
        | {"changes": list(map(asdict, changes))},
    )


def replayed(trace: Path, seconds: float) -> tuple[Change, ...]:
    """The changes of the window, on the scale of the replay."""
    with trace.open() as file:
        rows = [(float(row["t_s"]), int(row["available"])) for row in csv.DictReader(file)]
    scale = seconds / (END_S - BEGIN_S)
    found = [Change(at_s=0.0, nodes=NUM_WORKERS)]
    for at_s, available in rows:
        nodes = min(NUM_WORKERS, max(1, available))
        if BEGIN_S < at_s < END_S and nodes != found[-1].nodes:
            found.append(Change(at_s=(at_s - BEGIN_S) * scale, nodes=nodes))
    return tuple(found)


def at_rest(contender: Contender) -> dict[int, float]:
    """Samples per second of all nodes, and of fewer and fewer, each time when the loss has been got over."""
    found: dict[int, float] = {}
    for nodes in range(NUM_WORKERS, 0, -1):
        _await(functools.partial(_computes_on, contender, nodes), f"the job does not run on {nodes} nodes")
        time.sleep(_REST_S)
        found[nodes] = _rate(contender, _RATED_S)
        if nodes > 1:
            contender.lose()
    return found


def _computes_on(contender: Contender, nodes: int) -> bool:
    return contender.num_computing() == nodes


def play(contender: Contender, changes: Sequence[Change], seconds: float, rates: Mapping[int, float]) -> Replayed:
    """Whoever is late with a change makes up for it as soon as it can; the end is that of the trace in any case."""
    time.sleep(_REST_S)
    before, began_s = contender.samples(), time.monotonic()
    real = [changes[0]]
    for earlier, change in itertools.pairwise(changes):
        time.sleep(max(0.0, began_s + change.at_s - time.monotonic()))
        real.append(replace(change, at_s=time.monotonic() - began_s))
        for _ in range(earlier.nodes - change.nodes):
            contender.lose()
        for _ in range(change.nodes - earlier.nodes):
            contender.gain()
    time.sleep(max(0.0, began_s + seconds - time.monotonic()))
    samples, took_s = contender.samples() - before, time.monotonic() - began_s
    return Replayed(
        samples=samples,
        seconds=took_s,
        samples_per_s=samples / took_s,
        goodput=samples / possible(real, took_s, rates),
        rates=rates,
    )


def possible(changes: Sequence[Change], seconds: float, rates: Mapping[int, float]) -> float:
    """Samples that the nodes of a trace would do if changes took no time."""
    ends = [*(change.at_s for change in changes[1:]), seconds]
    return sum((end - change.at_s) * rates[change.nodes] for change, end in zip(changes, ends, strict=True))


def _rate(contender: Contender, seconds: float) -> float:
    """From the end of a step to the end of a step."""
    before, began_s = _next(contender)
    time.sleep(seconds)
    after, ended_s = _next(contender)
    return (after - before) / (ended_s - began_s)


def _next(contender: Contender) -> tuple[int, float]:
    """What has been done when the step that is under way is, and when that was."""
    before = contender.samples()
    _await(lambda: contender.samples() != before, "no step is done")
    return contender.samples(), time.monotonic()


def _await(holds: Callable[[], bool], problem: str) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{problem}, after {_LIMIT_S:g} s")
        time.sleep(_POLL_S)


class _Shoal:
    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._gone: list[str] = []

    def lose(self) -> None:
        self._gone.append(self._job.lose_one(self._gone))

    def gain(self) -> None:
        self._job.bring_back(self._gone.pop(0))

    def samples(self) -> int:
        return self._job.step() * SHARED_BATCH

    def num_computing(self) -> int:
        return self._job.num_computing()


@contextmanager
def _shoal(folder: Path, job: dict[str, Any]) -> Iterator[Contender]:
    with_models_of_peers()
    with TrainingJob(folder, num_nodes=NUM_WORKERS, job=job, copies="auto", stored=False) as running:
        yield _Shoal(running)


def _torchft(folder: Path, job: dict[str, Any]) -> AbstractContextManager[Contender]:
    return Torchft(folder / "torchft", job, part=None)


def _shrinking(folder: Path, job: dict[str, Any]) -> AbstractContextManager[Contender]:
    return Torchft(folder / "torchft", job, part=SHARED_BATCH // NUM_WORKERS)


def _ray_train(folder: Path, job: dict[str, Any]) -> AbstractContextManager[Contender]:
    return RayTrain(folder / "ray_train", job, part=None, elastic=True, least=1)


_Begin = Callable[[Path, dict[str, Any]], AbstractContextManager[Contender]]
_PEERS: dict[str, _Begin] = {"torchft": _torchft, "torchft_shrinking": _shrinking, "ray_train_elastic": _ray_train}
_CONTENDERS: dict[str, _Begin] = {"shoal": _shoal, **_PEERS}


@contextmanager
def _begun(begin: _Begin, wanted_job: dict[str, Any]) -> Iterator[Contender]:
    with (
        tempfile.TemporaryDirectory(prefix="shoal-trace-") as folder,
        begin(Path(folder), wanted_job) as contender,
    ):
        yield contender


if __name__ == "__main__":
    main()
