"""Plans on clusters of many devices."""

from __future__ import annotations

import itertools
import math

import pytest
from planner_ground import make_cluster, make_job

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.memory import usable_bytes
from shoal_planner.node_kinds import told_apart
from shoal_planner.options import group_kinds
from shoal_planner.plan import Pipeline, Plan, Replica, Stage, check_plan
from shoal_planner.profile import LinkFigure, Profile
from shoal_planner.rounds import Lead, rounds
from shoal_planner.schedule import programs, prove
from shoal_planner.score import score
from shoal_planner.search import plan, step_s

_MANY_NODES = (("a", "A100-80G", 26), ("h", "H100-80G", 17))


def checked(found: Plan, job: JobSpec, cluster: ClusterSnapshot, profile: Profile | None = None) -> None:
    """All that must hold of any plan."""
    check_plan(found, job)
    prove(programs(found, job.model))
    again = score(found, job, cluster, profile)
    assert again.prediction == found.prediction
    assert found.prediction is not None
    costs = CostModel(job, cluster, profile or Profile())
    for name, used in found.prediction.memory_bytes:
        assert used <= usable_bytes(costs.device(name.rsplit(":", 1)[0]))
    terms = found.prediction.terms
    total = sum(getattr(terms, name) for name in terms.__dataclass_fields__)
    assert math.isclose(total, found.prediction.step_s, rel_tol=1e-9)
    assert min(getattr(terms, name) for name in terms.__dataclass_fields__) >= 0
    assert found.reason.endswith(".")


# --- large clusters --------------------------------------------------------------------------------------------------

LARGE = parse_cluster(
    {
        "nodes": [
            {
                "name": "a",
                "device": "A100-80G",
                "host_memory_gib": 512,
                "devices": 8,
                "count": 3,
                "intra_gb_per_s": 300,
                "inter_gbit_per_s": 100,
            },
            {
                "name": "l",
                "device": "L40S",
                "host_memory_gib": 512,
                "devices": 8,
                "count": 3,
                "intra_gb_per_s": 20,
                "inter_gbit_per_s": 50,
            },
            {
                "name": "t",
                "device": "T4",
                "host_memory_gib": 512,
                "devices": 4,
                "count": 4,
                "intra_gb_per_s": 12,
                "inter_gbit_per_s": 25,
            },
        ]
    }
)


def large_job(batch: int = 128) -> JobSpec:
    return make_job(layers=32, batch=batch, heads=32, hidden=4096, seq_len=1024, precision="bf16", tie=False)


def test_sixty_four_devices_of_three_types_are_planned() -> None:
    job = large_job()
    result = plan(job, LARGE, clock=lambda: 0.0)
    assert LARGE.num_devices == 64
    checked(result.plan, job, LARGE)
    assert not result.truncated
    assert step_s(result.plan) < step_s(score(plan_by_hand(), job, LARGE))


def plan_by_hand() -> Plan:
    """What one would write down at once: the fastest nodes alone, each a pipeline of equal stages."""
    pipelines = []
    for number, micro_batches in enumerate((43, 43, 42)):
        stages = tuple(
            Stage(layers=((4 * index, 4 * index + 4),), replicas=(Replica(node=f"a-{number}", devices=(index,)),))
            for index in range(8)
        )
        pipelines.append(Pipeline(micro_batch=1, micro_batches=micro_batches, stages=stages))
    return Plan(pipelines=tuple(pipelines))


MEDIUM = make_cluster(
    ("a", "cpu-2t", 4, 1), ("b", "cpu-1t", 4, 1), memory_mib={"cpu-2t": 120, "cpu-1t": 60}, host_memory_gib=2
)


def test_a_large_search_keeps_every_rule() -> None:
    job = make_job(batch=24)
    result = plan(job, MEDIUM, seed=1, clock=lambda: 0.0)
    checked(result.plan, job, MEDIUM)
    assert plan(job, MEDIUM, seed=1, clock=lambda: 0.0).plan == result.plan


def test_a_large_search_leaves_out_what_slows_it_down() -> None:
    """Two nodes behind a line so slow that they cost more than they bring."""
    slow = parse_cluster(
        {
            "nodes": [
                {"name": "a", "device": "cpu-1t", "count": 5, "inter_gbit_per_s": 10},
                {"name": "z", "device": "cpu-1t", "count": 2, "inter_gbit_per_s": 0.005},
            ]
        }
    )
    job = make_job(batch=20)
    found = plan(job, slow, clock=lambda: 0.0)
    checked(found.plan, job, slow)
    assert found.plan.unused == ("z-0:0", "z-1:0")


@pytest.mark.long
def test_a_large_search_tells_measured_nodes_apart() -> None:
    measured = tuple(
        LinkFigure(from_node=here.id, to_node=there.id, latency_s=1e-4, bytes_per_s=rate, source="measured")
        for here, there in itertools.combinations(MEDIUM.nodes, 2)
        for rate in ([1e4] if "b-3" in (here.id, there.id) else [1e9])
    )
    found = plan(make_job(batch=24), MEDIUM, Profile(links=measured), clock=lambda: 0.0).plan
    checked(found, make_job(batch=24), MEDIUM, Profile(links=measured))
    assert "b-3:0" in found.unused


def test_a_large_cluster_without_room_is_told() -> None:
    with pytest.raises(NoPlanFits, match=r"needs .* on a-0, which has 120"):
        plan(make_job(hidden=1024), MEDIUM)


def figures(*rates: float, latency_s: float = 1e-4) -> Profile:
    return Profile(
        links=tuple(
            LinkFigure(
                from_node="a", to_node=f"n{i}", latency_s=latency_s * (i + 1), bytes_per_s=rate, source="measured"
            )
            for i, rate in enumerate(rates)
        )
    )


def test_noise_in_links_does_not_tell_nodes_apart() -> None:
    assert told_apart(Profile()) == frozenset()
    assert told_apart(figures(1.0, 1.9)) == frozenset()
    assert told_apart(figures(1.0, 2.1)) == {"a", "n0", "n1"}
    assert told_apart(figures(1.0, 1.0, 1.0, latency_s=1.0)) == {"a", "n0", "n1", "n2"}


def test_many_nodes_are_also_planned_as_groups_that_are_alike() -> None:
    """What one group runs, all run, each on its own nodes, and the few nodes that no group has do not matter."""
    cluster = parse_cluster(
        {"nodes": [{"name": name, "count": n, "device": device, "devices": 8} for name, device, n in _MANY_NODES]}
    )
    job = make_job(layers=24, batch=512, hidden=4096, seq_len=2048, precision="bf16")
    costs = CostModel(job, cluster, Profile())
    grouped = [this for this in rounds(group_kinds(cluster.nodes, costs), costs) if this.groups > 1]
    assert [(this.groups, [len(kind.nodes) for kind in this.kinds]) for this in grouped] == [(2, [13, 8])]
    lead = Lead(grouped[0], costs, 0)
    lead.scout()
    lead.explore()
    words = next(iter(lead.words(math.inf)))
    first = [word for word in words if {unit.node for unit in word} <= {n for k in lead.round.kinds for n in k.nodes}]
    assert len(words) == 2 * len(first)
    units = [(unit.node, index) for word in words for unit in word for index in unit.devices]
    assert len(units) == len(set(units)) <= 8 * 43
    shapes = [tuple((costs.kind(unit.node), unit.devices) for unit in word) for word in words]
    assert all(shapes.count(shape) % 2 == 0 for shape in shapes)
