"""What Shoal sets of a Ray Train script from outside, in the process that the script runs in: how many workers its
trainers have, where they store what they report, who decides about failures and sizes, and who hears of reports.

Owns the settings and where they take hold; `train_policy` is what then runs beside Ray Train's controller. The script
is not changed: its trainers are given other arguments than it gave them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOrder:
    """For the trainers of one start of a script. `storage` is the URI under which each has a folder of its own,
    `resources` what each worker takes of a node."""

    job: str
    attempt: int
    storage: str
    keep: int | None
    min_workers: int
    max_workers: int
    resources: dict[str, float]


def install(order: TrainerOrder, raylet: str) -> None:
    """Before the script is run."""
    _attach_to(raylet)
    from ray.train.v2.api import data_parallel_trainer as trainers
    from ray.train.v2.api.callback import RayTrainCallback

    from shoal_workers.train_policy import failure_policy, scaling_policy

    trainers.create_failure_policy = functools.partial(failure_policy, order.job, order.attempt)
    trainers.create_scaling_policy = functools.partial(scaling_policy, order.job, order.attempt)
    # The workers of a script end with the script, which is a job of Ray's: nobody has to watch over what they reserve,
    # and whoever did would outlive it where Ray has no dashboard to ask.
    trainers.PlacementGroupCleanerCallback = RayTrainCallback
    adjust = _Adjusting(order)
    base: Any = trainers.DataParallelTrainer
    for kind in (base, *_subclasses(base)):
        adjust.wrap(kind)
    base.__init_subclass__ = classmethod(adjust.wrap)


def _attach_to(raylet: str) -> None:
    """To the raylet that started this process, whatever else runs on the machine; and on the cluster that is there,
    which is not the script's to size."""
    from ray._private import services

    services.find_node_ids = lambda: {raylet}
    ray.init = _attached(ray.init)


def _attached(init: Any) -> Any:
    @functools.wraps(init)
    def attach(*args: Any, **given: Any) -> Any:
        sizes = ("num_cpus", "num_gpus", "resources", "object_store_memory", "labels", "include_dashboard")
        kept = {name: value for name, value in given.items() if name not in (*sizes, "address")}
        return init(**kept)

    return attach


class _Adjusting:
    """Changes what trainers are made with, whatever class they are of, before any constructor of theirs looks at it."""

    def __init__(self, order: TrainerOrder) -> None:
        self._order = order
        self._numbers = itertools.count(1)

    def wrap(self, kind: Any) -> None:
        """Also a subclass that the script defines itself."""
        if "__init__" not in vars(kind):
            return
        init = kind.__init__

        @functools.wraps(init)
        def adjusted(trainer: Any, *args: Any, **given: Any) -> None:
            if not hasattr(trainer, "_adjusted_by_shoal"):
                trainer._adjusted_by_shoal = True
                given |= self._changed(given)
            init(trainer, *args, **given)

        kind.__init__ = adjusted

    def _changed(self, given: dict[str, Any]) -> dict[str, Any]:
        from ray.train import RunConfig, ScalingConfig

        from shoal_workers.train_policy import Reporter

        order, number, said = self._order, next(self._numbers), dict[str, str]()
        scaling = scaling_of(given.get("scaling_config") or ScalingConfig(), order, said)
        running = run_of(given.get("run_config") or RunConfig(), order, number, said)
        reporter = Reporter(order.job, order.attempt, number, running.storage_path)
        running.callbacks = [*running.callbacks, reporter]
        if not ray.is_initialized():
            ray.init()
        reporter.link.call("trainer_adjusted", order.attempt, number, said)
        return {"scaling_config": scaling, "run_config": running}


def _subclasses(kind: Any) -> list[Any]:
    return [each for child in kind.__subclasses__() for each in (child, *_subclasses(child))]


def scaling_of(scaling: Any, order: TrainerOrder, said: dict[str, str]) -> Any:
    """The script's ScalingConfig with the job's workers; what is another now goes into `said`."""
    from ray.train import ScalingConfig

    fields = {name: getattr(scaling, name) for name in scaling.__dataclass_fields__}
    both = (order.min_workers, order.max_workers)
    said["num_workers"] = f"{both[0]} to {both[1]} (the script said {scaling.num_workers})"
    said["resources_per_worker"] = f"{order.resources} (the script said {_resources(scaling)})"
    use_gpu = order.resources.get("GPU", 0) > 0
    if use_gpu != bool(scaling.use_gpu):
        said["use_gpu"] = f"{use_gpu} (the script said {scaling.use_gpu})"
    fields |= {"num_workers": both, "use_gpu": use_gpu, "resources_per_worker": dict(order.resources)}
    return ScalingConfig(**fields)


def run_of(running: Any, order: TrainerOrder, number: int, said: dict[str, str]) -> Any:
    """The script's RunConfig with the job's storage, under a name that is the same when the script is started again:
    then Ray Train goes on from what stands there. The script's own is left as it is."""
    name = order.job if number == 1 else f"{order.job}-{number}"
    said["storage_path"] = f"{order.storage} (the script said {running.storage_path})"
    said["name"] = f"{name} (the script said {running.name})"
    changed = {"storage_path": order.storage, "storage_filesystem": None, "name": name}
    if order.keep is not None:
        said["checkpoint_config.num_to_keep"] = (
            f"{order.keep} (the script said {running.checkpoint_config.num_to_keep})"
        )
        changed["checkpoint_config"] = dataclasses.replace(running.checkpoint_config, num_to_keep=order.keep)
    said["failure_config"] = (
        f"workers lost with their nodes are always started again; errors of the script's own "
        f"{running.failure_config.max_failures} times, as the script said"
    )
    return dataclasses.replace(running, **changed)


def _resources(scaling: Any) -> str:
    return "nothing" if scaling.resources_per_worker is None else str(scaling.resources_per_worker)
