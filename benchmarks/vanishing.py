"""From the moment at which a host vanishes from the network, without a packet, to the next step that counts.

Usage: python -m benchmarks.vanishing [--json] [--hosts N]

Three nodes with an agent and a rank process each, in network namespaces of their own; the supervisor stands where the
head of a cluster does. The link of one that computes goes down; when the job steps on without it the link comes back,
and when the node has joined again the next one vanishes. The job and its state are those of `benchmarks.recovery`, on
two nodes at least, and settings are what they are by default. `detect_s` is the part until the loss was noticed. Needs
root and `ip`; without them the result is null.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from benchmarks import reporting  # as a part of `benchmarks.recovery` it does not answer by itself
from benchmarks.recovery_job import JOB
from shoal_planner.cluster import GIB, DeviceOverride
from shoal_planner.job import parse_job
from shoal_planner.plan import parse_plan
from shoal_recovery.journal import Entry, Event, NodeJoined, NodeLost, PlanAdopted, RecoveryDone, StepDone
from shoal_workers.settings import WorkerSettings

NUM_HOSTS = 5
RESULT = "vanish_to_commit_s.shoal"
_NODES = ("node-0", "node-1", "node-2")
_PHASES = ("detect_s", "decide_s", "restore_s", "rebuild_s", "lost_steps", "redone_steps")
_STEPS_BETWEEN = 12
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vanished:
    node: str
    vanish_to_commit_s: float
    detect_s: float
    decide_s: float
    restore_s: float
    rebuild_s: float
    lost_steps: int
    redone_steps: int
    evidence: str


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hosts", type=int, default=NUM_HOSTS, help="that vanish, one after the other")
    seen, why = measure(parser.parse_args().hosts)
    reporting.answer(
        "vanishing", {RESULT: median(seen)}, {"missing": why} if why else {"hosts": list(map(asdict, seen))}
    )


def median(seen: list[Vanished]) -> float | None:
    return statistics.median(one.vanish_to_commit_s for one in seen) if seen else None


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Of this process and of those that it starts: standard output is for the answer."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


@_log_on_stderr()
def measure(num_hosts: int) -> tuple[list[Vanished], str]:
    """What each cost; or why it cannot be measured here."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))  # no package: the processes of nodes are those of tests
    from networks import Network, missing
    from process_cluster import ProcessCluster
    from supervised import supervised

    if why := missing():
        return [], why
    settings, job = WorkerSettings(link_limit_s=0.0), parse_job({**JOB, "limits": {"min_devices": 2}})
    shapes, room = dict.fromkeys(_NODES, ("cpu-1t", 1)), (DeviceOverride(name="cpu-1t", memory_bytes=GIB),)
    with tempfile.TemporaryDirectory(prefix="shoal-vanishing-", dir="/dev/shm") as name, Network(_NODES) as network:
        cluster = ProcessCluster(Path(name), shapes, room, network=network, settings=settings)
        try:
            with supervised(cluster, "vanishing", job, settings=settings) as running:
                told = _Told(running.supervisor.entries_after)
                return [_vanish(told, network, turn) for turn in range(num_hosts)], ""
        finally:
            cluster.close()


class _Cuttable(Protocol):
    def cut(self, *names: str) -> None: ...
    def mend(self, *names: str) -> None: ...


class _Told:
    """The journal, as it grows."""

    def __init__(self, entries_after: Callable[[int, float], tuple[Entry, ...]]) -> None:
        self._entries_after = entries_after
        self.entries: list[Entry] = []
        self.begun = 0  # how many there were when the network was whole again,
        self.victim = ""  # after this node had vanished

    def until(self, wanted: Callable[[Event], bool], since: int = 0) -> Entry:
        """The first such entry behind the first `since`."""
        deadline_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline_s:
            found = next((entry for entry in self.entries[since:] if wanted(entry.event)), None)
            if found is not None:
                return found
            since = len(self.entries)
            self.entries += self._entries_after(since, 1.0)
        raise RuntimeError(f"the job did not come so far: {self.entries[-1:]}")


def _joined(node: str, event: Event) -> bool:
    return isinstance(event, NodeJoined) and event.node == node


def _done(step: int, event: Event) -> bool:
    return isinstance(event, StepDone) and event.step >= step


def _vanish(told: _Told, network: _Cuttable, turn: int) -> Vanished:
    """When all nodes are there, and training has gone on for a while; at the end the network is whole again."""
    for node in _NODES if not turn else [told.victim]:
        told.until(partial(_joined, node), told.begun)
    stepped = told.until(lambda event: isinstance(event, StepDone), len(told.entries)).event
    assert isinstance(stepped, StepDone)
    told.until(partial(_done, stepped.step + _STEPS_BETWEEN), len(told.entries))
    adopted = [entry.event for entry in told.entries if isinstance(entry.event, PlanAdopted)][-1]
    computing = sorted({device.node for device in parse_plan(adopted.plan).devices()})
    node = told.victim = computing[turn % len(computing)]
    since, began_s = len(told.entries), time.time()
    network.cut(node)
    lost = told.until(lambda event: isinstance(event, NodeLost) and event.node == node, since).event
    done = told.until(lambda event: isinstance(event, RecoveryDone) and node in event.nodes_lost, since).event
    assert isinstance(lost, NodeLost) and isinstance(done, RecoveryDone)
    first = told.until(lambda event: isinstance(event, StepDone) and event.epoch == done.epoch, since)
    network.mend(node)
    told.begun = len(told.entries)
    return Vanished(
        node=node,
        vanish_to_commit_s=first.at_s - began_s,
        evidence=lost.evidence,
        **{name: getattr(done, name) for name in _PHASES},
    )


if __name__ == "__main__":
    main()
