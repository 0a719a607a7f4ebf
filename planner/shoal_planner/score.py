"""What our model says of any plan, ours or not: its prediction, or why it cannot run here."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from shoal_planner.circles import with_device_groups
from shoal_planner.cluster import GIB, ClusterSnapshot
from shoal_planner.costs import CostModel
from shoal_planner.errors import HostTooSmall, InvalidField, NoPlanFits
from shoal_planner.holding import state_held
from shoal_planner.job import JobSpec
from shoal_planner.loads import ReplicaLoad, replica_loads, segments
from shoal_planner.memory import GENERATIONS, snapshot_bytes, usable_bytes
from shoal_planner.plan import Plan, Replica, check_plan
from shoal_planner.predict import predict_loads
from shoal_planner.profile import Profile
from shoal_planner.slices import check_slices

MIB = 1024**2


def score(plan: Plan, job: JobSpec, snapshot: ClusterSnapshot, profile: Profile | None = None) -> Plan:
    """The plan with its prediction. Raises InvalidField if it is not one of this job and cluster, and NoPlanFits if it
    needs more memory than a device or a host has."""
    scored = score_with(plan, CostModel(job, snapshot, profile or Profile()))
    return with_device_groups(scored, snapshot)


def by_step(plan: Plan) -> tuple[float, str]:
    """To sort scored plans, the fastest first, equal ones always in the same order."""
    return step_s(plan), plan.plan_id


def step_s(plan: Plan) -> float:
    """Predicted seconds of a step of a plan that was scored."""
    assert plan.prediction is not None
    return plan.prediction.step_s


def score_with(plan: Plan, costs: CostModel) -> Plan:
    """As `score`, with a cost model that has computed much of it before."""
    check_plan(plan, costs.job)
    check_slices(plan, costs.job.model)
    _check_cluster(plan, costs)
    parts = segments(plan, costs)
    loads = replica_loads(plan, costs, parts)
    check_memory(plan, costs, loads)
    predicted = predict_loads(plan, costs, parts, loads)
    return dataclasses.replace(plan, prediction=predicted, unused=unused(plan, costs.snapshot))


def check_memory(plan: Plan, costs: CostModel, loads: tuple[ReplicaLoad, ...]) -> None:
    """Raises NoPlanFits, naming the device or host that lacks most."""
    _check_devices(loads, costs)
    _check_hosts(plan, loads, costs)


def unused(plan: Plan, snapshot: ClusterSnapshot) -> tuple[str, ...]:
    used = {(replica.node, index) for replica in plan.replicas() for index in replica.devices}
    every = ((node.id, index) for node in snapshot.nodes for index in range(node.devices))
    return tuple(f"{node_id}:{index}" for node_id, index in every if (node_id, index) not in used)


def sizes(need_bytes: float, have_bytes: float) -> tuple[str, str]:
    """Both in one unit that suits them: "41.2 GiB" and "16"."""
    unit, name = (GIB, "GiB") if have_bytes >= GIB or not have_bytes else (MIB, "MiB")
    return f"{need_bytes / unit:.1f} {name}", f"{have_bytes / unit:.1f}".removesuffix(".0")


def _check_cluster(plan: Plan, costs: CostModel) -> None:
    limits = costs.job.limits
    check_nodes(plan, costs)
    if plan.num_devices < limits.min_devices:
        problem = f"uses fewer devices than limits.min_devices ({limits.min_devices})"
        raise InvalidField("pipelines", plan.num_devices, problem)
    if plan.copies >= len(costs.snapshot.nodes):
        problem = f"each copy needs another node, and the cluster has {len(costs.snapshot.nodes)}"
        raise InvalidField("copies", plan.copies, problem)


def check_nodes(plan: Plan, costs: CostModel) -> None:
    """Whether the cluster has the plan's devices, and the job allows them. Raises InvalidField."""
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for r, replica in enumerate(stage.replicas):
                _check_replica(replica, costs, (p, s, r))


def _check_replica(replica: Replica, costs: CostModel, place: tuple[int, int, int]) -> None:
    def refusal(field: str, value: object, problem: str) -> InvalidField:
        return InvalidField("pipelines[{}].stages[{}].replicas[{}].".format(*place) + field, value, problem)

    allowed = costs.job.limits.device_types
    try:
        node = costs.node(replica.node)
    except KeyError as error:
        raise refusal("node", replica.node, "is not a node of this cluster") from error
    if min(replica.devices) < 0 or max(replica.devices) >= node.devices:
        raise refusal("devices", list(replica.devices), f"node {node.id} has devices 0 to {node.devices - 1}")
    if allowed and node.device not in allowed:
        raise refusal("node", replica.node, f"has {node.device}; limits.device_types allows {', '.join(allowed)}")


def _check_devices(loads: tuple[ReplicaLoad, ...], costs: CostModel) -> None:
    def excess(load: ReplicaLoad) -> float:
        return load.memory.total - usable_bytes(costs.device(load.replica.node))

    worst = max(loads, key=excess)
    if excess(worst) > 0:
        have_bytes = costs.device(worst.replica.node).memory_bytes
        need, have = sizes(have_bytes + excess(worst), have_bytes)
        raise NoPlanFits(f"needs {need} on {worst.replica.node}, which has {have}")


def _check_hosts(plan: Plan, loads: tuple[ReplicaLoad, ...], costs: CostModel) -> None:
    need = host_bytes(plan, loads, costs)

    def excess(node_id: str) -> float:
        return need[node_id] - costs.node(node_id).host_memory_bytes

    worst = max(need, key=excess)
    if excess(worst) > 0:
        hosted = any(load.replica.node == worst and load.offloaded for load in loads)
        what = "snapshots and optimizer state" if hosted else "snapshots"
        need_text, have_text = sizes(need[worst], costs.node(worst).host_memory_bytes)
        raise HostTooSmall(f"needs {need_text} on the host of {worst} for {what}, which has {have_text}")


def host_bytes(plan: Plan, loads: tuple[ReplicaLoad, ...], costs: CostModel) -> dict[str, float]:
    """What a plan needs of each node's own memory: snapshots, and optimizer state that lives there."""
    need = {node_id: snapshot_bytes(kept) for node_id, kept in kept_elements(plan, loads, costs).items()}
    for load in loads:
        need[load.replica.node] += GENERATIONS * load.replica.tp * load.hosted_bytes
    return need


def kept_elements(plan: Plan, loads: tuple[ReplicaLoad, ...], costs: CostModel) -> dict[str, float]:
    """Elements of optimizer state of which each node's agent keeps snapshots: its own ranks', and what the nodes own
    whose backup it is. A node that runs nothing may be a backup too. Where each holder has all of the optimizer state,
    they share its snapshots out as they would share the state."""
    owned: dict[str, float] = defaultdict(float)
    if plan.sharding.optimizer != "cluster":
        owned.update(state_held(plan, costs.job))
    for load in loads if not owned else ():
        owned[load.replica.node] += load.owned * load.replica.tp
    kept = defaultdict(float, owned)
    for node_id, others in costs.backups(plan.copies).items():
        for other in others:
            kept[other] += owned.get(node_id, 0.0)
    return dict(kept)
