"""A running local Shoal as end-to-end tests use it: submit, watch, kill, look into processes and files."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import eventually

from shoal.client import Client
from shoal.demo_report import counting_steps
from shoal.local_shoal import CLUSTER_ID, LocalShoal
from shoal_planner.job import parse_job

BATCH = 8
LIMIT_S = 180.0


def job_mapping(steps: int, batch: int = BATCH, **checkpoint: Any) -> dict[str, Any]:
    """A small job whose state does not fit a small node."""
    job: dict[str, Any] = {
        "name": "e2e",
        "model": {"layers": 6, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab": 256},
        "data": {"uri": "stdlib:"},
        "train": {"global_batch": batch, "seq_len": 64, "steps": steps, "lr": 1e-3, "warmup_steps": 5},
    }
    return {**job, "checkpoint": checkpoint} if checkpoint else job


@functools.cache
def reference_losses(steps: int, batch: int = BATCH) -> tuple[float, ...]:
    """Of the same job in this process, undisturbed."""
    from shoal_workers.solo import run_solo

    return run_solo(parse_job(job_mapping(steps, batch)), steps).losses


def check_history(events: list[dict[str, Any]], steps: int) -> None:
    """As `check_curve`; and nothing that was safe was done again."""
    check_curve(events, steps, BATCH)
    for recovery in (event for event in events if event["kind"] == "recovery_done"):
        assert recovery["lost_steps"] == 0, recovery
        assert recovery["redone_steps"] <= 1, recovery


def check_curve(events: list[dict[str, Any]], steps: int, batch: int) -> None:
    """Nothing missing, nothing double, no sample lost, and the loss curve of a run in peace."""
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    counted = counting_steps(events)
    assert [event["step"] for event in counted] == list(range(1, steps + 1))
    fed = [number for event in counted for first, last in event["samples"] for number in range(first, last)]
    assert sorted(fed) == list(range(steps * batch))
    for event, expected in zip(counted, reference_losses(steps, batch), strict=True):
        assert event["loss"] == pytest.approx(expected, rel=1e-4), event["step"]


def lives(process: psutil.Process) -> bool:
    """Nor has ended without anybody having asked how."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Running:
    def __init__(self, shoal: LocalShoal, nodes: list[str]) -> None:
        self.shoal = shoal
        self.client: Client = shoal.client()
        self._nodes = nodes
        self._jobs: list[str] = []
        self._stopped: list[psutil.Process] = []
        self.killed: set[str] = set()

    def submit(self, mapping: Mapping[str, Any]) -> str:
        job_id: str = self.client.submit(mapping)["id"]
        self.adopt(job_id)
        return job_id

    def adopt(self, job_id: str) -> None:
        """A job that was submitted in another way is ended like all others."""
        self._jobs.append(job_id)

    def restore(self) -> None:
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        for job_id in self._jobs:
            if self.client.get(job_id)["status"]["state"] not in ("succeeded", "failed", "cancelled"):
                self.client.cancel(job_id)
            self.client.wait(job_id, timeout_s=60)
        for node in sorted(self.killed):
            self.shoal.add(node)
        self.client.close()  # or the sockets that it keeps would be found open later

    def kill(self, *nodes: str) -> None:
        self.killed |= set(nodes)
        self.shoal.kill(*nodes)

    def drain(self, node: str, lead_s: float) -> None:
        """As Ray's autoscaler does, or `ray start` when it gets a SIGTERM."""
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        flags = self.raylet_flags(node)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        ends_ms = int((time.time() + lead_s) * 1000)
        accepted, why = GcsClient(address=flags["gcs-address"]).drain_node(flags["node_id"], reason, "spot", ends_ms)
        assert accepted, why

    def alive(self, nodes: Sequence[Mapping[str, str]]) -> list[bool]:
        """Whether Ray takes them for that, by the flags of their raylets."""
        from ray._raylet import GcsClient, NodeID

        ids = [NodeID.from_hex(flags["node_id"]) for flags in nodes]
        found: list[bool] = GcsClient(address=nodes[0]["gcs-address"]).check_alive(ids, 10.0)
        return found

    def end_cluster(self) -> None:
        """Everything at once that runs on its machines, as if they lost their power; what they keep stays."""
        cluster = psutil.Process(self.shoal.cluster_pid)
        victims = [cluster, *cluster.children(recursive=True)]
        for end in (psutil.Process.suspend, psutil.Process.kill):
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(victim)
        eventually(lambda: not any(map(lives, victims)))
        assert self.shoal._cluster is not None
        self.shoal._cluster.wait(LIMIT_S)
        for stream in (self.shoal._cluster.stdin, self.shoal._cluster.stdout):
            assert stream is not None
            stream.close()

    def raylet_flags(self, node: str) -> dict[str, str]:
        """What Ray started it with, such as `gcs-address` and `node_id`."""
        raylet = psutil.Process(self.shoal.pids(node)["raylet"]).cmdline()
        return dict(part.lstrip("-").split("=", 1) for part in raylet if part.startswith("--") and "=" in part)

    # --- watching ---

    def events(self, job_id: str, kind: str | None = None) -> list[dict[str, Any]]:
        found = list(self.client.events(job_id))
        return [event for event in found if kind is None or event["kind"] == kind]

    def step(self, job_id: str) -> int:
        step: int = self.client.get(job_id)["status"]["step"] or 0
        return step

    def until_step(self, job_id: str, step: int) -> None:
        def reached() -> bool:
            status = self.client.get(job_id)["status"]
            assert status["state"] != "failed", status["reason"]
            return (status["step"] or 0) >= step

        eventually(reached, LIMIT_S)

    def until_event(self, job_id: str, kind: str, where: Callable[[dict[str, Any]], bool] = lambda _: True) -> Any:
        return eventually(lambda: [event for event in self.events(job_id, kind) if where(event)], LIMIT_S)[-1]

    def finish(self, job_id: str) -> list[dict[str, Any]]:
        """Waits for the end, which must be a good one; all events."""
        job = self.client.wait(job_id, timeout_s=LIMIT_S)
        assert job["status"]["state"] == "succeeded", job["status"]
        return self.events(job_id)

    def plan(self, job_id: str) -> dict[str, Any]:
        """The newest adopted one, with its epoch and snapshot."""
        found: dict[str, Any] = self.events(job_id, "plan_adopted")[-1]
        return found

    # --- processes ---

    def processes(self, title: str) -> dict[int, psutil.Process]:
        """Descendants of the local cluster whose title begins so, by process id."""
        found = {}
        for process in psutil.Process(self.shoal.cluster_pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if " ".join(process.cmdline()).startswith(title):
                    found[process.pid] = process
        return found

    def rank_of(self, node: str) -> psutil.Process:
        """The rank process of a node with one device."""
        ranks, there = self.processes("ray::RankActor"), self.shoal.pids(node)["all"]
        return next(process for pid, process in ranks.items() if pid in there)

    def stop(self, process: psutil.Process) -> None:
        process.suspend()
        self._stopped.append(process)

    # --- files ---

    def journal_on_disk(self, job_id: str) -> list[dict[str, Any]]:
        """The longest journal that an agent keeps."""
        nodes = Path(self.shoal.data_dir) / "nodes" / CLUSTER_ID
        best: list[dict[str, Any]] = []
        for path in nodes.glob(f"*/journal/{job_id}.jsonl"):
            lines = path.read_text().splitlines()
            entries = [json.loads(line) for line in lines if line.endswith("}")]
            best = max(best, entries, key=len)
        return best

    def sealed_step(self, job_id: str) -> int:
        """The newest step of which any node has a sealed snapshot."""
        steps = [0]
        for path in self.shoal.memory_dir.glob(f"{CLUSTER_ID}/*/{job_id}/*.seal?"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                steps.append(json.loads(path.read_text())["step"])
        return max(steps)
