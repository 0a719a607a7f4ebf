"""What a rank of a job needs whatever the plan is: its data opened, and the modules of a user's own built.

Got ready before a rank takes part, for then all others wait: the data may have thousands of files, or be far away.
"""

from __future__ import annotations

import threading

from shoal_planner.job import JobSpec
from shoal_workers.blueprint import BareModules
from shoal_workers.data import Opened, samples_of
from shoal_workers.data_cache import DataCache
from shoal_workers.settings import WorkerSettings

_BUILD_S = 30.0  # of modules that are made one by one: the others are built when they are needed
_opening = threading.Lock()  # whoever comes second has what the first one opened


def open_samples(job: JobSpec, settings: WorkerSettings) -> Opened:
    """Raises what `samples_of` does."""
    with _opening:
        return samples_of(job, DataCache(settings.disk_dir / "data", settings.data_cache_bytes))


def prepare(job: JobSpec, settings: WorkerSettings) -> None:
    """Raises what is wrong with the data, or whatever a user's own code does."""
    open_samples(job, settings)
    if job.model.own_shape is not None:
        BareModules(job.model, job.train.seed).build_ahead(_BUILD_S)
