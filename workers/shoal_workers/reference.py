"""The same job in one process, undisturbed: what a run on a cluster, with losses and joins, is compared with.

Run as `python -m shoal_workers.reference` with the job as JSON on standard input; prints the losses and the
median seconds of a step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

import torch

from shoal_planner.job import parse_job
from shoal_workers.exchange import SoloExchange
from shoal_workers.solo import RunRequest, run_rank, solo_plan


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    job = parse_job(json.load(sys.stdin))
    run = run_rank(RunRequest(job=job, plan=solo_plan(job), until_step=job.train.steps), 0, SoloExchange())
    step_s = statistics.median(report.duration_s for report in run.reports)
    json.dump({"losses": run.losses, "step_s": step_s}, sys.stdout)


if __name__ == "__main__":
    main()
