"""What plan() finds: asymmetric plans, within every limit, and clear words where none fits."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_ground import make_cluster, make_job

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.memory import usable_bytes
from shoal_planner.plan import Pipeline, Plan, Replica, Stage, check_plan
from shoal_planner.profile import LinkFigure, Profile
from shoal_planner.schedule import programs, prove
from shoal_planner.score import score
from shoal_planner.search import plan, step_s

EMBEDDED = make_cluster(
    ("big", "cpu-2t", 1, 1), ("small", "cpu-1t", 4, 1), memory_mib={"cpu-2t": 512, "cpu-1t": 90}, host_memory_gib=2
)


def undivided(job: JobSpec) -> JobSpec:
    """Its state stays whole, and where the layers are."""
    return dataclasses.replace(job, train=dataclasses.replace(job.train, sharding="none"))


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


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSnapshot:
    kinds = ["cpu-1t", "cpu-2t", "T4"]
    nodes = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(1, 2)), min_size=1, max_size=3))
    return make_cluster(
        *((f"n{index}", device, 1, devices) for index, (device, devices) in enumerate(nodes)),
        memory_mib={kind: draw(st.sampled_from([20, 40, 90, 300])) for kind in kinds[:2]},
        host_memory_gib=draw(st.sampled_from([0.1, 1])),
        inter_gbit_per_s=draw(st.sampled_from([0.1, 10])),
    )


@settings(deadline=None, max_examples=20)
@given(
    cluster=clusters(),
    layers=st.integers(1, 6),
    batch=st.integers(1, 9),
    tie=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
)
def test_every_plan_found_holds_what_it_must(
    cluster: ClusterSnapshot, layers: int, batch: int, tie: bool, precision: str
) -> None:
    job = make_job(layers=layers, batch=batch, tie=tie, precision=precision)
    try:
        result = plan(job, cluster, clock=lambda: 0.0)  # exact however busy the machine is
    except NoPlanFits as error:
        assert len(str(error)) > 20
        return
    checked(result.plan, job, cluster)
    assert not result.truncated
    assert result.candidates[0][1] <= step_s(result.plan) * 1.0001


# --- the embedded cluster --------------------------------------------------------------------------------------------


def test_the_embedded_cluster_gets_an_asymmetric_plan() -> None:
    job = undivided(make_job())
    result = plan(job, EMBEDDED)
    depths = sorted(len(pipeline.stages) for pipeline in result.plan.pipelines)
    assert depths == [1, 4]
    assert result.plan.copies == 1
    assert len({pipeline.samples for pipeline in result.plan.pipelines}) > 1
    checked(result.plan, job, EMBEDDED)
    assert "cpu-1t cannot hold the whole model alone" in result.plan.reason
    assert result.plan.plan_id in {found.plan_id for found in result.finalists}
    assert [step_s(found) for found in result.finalists] == [seconds for _, seconds in result.candidates]


@pytest.mark.parametrize("lost", [node.id for node in EMBEDDED.nodes])
def test_after_the_loss_of_any_node_a_plan_remains(lost: str) -> None:
    job = make_job()
    before = plan(job, EMBEDDED).plan
    rest = EMBEDDED.without([lost])
    after = plan(job, rest, previous=before)
    checked(after.plan, job, rest)
    assert all(ref.node != lost for ref in after.plan.devices())


def test_the_same_arguments_give_the_same_plan() -> None:
    first, second = (plan(make_job(), EMBEDDED, seed=3, clock=lambda: 0.0).plan for _ in range(2))
    assert first == second


def test_of_equally_fast_plans_the_one_that_runs_is_kept() -> None:
    job = undivided(make_job())
    first = plan(job, EMBEDDED)
    assert plan(job, EMBEDDED, previous=first.plan).plan.plan_id == first.plan.plan_id
    # Another order of equal nodes costs the same; what the nodes already hold decides.
    turned = {"small-0": "small-3", "small-3": "small-0"}
    previous = Plan(
        pipelines=tuple(
            Pipeline(
                micro_batch=pipeline.micro_batch,
                micro_batches=pipeline.micro_batches,
                stages=tuple(
                    Stage(
                        layers=stage.layers,
                        replicas=tuple(
                            Replica(
                                node=turned.get(replica.node, replica.node),
                                devices=replica.devices,
                                samples=replica.samples,
                            )
                            for replica in stage.replicas
                        ),
                    )
                    for stage in pipeline.stages
                ),
            )
            for pipeline in first.plan.pipelines
        )
    )
    assert previous.plan_id != first.plan.plan_id
    assert plan(job, EMBEDDED, previous=previous).plan.plan_id == previous.plan_id


def test_layers_are_recomputed_where_they_do_not_fit_otherwise() -> None:
    job = make_job(layers=8, batch=4, hidden=1024, seq_len=4096, precision="bf16", copies=0)
    cluster = make_cluster(("n", "L4", 1, 2), memory_mib={"L4": 2800})
    found = plan(job, cluster).plan
    stages = [stage for pipeline in found.pipelines for stage in pipeline.stages]
    assert any(stage.recomputed()["none"] < stage.num_layers for stage in stages)
    assert score(found, job, cluster).prediction == found.prediction


def test_nodes_with_measured_links_are_told_apart() -> None:
    slow = tuple(
        LinkFigure(from_node="small-0", to_node=other, latency_s=0.5, bytes_per_s=1e6, source="measured")
        for other in ("small-1", "small-2", "small-3", "big-0")
    )
    job = make_job()
    result = plan(job, EMBEDDED, Profile(links=slow))
    checked(result.plan, job, EMBEDDED, Profile(links=slow))
    assert "small-0:0" in result.plan.unused
    assert "stay unused: every plan tried" in result.plan.reason


# --- limits ----------------------------------------------------------------------------------------------------------


def test_device_types_and_least_devices_are_kept() -> None:
    job = make_job(limits={"device_types": ["cpu-1t"], "min_devices": 3})
    found = plan(job, EMBEDDED).plan
    assert "big-0:0" in found.unused
    assert len(found.devices()) >= 3
    assert "limits.device_types leaves them out" in found.reason


@pytest.mark.parametrize(
    ("job", "cluster", "message"),
    [
        (make_job(hidden=1024), EMBEDDED, r"needs \d+\.\d (MiB|GiB) on \S+, which has \d+"),
        (make_job(limits={"device_types": ["A100-80G"]}), EMBEDDED, "limits.device_types allows A100-80G; the cluster"),
        (make_job(limits={"min_devices": 9}), EMBEDDED, "limits.min_devices is 9; the cluster has 5 devices"),
        (make_job(), EMBEDDED.without([node.id for node in EMBEDDED.nodes]), "the cluster has no nodes"),
        (make_job(copies=5), EMBEDDED, "checkpoint.copies = 5 needs 6 nodes, and the cluster has 5"),
        (
            make_job(),
            parse_cluster(
                {
                    "nodes": [
                        {"name": "a", "device": "cpu-2t", "host_memory_gib": 0.1},
                        {"name": "b", "device": "cpu-1t", "host_memory_gib": 9},
                    ],
                    "devices": {"cpu-1t": {"memory_gib": 0.003}},
                }
            ),
            "on the host of a-0 for snapshots, which has 102.4",
        ),
        (
            make_job(layers=64, heads=2),
            make_cluster(("a", "cpu-2t", 2, 1), memory_mib={}, host_memory_gib=0.1),
            "snapshots of the model need",
        ),
        (
            undivided(make_job(layers=7)),
            make_cluster(
                ("a", "cpu-2t", 1, 1), ("b", "cpu-1t", 1, 1), memory_mib={"cpu-2t": 90, "cpu-1t": 3}, host_memory_gib=9
            ),
            "needs .* on b-0, which has 3",
        ),
        (
            make_job(layers=2, vocab=60000),
            make_cluster(("a", "cpu-2t", 2, 1), memory_mib={"cpu-2t": 128}, host_memory_gib=9),
            "the head alone needs .* on a-0, which has 128",
        ),
        (
            make_job(layers=2, vocab=20000, hidden=64, tie=False),
            make_cluster(("a", "cpu-2t", 1, 1), ("b", "cpu-1t", 1, 1), memory_mib={"cpu-2t": 74, "cpu-1t": 4}),
            "every device could hold an even share of the layers, but",
        ),
    ],
    ids=["memory", "types", "devices", "empty", "copies", "host", "all hosts", "small device", "head", "ends"],
)
def test_what_does_not_fit_is_named(job: JobSpec, cluster: ClusterSnapshot, message: str) -> None:
    with pytest.raises(NoPlanFits, match=message):
        plan(job, cluster)


def test_copies_follow_the_number_of_nodes() -> None:
    one = make_cluster(("a", "cpu-2t", 1, 1), memory_mib={})
    assert plan(make_job(), one).plan.copies == 0
    assert plan(make_job(copies=2), EMBEDDED).plan.copies == 2


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(InvalidField, match="did you mean 'A100-80G'"):
        plan(make_job(), make_cluster(("a", "A100-80", 1, 1), memory_mib={}))


def test_tensor_parallelism_divides_heads() -> None:
    fast = make_cluster(("a", "T4", 1, 3), memory_mib={"T4": 1500}, intra_gb_per_s=300)
    found = plan(make_job(heads=8, batch=1, hidden=1024, precision="bf16"), fast).plan
    assert all(place.tp in (1, 2, 4) for place in found.places())
