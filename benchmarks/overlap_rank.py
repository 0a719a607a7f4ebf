"""One rank of `overlap`: runs every plan of a folder's request in turn, and leaves what it saw there.

python -m benchmarks.overlap_rank FOLDER RANK HOST
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, but untyped

from shoal_workers.allocator import keep_memory
from shoal_workers.engine import StepReport
from shoal_workers.exchange import GlooExchange
from shoal_workers.solo import RunRequest, run_rank
from shoal_workers.tensor_parallel import tp_groups
from shoal_workers.traffic import Wait

TIMEOUT_S = 300.0


def main(folder: Path, rank: int, host: str) -> None:
    keep_memory()
    torch.set_num_threads(1)
    requests: list[tuple[str, RunRequest]] = pickle.loads((folder / "requests").read_bytes())
    size = requests[0][1].plan.num_devices
    store = FileStore(str(folder / "store"), size)
    seen = []
    for number, (_, request) in enumerate(requests):
        groups = tp_groups(request.plan)
        exchange = GlooExchange(store, f"run-{number}", rank, size, groups, TIMEOUT_S, epoch=number + 1, host=host)
        reports = run_rank(request, rank, exchange).reports[1:]  # the first one connects
        seen.append([_seen(report) for report in reports])
        exchange.abandon()
    (folder / f"seen-{rank}").write_text(json.dumps(seen), encoding="utf-8")


def _seen(report: StepReport) -> dict[str, float]:
    """What this rank was in exchanges for, since the vote before."""
    exposed_s = sum(found_s for wait, found_s in report.waited_s.items() if wait is not Wait.VOTE)
    return {"step_s": report.duration_s, "compute_s": report.compute_s, "exposed_s": exposed_s, "loss": report.loss}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
