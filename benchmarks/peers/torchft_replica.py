"""A replica group of torchft, of one process: fault-tolerant data parallelism as torchft's own example has it.

Usage, in the peers' environment:
python -m benchmarks.peers.torchft_replica LIGHTHOUSE INDEX LOG_FOLDER JOB_FILE [PART]

It joins whoever trains under that lighthouse, takes over their state, and steps until it is killed. Those who take part
in a step share its batch, so that it is the same training however many there are: they have to agree on who does before
the forward, not beside it. With PART each has so many samples, as in that example, and a step has fewer when fewer are
left.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.peers.contender import Feed
from benchmarks.peers.llama import adamw, mean_loss, model_of
from benchmarks.peers.step_log import StepLog
from shoal_planner.job import parse_job

_TIMEOUT = timedelta(seconds=5)
# Of three, one survivor may be left waiting for the other one, which has seen the death and waits for a quorum.
_GROUP_TIMEOUT = timedelta(seconds=1)


def main() -> None:
    lighthouse, index, folder, job_file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    part = int(sys.argv[5]) if len(sys.argv) > 5 else None
    job = parse_job(yaml.safe_load(job_file.read_text()))
    model, feed = model_of(job), Feed(job)
    inner = adamw(job, model.parameters())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_GROUP_TIMEOUT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{index}",
        hostname="127.0.0.1",
        timeout=_TIMEOUT,
    )
    optimizer = Optimizer(manager, inner)
    replicated = DistributedDataParallel(manager, model)
    log = StepLog(folder, f"replica-{index}-{time.time_ns()}")
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        if part is not None:
            first, num = index * part, part
        elif (place := manager.participating_rank()) is None:  # of who is still given its state nothing counts
            first, num, step = 0, 1, manager.current_step()
        else:
            num, step = job.train.global_batch // manager.num_participants(), manager.current_step()
            first = place * num
        tokens_BS, targets_BS = feed.read(step + 1, first, first + num)
        ready_s = time.time()
        mean_loss(replicated(tokens_BS), targets_BS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if manager.current_step() > step:
            size, done_s = manager.num_participants(), time.time()
            samples = job.train.global_batch if part is None else size * part
            log.write(size=size, samples=samples, step=manager.current_step(), ready_s=ready_s, done_s=done_s)


if __name__ == "__main__":
    main()
