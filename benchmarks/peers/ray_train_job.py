"""A job of Ray Train on a cluster of raylets of its own: DistributedDataParallel, a checkpoint every ten steps.

Usage, in the peers' environment: python -m benchmarks.peers.ray_train_job fixed|elastic FOLDER JOB_FILE

`fixed` has three workers and a fourth node to fall back on; `elastic` goes on with two or three. A line "kill" on
standard input kills all processes of a node with a worker at once, answered by when; the end of input ends it all.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.train
import torch
import yaml
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.contender import Feed
from benchmarks.peers.llama import adamw, build, mean_loss
from benchmarks.peers.step_log import StepLog
from shoal_planner.job import parse_job

NUM_WORKERS = 3
CHECKPOINT_EVERY = 10
# With the defaults a dead raylet is noticed after 13 s.
_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
# An elastic job first asks for as many workers as before, one of them on the node that is gone. By default it waits a
# minute for that one.
_START_TIMEOUT_S = 15
_OBJECT_STORE_BYTES = 80_000_000


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    job = parse_job(config["job"])
    model, feed = build(job), Feed(job)
    optimizer = adamw(job, model.parameters())
    step = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    log = StepLog(Path(config["folder"]), f"worker-{rank}-{time.time_ns()}")
    part = job.train.global_batch // NUM_WORKERS
    while True:
        step += 1
        tokens_BS, targets_BS = feed.read(step, rank * part, (rank + 1) * part)
        ready_s = time.time()
        loss = mean_loss(replicated(tokens_BS), targets_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        log.write(size=size, step=step, ready_s=ready_s, done_s=time.time())
        if step % CHECKPOINT_EVERY == 0:
            _report(rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


def _report(rank: int, state: dict[str, Any]) -> None:
    if rank != 0:
        ray.train.report({"step": state["step"]})
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"step": state["step"]}, checkpoint=ray.train.Checkpoint.from_directory(folder))


class Nodes:
    def __init__(self, num_nodes: int) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_system_config": _HEALTH,
            },
        )
        self._raylets = [
            self._cluster.add_node(
                wait=True, num_cpus=1, object_store_memory=_OBJECT_STORE_BYTES, resources={"worker": 1}
            )
            for _ in range(num_nodes)
        ]
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")

    def kill(self) -> float:
        """The first node on which a worker runs; when. All its processes get SIGKILL at once."""
        for raylet in self._raylets:
            leader = psutil.Process(raylet.all_processes["raylet"][0].process.pid)
            os.kill(leader.pid, signal.SIGSTOP)
            victims = [leader, *leader.children(recursive=True)]
            if any("RayTrainWorker" in " ".join(victim.cmdline()) for victim in victims):
                began_s = time.time()
                for victim in victims:
                    victim.kill()
                psutil.wait_procs(victims, timeout=10)
                return began_s
            os.kill(leader.pid, signal.SIGCONT)
        raise RuntimeError("no node runs a worker")

    def stop(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def main() -> None:
    elastic, folder = sys.argv[1] == "elastic", Path(sys.argv[2])
    job = yaml.safe_load(Path(sys.argv[3]).read_text())
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_START_TIMEOUT_S)}
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints what it notices
    nodes = Nodes(NUM_WORKERS if elastic else NUM_WORKERS + 1)
    trainer = TorchTrainer(
        train,
        train_loop_config={"job": job, "folder": str(folder / "steps")},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(NUM_WORKERS - 1, NUM_WORKERS) if elastic else NUM_WORKERS,
            resources_per_worker={"CPU": 1, "worker": 1},
        ),
        run_config=ray.train.RunConfig(
            name="recovery",
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    threading.Thread(target=trainer.fit, daemon=True).start()
    for line in sys.stdin:
        assert line.strip() == "kill", line
        print(nodes.kill(), file=answers, flush=True)
    nodes.stop()


if __name__ == "__main__":
    main()
