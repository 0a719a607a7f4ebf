"""A job that trains on a local cluster while nodes of it die and come back, and what each blow cost.

Owns the cluster, the job and the blows; what the figures mean is said in `benchmarks.recovery`. The object store is a
real S3 server behind a link of its own (`benchmarks.narrow_link`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.narrow_link import NarrowLink
from shoal.client import Client
from shoal.local_shoal import CLUSTER_ID, LocalOptions, LocalShoal
from shoal_planner.job import parse_job
from shoal_planner.memory import STATE_BYTES
from shoal_planner.plan import parse_plan
from shoal_recovery.shard_map import shard_map

STORE_BYTES_PER_S = 400e6 / 8
_STEPS_BETWEEN = 12  # of each plan before the next blow: what a change of plan sets going has come to rest
_WATCHED = 40  # of survivors: a checkpoint that was on its way takes 4 s of the same cores, 25 steps
_EVERY = 300  # steps, over nodes, between checkpoints: on many nodes of one machine steps are long
_LIMIT_S = 180.0
_MEMORY_DIR = Path("/dev/shm")
_JOIN_S = 12.0  # that a plan with a node which has joined takes to begin, if it is better
SHARED_BATCH = 6  # samples that one, two and three nodes share out evenly
_PHASES = ("detect_s", "decide_s", "restore_s", "rebuild_s", "total_s")
# 13.4 million parameters: 161 MB of state in snapshots, two layers for each of six nodes. Few tokens, so that a step of
# two survivors is short: what is measured is what they wait for.
JOB: Mapping[str, Any] = {
    "name": "recovery",
    "model": {
        "layers": 12,
        "hidden": 320,
        "heads": 10,
        "kv_heads": 5,
        "ffn": 832,
        "vocab": 256,
        "tie_embeddings": False,
    },
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 2, "seq_len": 8, "steps": 1_000_000},
}

PART_JOB: Mapping[str, Any] = {**JOB, "train": {**JOB["train"], "global_batch": 1}}  # on six nodes


def waiting_job(device_s: float) -> dict[str, Any]:
    """About as much state, kept whole on each node; a step waits so long for each sample, and computes next to
    nothing."""
    waiting = {"layers": 12, "width": 384, "sample_s": device_s}  # 14.4 million parameters, JOB has 13.4
    return {
        **JOB,
        "model": {"entrypoint": "benchmarks.peers.waiting_model:build", "arguments": waiting},
        "train": {**JOB["train"], "global_batch": SHARED_BATCH, "sharding": "none"},
    }


def with_models_of_peers() -> None:
    """Nodes find the waiting model where peers' processes do: installed there, and not sent."""
    paths = (str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """Of the `redone_steps`, done steps that were done again, the `lost_steps` had been said to be safe.
    `missing_bytes` of state were on the nodes that died alone; `step_s` is the median of the later half of the steps
    that the survivors were watched for, as it is of peers; of the first step `phases_s` tells."""

    node: str
    step_s: float
    kill_to_commit_s: float
    kill_to_ready_s: float
    lost_steps: int
    redone_steps: int
    store_bytes: int
    missing_bytes: int
    rejoin_s: float | None
    phases_s: Mapping[str, float]


class TrainingJob:
    """A context: everything is stopped at its end."""

    def __init__(
        self,
        folder: Path,
        num_nodes: int = 3,
        *,
        job: Mapping[str, Any] = JOB,
        copies: int | str = 1,
        stored: bool = True,
    ) -> None:
        """`stored`: whether there are checkpoints; the first is waited for then."""
        self._folder, self._job, self._copies, self._stored = folder, job, copies, stored
        self._every_steps = _EVERY // num_nodes
        self._nodes = tuple(f"node-{index}" for index in range(num_nodes))
        nodes = {"name": "node", "device": "cpu-1t", "count": num_nodes, "host_memory_gib": 4, "spot": True}
        self._cluster = {"nodes": [nodes], "devices": {"cpu-1t": {"memory_gib": 1}}}
        self._stack = contextlib.ExitStack()
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            # Stated, as losses that the job suffers may make the planner keep more: then nothing is missing.
            checkpoint: dict[str, Any] = {"copies": self._copies}
            if self._stored:
                # In memory: a disk would be another machine's, and writing to it takes time from the job's cores.
                store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-store-", dir=_MEMORY_DIR)))
                checkpoint |= {"uri": _store(stack, store), "every_steps": self._every_steps}
            # What peers start has to load everything, too.
            options = LocalOptions(cluster=self._cluster, data_dir=self._folder / "shoal", port=0, forks_workers=False)
            self._shoal = stack.enter_context(LocalShoal(options))
            self._client: Client = stack.enter_context(self._shoal.client())
            job = self._client.submit({**self._job, "checkpoint": checkpoint})
            self._id: str = job["id"]
            self._stream: Iterator[dict[str, Any]] = self._client.events(self._id, follow=True)
            begun = "checkpoint_committed" if self._stored else "step_done"
            self._until(lambda event: event["kind"] == begun)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def median_step_s(self) -> float:
        """Of all steps of plans with all nodes."""
        whole = {
            event["epoch"]
            for event in self._events
            if event["kind"] == "plan_adopted" and len(_nodes(event)) == len(self._nodes)
        }
        return statistics.median(
            float(event["duration_s"])
            for event in self._events
            if event["kind"] == "step_done" and event["epoch"] in whole
        )

    def strike(self, first: int, *, everyone: bool, num_gone: int = 1, comes_back: bool = False) -> Blow:
        """Of the nodes that compute, the ones from number `first` on die, and with `everyone` all that the others
        remember. Of two, the second kept the copies of the first. The job goes on without them, until those that
        `comes_back` says come back."""
        self._rest()
        if self._stored:  # of before the running plan, others would still have what the nodes that die have now
            self._until(
                lambda event: event["kind"] == "checkpoint_committed" and event["epoch"] >= self._epoch(), again=True
            )
        computing = _nodes(self._adopted())
        names = (self._nodes[number % len(self._nodes)] for number in itertools.count(first))
        gone = list(itertools.islice(filter(computing.__contains__, names), num_gone))
        epoch = self._epoch()
        missing_bytes = self._owned_bytes(gone[:-1])
        if everyone:
            began_s = self._forget_all(gone)
            self._shoal.kill(*gone)
        else:
            began_s = self._shoal.kill(*gone)
        first_step = self._until(lambda event: event["kind"] == "step_done" and event["epoch"] > epoch)
        recovery = self._until(_recovered(lambda event: event["epoch"] > epoch), again=True)
        self._rest(_WATCHED)
        later = [event for event in self._steps(recovery["epoch"]) if event["step"] > first_step["step"]]
        return Blow(
            node=" ".join(gone),
            missing_bytes=missing_bytes,
            step_s=statistics.median(float(event["duration_s"]) for event in later[len(later) // 2 :]),
            kill_to_commit_s=first_step["at_s"] - began_s,
            kill_to_ready_s=first_step["at_s"] - first_step["duration_s"] - began_s,
            lost_steps=recovery["lost_steps"],
            redone_steps=recovery["lost_steps"] + recovery["redone_steps"],
            store_bytes=recovery["num_bytes"].get("store", 0),
            rejoin_s=self._rejoin_s(gone) if comes_back else None,
            phases_s={phase: recovery[phase] for phase in _PHASES} | {"first_step_s": float(first_step["duration_s"])},
        )

    def lose_one(self, gone: Sequence[str]) -> str:
        """The first node by name that is not gone, as `strike` kills it; nothing is waited for."""
        victim = next(name for name in self._nodes if name not in gone)
        self._shoal.kill(victim)
        return victim

    def bring_back(self, node: str) -> None:
        self._shoal.add(node)

    def step(self) -> int:
        """The newest step that is done and has not been rolled back."""
        return int(self._client.get(self._id)["status"]["step"])

    def num_computing(self) -> int:
        """Nodes in the plan that the job runs by now."""
        return len(_nodes(self._client.plan(self._id)))

    def _owned_bytes(self, nodes: Sequence[str]) -> int:
        """Of the state in snapshots, what the plan has on these nodes."""
        if not nodes:
            return 0
        ranks = shard_map(parse_plan(self._adopted()["plan"]), parse_job(JOB).model).ranks
        spans = [span for state in ranks if state.device.node in nodes for span in state.vouches]
        return STATE_BYTES * sum(span.numel for span in spans)

    def _forget_all(self, gone: Sequence[str]) -> float:
        """The agents and ranks of all other nodes die, and all that they keep in memory and on disk goes. When."""
        others = [name for name in self._nodes if name not in gone]
        victims = []
        for pid in itertools.chain.from_iterable(self._shoal.pids(name)["all"] for name in others):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if " ".join(process.cmdline()).startswith(("ray::RankActor", "ray::AgentActor")):
                    victims.append(process)
        blow_s = time.time()
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        psutil.wait_procs(victims, timeout=10)
        for name in others:
            for folder in (self._shoal.memory_dir, self._folder / "shoal" / "nodes"):
                shutil.rmtree(folder / CLUSTER_ID / name)
        return blow_s

    def _rejoin_s(self, nodes: Sequence[str]) -> float | None:
        """Brings nodes back, one after the other; how long those that compute stand still for the last. None where they
        go on without it, because steps would not be faster."""
        joined = None
        for node in nodes:
            joined = self._joined(node)
        return None if joined is None else self._pause_s(joined["epoch"])

    def _joined(self, node: str) -> dict[str, Any] | None:
        self._shoal.add(node)
        self._until(lambda event: event["kind"] == "node_joined" and event["node"] == node)
        return self._within(_JOIN_S, _recovered(lambda event: node in event["nodes_joined"]))

    def _pause_s(self, epoch: int) -> float:
        """How much longer than a step it took from the last step before this epoch to its first."""
        self._until(lambda event: event["kind"] == "step_done" and event["epoch"] == epoch, again=True)
        steps = [event for event in self._events if event["kind"] == "step_done"]
        first = next(index for index, event in enumerate(steps) if event["epoch"] == epoch)
        gap_s = float(steps[first]["at_s"] - steps[first - 1]["at_s"])
        return max(0.0, gap_s - float(steps[first]["duration_s"]))

    def _steps(self, epoch: int) -> list[dict[str, Any]]:
        return [event for event in self._events if event["kind"] == "step_done" and event["epoch"] == epoch]

    def _rest(self, num_steps: int = _STEPS_BETWEEN) -> None:
        """Until the plan that runs has made some steps."""
        epoch = self._epoch()
        for _ in range(num_steps):
            self._until(lambda event: event["kind"] == "step_done" and event["epoch"] >= epoch)

    def _adopted(self) -> dict[str, Any]:
        return next(event for event in reversed(self._events) if event["kind"] == "plan_adopted")

    def _epoch(self) -> int:
        return max(int(event["epoch"]) for event in self._events if event["kind"] == "plan_adopted")

    def _until(self, wanted: Callable[[dict[str, Any]], bool], *, again: bool = False) -> dict[str, Any]:
        """The next such event; `again`: the newest that has been read already, if there is one."""
        read: dict[str, Any] | None = next(filter(wanted, reversed(self._events)), None) if again else None
        if read is not None:
            return read
        found = self._within(_LIMIT_S, wanted)
        if found is None:
            raise RuntimeError(f"the job did not come so far: {self._events[-1]}")
        return found

    def _within(self, limit_s: float, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        deadline_s = time.monotonic() + limit_s
        for event in self._stream:
            self._events.append(event)
            if wanted(event):
                return event
            if time.monotonic() > deadline_s or (event["kind"] == "state_changed" and event["state"] == "failed"):
                break
        return None


def _recovered(wanted: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["kind"] == "recovery_done" and wanted(event)


def _nodes(adopted: Mapping[str, Any]) -> frozenset[str]:
    """Those that compute."""
    stages = [stage for pipeline in adopted["plan"]["pipelines"] for stage in pipeline["stages"]]
    return frozenset(replica["node"] for stage in stages for replica in stage["replicas"])


def _store(stack: contextlib.ExitStack, folder: Path) -> str:
    """The URI of an empty place in an S3 server behind a narrow link; this process's environment leads there."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))  # no package: tests and benchmarks start the same servers
    from servers import new_place, start_seaweedfs

    server = start_seaweedfs(folder)
    stack.callback(server.stop)
    link = stack.enter_context(NarrowLink(int(server.endpoint.rpartition(":")[2]), STORE_BYTES_PER_S))
    os.environ |= server.environment() | {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{link.port}"}
    uri: str = new_place()
    return uri
