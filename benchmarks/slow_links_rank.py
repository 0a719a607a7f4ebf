"""One rank of `slow_links`: runs every layout of a folder's request in turn, and leaves what it saw there.

python -m benchmarks.slow_links_rank FOLDER RANK HOST
"""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, but untyped

from shoal_workers.allocator import keep_memory
from shoal_workers.engine import StepReport
from shoal_workers.node_exchange import nodes_of, open_exchange
from shoal_workers.solo import RunRequest, run_rank
from shoal_workers.tensor_parallel import tp_groups

TIMEOUT_S = 300.0


def main(folder: Path, rank: int, host: str) -> None:
    keep_memory()
    torch.set_num_threads(1)
    requests: list[tuple[str, RunRequest]] = pickle.loads((folder / "requests").read_bytes())
    plan = requests[0][1].plan
    store = FileStore(str(folder / "store"), len(nodes_of(plan)))
    seen = []
    for number, (name, request) in enumerate(requests):
        exchange = open_exchange(
            store,
            f"run-{number}",
            rank,
            nodes_of(request.plan),
            tp_groups(request.plan),
            TIMEOUT_S,
            epoch=number + 1,
            host=host,
        )
        reports = run_rank(request, rank, exchange).reports[1:]  # the first one connects
        seen.append({"name": name, "steps": [_seen(report) for report in reports]})
        exchange.abandon()
    (folder / f"seen-{rank}").write_text(json.dumps(seen), encoding="utf-8")


def _seen(report: StepReport) -> dict[str, object]:
    """Bytes are those that this rank sent to other nodes and to its own."""
    sent: Counter[str] = Counter()
    for moved in report.moved:
        sent[str(moved.link)] += moved.sent_bytes
    return {"step_s": report.duration_s, "compute_s": report.compute_s, "loss": report.loss, "sent_bytes": sent}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
