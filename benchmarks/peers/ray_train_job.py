"""A job of Ray Train on a cluster of raylets of its own: DistributedDataParallel, a checkpoint every ten steps.

Usage, in the peers' environment: python -m benchmarks.peers.ray_train_job LEAST FOLDER JOB_FILE [PART]

Three workers, and a fourth node to fall back on; with a LEAST below three it is elastic, and goes on with as few. They
share the batch of a step, or have PART samples each. On standard input a line "kill" kills all processes of a node at
once, of one with a worker if any has one, and "add" starts an empty node; each is answered by when. A raylet that ends
by itself, as one does that Ray took for dead, is started anew, as the unit of a real node would. The end of input ends
it all.
"""

from __future__ import annotations

import contextlib
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
from benchmarks.peers.llama import adamw, mean_loss, model_of
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
_LOOK_S = 1.0


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    job = parse_job(config["job"])
    model, feed = model_of(job), Feed(job)
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
    part = config["part"] or job.train.global_batch // size
    while True:
        step += 1
        tokens_BS, targets_BS = feed.read(step, rank * part, (rank + 1) * part)
        ready_s = time.time()
        loss = mean_loss(replicated(tokens_BS), targets_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        log.write(size=size, samples=size * part, step=step, ready_s=ready_s, done_s=time.time())
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
        self._raylets: list[Any] = []
        self._lock = threading.Lock()  # over which nodes there are
        for _ in range(num_nodes):
            self.add(wait=True)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")
        threading.Thread(target=self._watch, daemon=True).start()

    def add(self, *, wait: bool = False) -> float:
        """When it was begun."""
        with self._lock:
            return self._add(wait=wait)

    def _add(self, *, wait: bool) -> float:
        began_s = time.time()
        raylet = self._cluster.add_node(
            wait=wait, num_cpus=1, object_store_memory=_OBJECT_STORE_BYTES, resources={"worker": 1}
        )
        self._raylets.append(raylet)
        return began_s

    def kill(self) -> float:
        """The first node on which a worker runs, or else the first; when. All its processes get SIGKILL at once."""
        with self._lock:
            return self._kill()

    def _kill(self) -> float:
        self._replace_ended()
        chosen = self._raylets[0]
        for raylet in self._raylets:
            leader = self._leader(raylet)
            os.kill(leader.pid, signal.SIGSTOP)  # it begins nothing more
            if any(map(_is_worker, leader.children(recursive=True))):
                chosen = raylet
                break
            os.kill(leader.pid, signal.SIGCONT)
        self._raylets.remove(chosen)
        leader = self._leader(chosen)
        os.kill(leader.pid, signal.SIGSTOP)
        victims = [leader, *leader.children(recursive=True)]
        began_s = time.time()
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=10)
        return began_s

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                self._replace_ended()

    def _replace_ended(self) -> None:
        for raylet in tuple(self._raylets):
            if raylet.all_processes["raylet"][0].process.poll() is not None:
                print("a raylet ended by itself", file=sys.stderr, flush=True)
                self._raylets.remove(raylet)
                self._add(wait=False)

    def _leader(self, raylet: Any) -> psutil.Process:
        return psutil.Process(raylet.all_processes["raylet"][0].process.pid)

    def stop(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "RayTrainWorker" in " ".join(process.cmdline())
    return False


def main() -> None:
    least, folder = int(sys.argv[1]), Path(sys.argv[2])
    part = int(sys.argv[4]) if len(sys.argv) > 4 else None
    job = yaml.safe_load(Path(sys.argv[3]).read_text())
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_START_TIMEOUT_S)}
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints what it notices
    elastic = least < NUM_WORKERS
    nodes = Nodes(NUM_WORKERS if elastic else NUM_WORKERS + 1)
    trainer = TorchTrainer(
        train,
        train_loop_config={"job": job, "folder": str(folder / "steps"), "part": part},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(least, NUM_WORKERS) if elastic else NUM_WORKERS,
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
        done = {"kill": nodes.kill, "add": nodes.add}[line.strip()]
        print(done(), file=answers, flush=True)
    nodes.stop()


if __name__ == "__main__":
    main()
