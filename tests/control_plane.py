"""Test ground of the control plane: a real server process, and what a cluster would send it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from forking import forking
from servers import free_ports
from waiting import eventually

from shoal_planner.cluster import ClusterSnapshot, parse_cluster, snapshot_to_mapping
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.plan import Plan, parse_plan, plan_to_mapping
from shoal_planner.score import score
from shoal_recovery.journal import (
    CheckpointCommitted,
    Entry,
    EvaluationDone,
    Event,
    NodeJoined,
    NodeLost,
    PlanAdopted,
    RecoveryDone,
    SourceFailed,
    StateChanged,
    StepDone,
    entry_to_mapping,
)


def job_mapping(**changes: Any) -> dict[str, Any]:
    """A small JOB; `train={...}` and the like are merged into it."""
    job: dict[str, Any] = {
        "name": "tiny",
        "model": {"layers": 12, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 172, "vocab": 256},
        "data": {"uri": "stdlib:"},
        "train": {"global_batch": 8, "seq_len": 32, "steps": 60, "warmup_steps": 10},
    }
    for key, value in changes.items():
        job[key] = {**job[key], **value} if isinstance(value, dict) and key in job else value
    return job


CLUSTER = {
    "nodes": [
        {"name": "big", "count": 2, "device": "A100-80G", "devices": 2, "zone": "a", "price_per_hour": 7.3},
        {"name": "spot", "count": 2, "device": "T4", "devices": 1, "zone": "b", "spot": True, "price_per_hour": 0.2},
    ],
}


_SHARED = {
    "micro_batch": 3,
    "micro_batches": 2,
    "stages": [
        {"layers": [[0, 7]], "replicas": [{"node": "big-0", "devices": [0, 1], "tp": 2, "samples": 3}]},
        {
            "layers": [[7, 12]],
            "replicas": [
                {"node": "big-1", "devices": [1], "samples": 2},
                {"node": "spot-0", "devices": [0], "samples": 1},
            ],
        },
    ],
}
ALL_NODES = parse_plan(
    {
        "pipelines": [
            _SHARED,
            {
                "micro_batch": 1,
                "micro_batches": 2,
                "stages": [
                    {"layers": [[0, 9]], "replicas": [{"node": "big-1", "devices": [0]}]},
                    {"layers": [[9, 12]], "replicas": [{"node": "spot-1", "devices": [0]}]},
                ],
            },
        ]
    }
)
WITHOUT_SPOT_1 = parse_plan(
    {
        "pipelines": [
            _SHARED,
            {
                "micro_batch": 1,
                "micro_batches": 2,
                "stages": [{"layers": [[0, 12]], "replicas": [{"node": "big-1", "devices": [0]}]}],
            },
        ]
    }
)


def snapshot() -> ClusterSnapshot:
    return parse_cluster(CLUSTER)


@dataclass(kw_only=True)
class Connector:
    """Speaks for a cluster over HTTP, as the process on a Ray cluster does."""

    http: httpx.Client
    cluster_id: str = "local"
    holder: str = "connector-1"
    cluster: ClusterSnapshot = field(default_factory=snapshot)

    def renew(self, lease_s: float = 60.0, signs: Mapping[str, float] | None = None) -> httpx.Response:
        """`signs`: by node, for how many seconds its processes were silent."""
        body: dict[str, Any] = {
            "holder": self.holder,
            "snapshot": snapshot_to_mapping(self.cluster),
            "profile": {},
            "lease_s": lease_s,
        }
        if signs is not None:
            body["signs"] = [{"node": node, "age_s": age_s, "by": "processes"} for node, age_s in signs.items()]
        return self.http.put(f"/v1/clusters/{self.cluster_id}", json=body)

    def wishes(self, **params: Any) -> dict[str, Any]:
        return ok(self.http.get(f"/v1/clusters/{self.cluster_id}/wishes", params=params))

    def send(self, job_id: str, entries: list[Entry]) -> httpx.Response:
        body = {
            "cluster_id": self.cluster_id,
            "holder": self.holder,
            "entries": [entry_to_mapping(entry) for entry in entries],
        }
        return self.http.post(f"/v1/jobs/{job_id}/journal", json=body)


def enter(client: httpx.Client, link: str) -> httpx.Response:
    """Opens a sign-in link and presses its button; what came of it."""
    page = client.get(link, headers={"Accept": "text/html"})
    fields = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page.text)
    return client.post("/login", data=dict(fields), headers={"Accept": "text/html"})


def ok(response: httpx.Response) -> Any:
    assert response.is_success, (response.status_code, response.text)
    return response.json()


SPOILT = SourceFailed(
    source="agent of spot-0",
    object="000001-2",
    step=20,
    num_bytes=1_200_000,
    problem="what came is not what was sealed",
    instead=("agent of big-0",),
)


STALLED_S = 0.012


@dataclass(kw_only=True)
class Story:
    """Builds a journal entry by entry; time passes as the events say."""

    job: JobSpec
    cluster: ClusterSnapshot
    now_s: float
    entries: list[Entry] = field(default_factory=list)
    epoch: int = 0
    step: int = 0
    plan_id: str = ""

    def add(self, event: Event, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.entries.append(Entry(seq=len(self.entries) + 1, at_s=self.now_s, event=event))

    def state(self, state: str, code: str, reason: str, after_s: float = 0.0) -> None:
        self.add(StateChanged(state=state, code=code, reason=reason), after_s)

    def adopt(self, plan: Plan, cluster: ClusterSnapshot, reason: str) -> None:
        """With the planner's prediction, as a supervisor would."""
        self.cluster, self.epoch = cluster, self.epoch + 1
        found = score(plan, self.job, cluster)
        self.plan_id = found.plan_id
        self.add(
            PlanAdopted(
                epoch=self.epoch,
                plan_id=found.plan_id,
                step=self.step,
                reason=reason,
                plan=plan_to_mapping(found),
                snapshot=snapshot_to_mapping(cluster),
            )
        )

    def train(self, steps: int, step_s: float = 0.4) -> None:
        for _ in range(steps):
            self.step += 1
            loss = 1.9 + 3.6 * math.exp(-self.step / 25) + 0.08 * math.sin(self.step * 12.9898)
            batch = self.job.train.global_batch
            first = (self.step - 1) * batch
            self.add(
                StepDone(
                    epoch=self.epoch,
                    step=self.step,
                    loss=loss,
                    grad_norm=1.0 + 1 / self.step,
                    lr=3e-4,
                    tokens=self.job.train.tokens_per_step,
                    duration_s=step_s,
                    samples=((first, first + batch),),
                    moved_bytes=(("node", 4_100_000), ("zone", 12_900_000)),
                    exposed=(0.12, 0.21),
                    waited_s=(
                        *(("stages", 0.01, 0.02), ("gradients", 0.035, 0.06), ("vote", 0.002, 0.004)),
                        ("safety", 0.008, 0.016),
                    ),
                    stalled_s=STALLED_S,
                ),
                step_s,
            )

    def evaluate(self, loss: float) -> None:
        self.add(EvaluationDone(epoch=self.epoch, step=self.step, loss=loss, tokens=1024, duration_s=0.2), 0.2)

    def recover(self, cause: str, reason: str, *, redone: int, lost: tuple[str, ...], joined: tuple[str, ...]) -> None:
        self.add(
            RecoveryDone(
                epoch=self.epoch,
                cause=cause,
                reason=reason,
                step=self.step,
                redone_steps=redone,
                lost_steps=0,
                detect_s=0.062 if lost else 0.0,
                decide_s=0.048,
                restore_s=0.131,
                rebuild_s=0.204,
                total_s=0.487,
                num_bytes={"own": 31_400_000, "node": 8_200_000, "peer": 12_900_000, "store": 0},
                nodes_lost=lost,
                nodes_joined=joined,
                source_s={"own": 0.004, "node": 0.006, "peer": 0.0129, "store": 0.0},
                failed_sources=(SPOILT,) if lost else (),
                plan_before="0123456789ab",
                plan_after="ba9876543210",
            ),
            0.487,
        )


