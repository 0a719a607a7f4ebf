"""The same job in one process, undisturbed: what a run on a cluster, with losses and joins, is compared with.

Run as `python -m shoal_workers.reference` with the job as JSON on standard input; prints `{"losses": [...]}`.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from shoal_planner.job import parse_job
from shoal_workers.solo import run_solo


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    job = parse_job(json.load(sys.stdin))
    json.dump({"losses": run_solo(job, job.train.steps).losses}, sys.stdout)


if __name__ == "__main__":
    main()
