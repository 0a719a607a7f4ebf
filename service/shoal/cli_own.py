"""Models of a user's own, where something is planned without a cluster: they are looked at here, by a process with the
job's code around it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from urllib.parse import unquote, urlsplit

from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, job_to_mapping, parse_job
from shoal_planner.own_model import OwnShape, seen_model, with_seen_model
from shoal_planner.strict import read

_BAD_INPUT = 2


def seen_here(job: JobSpec) -> JobSpec:
    """With a model whose shape is known. Raises InvalidField where that cannot be found out from here."""
    if job.model.is_known:
        return job
    assert job.model.module is not None
    module, code = dataclasses.asdict(job.model.module), job.code
    order = {
        "module": module,
        "seed": job.train.seed,
        "seq_len": job.train.seq_len,
        "precision": job.train.precision,
        "paths": [_folder(uri) for uri in (code.working_dir, *code.py_modules) if uri is not None] or [os.getcwd()],
    }
    command = [sys.executable, "-m", "shoal_workers.own_looking"]
    held = {name: os.environ[held_as] for name, held_as in code.secrets.items() if held_as in os.environ}
    environment = {**os.environ, **code.env, **held}
    done = subprocess.run(
        command, input=json.dumps(order), capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = lines[-1] if lines else f"its process ended with exit status {done.returncode}"
        raise InvalidField("model.entrypoint", job.model.module.entrypoint, f"cannot be looked at here: {said}")
    model = seen_model(module, read(OwnShape, json.loads(done.stdout.splitlines()[-1])))
    return parse_job(with_seen_model(job_to_mapping(job), model, ()))


def _folder(uri: str) -> str:
    parts = urlsplit(uri)
    if parts.scheme != "file":
        problem = "is fetched by nodes: to plan from here give a folder, as in file:///folder"
        raise InvalidField("code.working_dir", uri, problem)
    path = unquote(parts.path)
    if not os.path.isdir(path):
        raise InvalidField("code.working_dir", uri, f"there is no folder {path} here")
    return path
