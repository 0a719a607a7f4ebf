"""What runs beside Ray Train's controller, in its process: it asks the job's supervisor where workers may be and what
a failure was, and tells it what the script reports. Owns no decision and no state that outlives the controller.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import ray
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingDecision, ScalingPolicy
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from shoal_recovery.decide_script import size
from shoal_workers.cluster_ray import NAMESPACE
from shoal_workers.script_words import NODE_DIED, metrics_of

_ANSWER_S = 60.0
_AGAIN_S = 0.5
_PATIENCE_S = 600.0
_LOOK_S = 1.0


class Superseded(Exception):
    """The job has gone on without this run of its script, which ends itself."""


@dataclass(slots=True)
class Link:
    """To the supervisor of a job, which may be away for a while, and somebody else when it comes back."""

    job: str

    def call(self, what: str, *arguments: Any) -> Any:
        """Raises Superseded where the supervisor says so, or none comes back."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                supervisor = ray.get_actor(f"supervisor-{self.job}", namespace=NAMESPACE)
                answer = ray.get(supervisor.of_script.remote(what, *arguments), timeout=_ANSWER_S)
            except (ValueError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                if time.monotonic() > deadline_s:
                    raise Superseded(f"nobody supervises {self.job}") from error
                time.sleep(_AGAIN_S)
                continue
            if answer is None:
                raise Superseded(f"{self.job} goes on without this run of its script")
            return answer


def failure_policy(job: str, attempt: int, failure_config: Any) -> FailurePolicyOfJob:
    return FailurePolicyOfJob(job, attempt, failure_config)


def scaling_policy(job: str, attempt: int, scaling_config: Any) -> ScalingPolicyOfJob:
    return ScalingPolicyOfJob(job, attempt, scaling_config)


class FailurePolicyOfJob(DefaultFailurePolicy):
    """As Ray Train's own, but for workers that fail because a node of theirs was lost: that never counts."""

    def __init__(self, job: str, attempt: int, failure_config: Any) -> None:
        super().__init__(failure_config)
        self._link, self._attempt = Link(job), attempt

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """Workers that are only being started fail as errors of the controller."""
        judged = isinstance(training_failed_error, WorkerGroupError | ControllerError)
        if judged and (died_with_its_node(training_failed_error) or self._link.call("judge", self._attempt)["lost"]):
            return FailureDecision.RETRY
        return super().make_decision(training_failed_error)


class ScalingPolicyOfJob(ScalingPolicy):
    """As many workers as fit where the supervisor lets them be. Ray's autoscaler is asked for room for all of them."""

    def __init__(self, job: str, attempt: int, scaling_config: Any) -> None:
        super().__init__(scaling_config)
        self._link, self._attempt = Link(job), attempt
        self._considered_s = time.monotonic()

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.max_workers)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        fit = self._fit(self._places())
        if fit is None:
            time.sleep(_LOOK_S)
            return NoopDecision()
        return self._resize(fit)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        now_s = time.monotonic()
        since_s = now_s - max(self._considered_s, worker_group_state.start_time)
        if since_s < self.scaling_config.elastic_resize_monitor_interval_s:
            return NoopDecision()
        self._considered_s = now_s
        places = self._places()
        fit = self._fit(places)
        if fit is None or fit <= worker_group_state.num_workers or not places["grow"]:
            return NoopDecision()
        return self._resize(fit)

    def _places(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._link.call("places", self._attempt)
        return found

    def _fit(self, places: Mapping[str, Any]) -> int | None:
        return size(places["slots"], self.scaling_config.min_workers, self.scaling_config.max_workers)

    def _resize(self, count: int) -> ResizeDecision:
        return ResizeDecision(
            num_workers=count, resources_per_worker=self.scaling_config._resources_per_worker_not_none
        )


class Reporter(ControllerCallback, WorkerGroupCallback, ReportCallback):
    """Tells the supervisor of starts, reports, checkpoints and failures, and passes on which nodes workers leave."""

    def __init__(self, job: str, attempt: int, trainer: int, storage: str) -> None:
        self.link = Link(job)
        self._attempt, self._trainer, self._storage = attempt, trainer, storage
        self._epoch, self._count = 0, 0
        self._workers: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        self._leaving: PreemptionInfo | None = None
        self._looked_s = 0.0
        self._group: Any = None

    # --- where workers are ---

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str]:
        # Ray 2.60 forgets a group whose workers die as their function is launched: the others would run on, and all
        # nodes of the group stay reserved, with no room for the next one.
        if self._group is not None and self._group.has_started():
            self._group.shutdown()
        self._group = None
        slots = self.link.call("places", self._attempt)["slots"]
        return {"ray.io/node-id": f"in({','.join(sorted(slots))})"}

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group
        workers = worker_group.get_workers()
        self._workers = {worker.distributed_context.world_rank: worker.actor for worker in workers}
        self._nodes = {worker.distributed_context.world_rank: worker.metadata.node_id for worker in workers}
        self._leaving, self._count = None, 0
        stored, metrics = self._newest(worker_group)
        nodes = [self._nodes[rank] for rank in sorted(self._nodes)]
        told = (self._attempt, self._trainer, nodes, stored, metrics)
        self._epoch = self.link.call("workers_started", *told)["epoch"]

    def _newest(self, worker_group: Any) -> tuple[str | None, dict[str, Any]]:
        """Where the checkpoint stands that the workers may begin with, and what was reported with it."""
        managers = [each for each in worker_group._callbacks if isinstance(each, CheckpointManager)]
        newest = managers[0].latest_checkpoint_result if managers else None
        if newest is None or newest.checkpoint is None:
            return None, {}
        return self._uri(newest.checkpoint), metrics_of(newest.metrics)

    # --- what they say ---

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        self._count += 1
        uri, num_bytes = None, 0
        if training_report.checkpoint is not None:
            uri, num_bytes = self._uri(training_report.checkpoint), _num_bytes(training_report.checkpoint)
        figures = metrics_of(metrics[0] if metrics else {})
        self.link.call("reported", self._attempt, self._epoch, self._count, figures, uri, num_bytes)
        if uri is not None and self._leaving is not None:
            self._leave(self._leaving, left_s=0.0)  # what they have is stored: nothing is gained by staying

    def _uri(self, checkpoint: Any) -> str:
        run, folder = PurePosixPath(checkpoint.path).parts[-2:]
        return f"{self._storage.rstrip('/')}/{run}/{folder}"

    # --- what becomes of them ---

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        statuses = worker_group_status.worker_statuses.items()
        errors = [(rank, self._nodes.get(rank, ""), *_told(status.error)) for rank, status in statuses if status.error]
        if errors:
            self.link.call("workers_failed", self._attempt, self._epoch, errors)
        elif self._leaving is None and time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            leaving = self.link.call("places", self._attempt)["leaving"]
            mine = {node: left_s for node, left_s in leaving.items() if node in self._nodes.values()}
            if mine:
                ranks = {node: [rank for rank, on in self._nodes.items() if on == node] for node in mine}
                info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks=ranks)
                self._leave(info, left_s=min(mine.values()))

    def _leave(self, info: PreemptionInfo, left_s: float) -> None:
        """As if Ray itself had announced it: the script may ask for it, and the workers end when the time is over."""
        deadline_ms = int((time.time() + left_s) * 1000)
        self._leaving = PreemptionInfo(
            deadline_ms=deadline_ms, preempted_node_to_ranks=dict(info.preempted_node_to_ranks)
        )
        for worker in self._workers.values():
            worker.mark_preempt.remote(self._leaving)


def died_with_its_node(error: Any) -> bool:
    """Whether Ray itself says that a worker died with its node."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else (error.controller_failure,)
    causes = [getattr(failure, "health_check_failure", failure) for failure in failures]
    return any(isinstance(each, ray.exceptions.RayActorError) and NODE_DIED in str(each) for each in causes)


def _told(error: Any) -> tuple[str, str]:
    """What kind of failure it is, and its text: of the user's own, with its traceback."""
    if isinstance(error, UserExceptionWithTraceback):
        return "raised", str(error._traceback_str)
    return "died", str(error)


def _num_bytes(checkpoint: Any) -> int:
    from pyarrow.fs import FileSelector

    files = checkpoint.filesystem.get_file_info(FileSelector(checkpoint.path, recursive=True))
    return sum(file.size or 0 for file in files)