def story(job: dict[str, Any], *, started_at_s: float) -> Story:
    """The main job: starts, trains, loses a node without notice, trains on, takes a node in, succeeds."""
    told = Story(job=parse_job(job), cluster=snapshot(), now_s=started_at_s)
    steps = told.job.train.steps
    third = steps // 3
    told.state("starting", "planned", "starting 6 ranks on 4 nodes", 0.5)
    told.adopt(ALL_NODES, told.cluster, "first plan of this job")
    told.state("running", "stepping", "training", 3.0)
    told.train(third)
    told.add(NodeLost(node="spot-1", evidence="its connection closed", detect_s=0.062), 0.1)
    told.state("recovering", "node_lost", "node spot-1 was lost without notice: its connection closed")
    told.step -= 1
    told.adopt(WITHOUT_SPOT_1, told.cluster.without({"spot-1"}), "node spot-1 was lost")
    told.recover("node_lost", "node spot-1 was lost", redone=1, lost=("spot-1",), joined=())
    told.state("running", "stepping", "training goes on without spot-1")
    told.train(third, 0.55)
    told.add(CheckpointCommitted(step=told.step, epoch=2, uri="file:///ckpt", num_bytes=52_500_000, duration_s=0.8))
    told.add(NodeJoined(node="spot-1", device="T4", devices=1), 0.2)
    told.state("recovering", "node_joined", "node spot-1 came back and is worth the move")
    told.adopt(ALL_NODES, snapshot(), "node spot-1 joined")
    told.recover("node_joined", "node spot-1 joined", redone=0, lost=(), joined=("spot-1",))
    told.state("running", "stepping", "training on all 4 nodes again")
    told.train(steps - told.step)
    told.evaluate(2.25)
    told.state("succeeded", "all_steps_done", f"all {steps} steps are done")
    return told


