"""train.compile: the numbers of the uncompiled run, and a clear word where nothing can be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import job, part, plan, worst_difference

from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_workers.processes import Processes
from shoal_workers.solo import RunRequest, run_solo

STEPS = 20
BOUND = 1e-5


def compiling(spec: JobSpec) -> JobSpec:
    return replace(spec, train=replace(spec.train, compile=True))


def test_it_is_a_field_of_jobs() -> None:
    assert not job().train.compile
    mapping = job_to_mapping(compiling(job()))
    assert parse_job(mapping).train.compile
    mapping["train"]["compile"] = "yes"
    with pytest.raises(InvalidField, match=r"train\.compile"):
        parse_job(mapping)


@pytest.mark.filterwarnings("ignore")  # torch warns of what it does itself when it compiles
@pytest.mark.long  # half a minute of compilers
def test_a_compiled_run_has_the_numbers_of_an_uncompiled_one(processes: Processes) -> None:
    """In one process, and with tensor parallelism, stages and selective recomputation; and in evaluations."""
    spec = replace(job(), train=replace(job().train, eval_every=10, eval_batches=1))
    reference = run_solo(spec, STEPS)
    assert worst_difference(run_solo(compiling(spec), STEPS).weights, reference.weights) <= BOUND
    layout = plan((4, (part(2, (2, 2)), part(4, (1, 2)))))
    (pipeline,) = layout.pipelines
    stages = tuple(replace(stage, recompute="selective") for stage in pipeline.stages)
    layout = replace(layout, pipelines=(replace(pipeline, stages=stages),))
    run = processes.run(RunRequest(job=compiling(spec), plan=layout, until_step=STEPS))
    assert worst_difference(run.weights, reference.weights) <= BOUND


def test_a_node_without_a_compiler_says_so(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from shoal_workers.compiling import compiled\n"
        "from shoal_workers.model import _silu_gated\n"
        "compiled(_silu_gated)(torch.ones(4), torch.ones(4))\n"
    )
    environment = {**os.environ, "CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "train.compile = True: needs a compiler that works on every node" in last
    assert "/no/such/compiler" in last