class Forked:
    """`python -m MODULE` as a process of its own, with this environment and log, forked from one that has loaded the
    control plane: to load it takes most of the time that it takes to start. As `subprocess.Popen`."""

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        self._process = forking().Process(target=_run_module, args=(module, dict(environment), str(log)))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} goes on after {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:  # or its number may be another's
            os.kill(self.pid, number)


def _run_module(module: str, environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@dataclass(kw_only=True)
class ControlPlane:
    """A control plane in a process of its own."""

    process: Forked
    url: str
    data_dir: Path

    @property
    def token(self) -> str:
        return (self.data_dir / "admin.token").read_text().strip()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SHOAL_SERVER": self.url, "SHOAL_DATA_DIR": str(self.data_dir)}

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=20)


def start_control_plane(data_dir: Path, port: int | None = None, **settings: str) -> ControlPlane:
    """Returns once it answers. `settings` are those of the environment, in lower case and without SHOAL_."""
    port = port or free_ports(1)[0]
    given = {"data_dir": str(data_dir), "port": str(port), "poll_s": "0.2", "file_roots": "/"} | settings
    environment = {**os.environ, **{f"SHOAL_{name.upper()}": value for name, value in given.items()}}
    data_dir.mkdir(parents=True, exist_ok=True)
    process = Forked("shoal_service", environment, data_dir / "log")
    plane = ControlPlane(process=process, url=f"http://127.0.0.1:{port}", data_dir=data_dir)

    def answers() -> bool:
        assert process.poll() is None, (data_dir / "log").read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{plane.url}/healthz").is_success
        return False

    eventually(answers, 120)
    return plane


@contextlib.contextmanager
def control_plane(data_dir: Path, **settings: str) -> Iterator[ControlPlane]:
    plane = start_control_plane(data_dir, **settings)
    try:
        yield plane
    finally:
        plane.stop()
