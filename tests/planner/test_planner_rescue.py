"""Jobs that no plan fits as it is: state on hosts, or shared out by free memory, makes room."""

from __future__ import annotations

import dataclasses
from typing import Any

import campaign
import numpy as np
import pytest
import recount
from random_clusters import draw_any

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.dividing import divide
from shoal_planner.errors import HostTooSmall, NoPlanFits
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.lending import lent
from shoal_planner.loads import replica_loads, segments
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.profile import Profile
from shoal_planner.relief import eased, relieved, shared_by_room
from shoal_planner.score import score, score_with
from shoal_planner.search import plan

MODELS = {
    "llama-1b": {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 5504},
    "llama-7b": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008},
    "llama-13b": {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824},
}


def make_job(model: str, *, batch: int = 32, seq_len: int = 1024, **train: Any) -> JobSpec:
    return parse_job(
        {
            "name": model,
            "model": {**MODELS[model], "vocab": 32000, "tie_embeddings": False},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": batch, "seq_len": seq_len, "steps": 1, "precision": "bf16", **train},
        }
    )


def make_cluster(*nodes: tuple[str, int, int], host_memory_gib: float = 256) -> ClusterSnapshot:
    """Nodes as (device type, how many of them, devices of each)."""
    return parse_cluster(
        {
            "nodes": [
                {
                    "name": device.lower(),
                    "device": device,
                    "count": count,
                    "devices": devices,
                    "host_memory_gib": host_memory_gib,
                    "inter_gbit_per_s": 25,
                }
                for device, count, devices in nodes
            ]
        }
    )


def hosted(found: Plan) -> int:
    return sum(stage.offloaded() for pipeline in found.pipelines for stage in pipeline.stages)


REALISTIC = [
    ("llama-13b", make_cluster(("A10G", 8, 1))),
    ("llama-7b", make_cluster(("T4", 2, 4), host_memory_gib=384)),
    ("llama-13b", make_cluster(("A10G", 4, 1), ("T4", 6, 1))),
    ("llama-1b", make_cluster(("T4", 1, 1))),
]


@pytest.mark.parametrize(("model", "cluster"), REALISTIC, ids=["13b-a10g", "7b-t4", "13b-mixed", "1b-t4"])
def test_what_does_not_fit_on_devices_alone_fits_with_hosts(model: str, cluster: ClusterSnapshot) -> None:
    job = make_job(model)
    found = plan(job, cluster).plan
    assert hosted(found) > 0
    assert score(found, job, cluster) == found
    assert "on the host" in plan(job, cluster).candidates[0][0]
    assert found.prediction is not None
    used = recount.device_bytes(found, job, cluster)
    assert dict(found.prediction.memory_bytes) == pytest.approx(used, rel=1e-6)
    assert all(size <= recount.room_bytes(cluster, device.rsplit(":")[0]) for device, size in used.items())
    for node_id, kept in recount.host_bytes(found, job, cluster).items():
        assert kept <= cluster.node(node_id).host_memory_bytes


def test_a_job_that_wants_its_state_whole_gets_none_of_it_on_hosts() -> None:
    cluster = REALISTIC[1][1]
    with pytest.raises(NoPlanFits, match=r"needs .* GiB on t4-\d, which has 15"):
        plan(make_job("llama-7b", sharding="none"), cluster)


def with_copies(job: JobSpec, copies: int) -> JobSpec:
    return dataclasses.replace(job, checkpoint=dataclasses.replace(job.checkpoint, copies=copies))


def test_hosts_must_have_room_for_what_they_take() -> None:
    """Snapshots of 75 GiB on each host, and 23 more for what devices cannot hold; half of the snapshots are copies."""
    job = make_job("llama-7b")

    def on(host_memory_gib: float) -> ClusterSnapshot:
        return make_cluster(("T4", 8, 1), host_memory_gib=host_memory_gib)

    lack = r"needs .* GiB on the host of t4-\d for snapshots and optimizer state, which has "
    with pytest.raises(HostTooSmall, match=lack + "80"):
        plan(with_copies(job, 1), on(80))
    assert plan(with_copies(job, 1), on(100)).plan.copies == 1
    without = plan(job, on(80)).plan
    assert without.copies == 0 and "Its state has no copies on other nodes" in without.reason
    with pytest.raises(HostTooSmall, match=lack + "45"):
        plan(with_copies(job, 0), on(45))


# Two pipelines of which one has a large device: even shares of the optimizer's state are too much for the small one.
PAIR = make_cluster(("A100-80G", 1, 1), ("L4", 1, 1), host_memory_gib=512)


def pair() -> Plan:
    def alone(node: str, times: int) -> Pipeline:
        return Pipeline(
            micro_batch=1,
            micro_batches=times,
            stages=(Stage(layers=((0, 24),), replicas=(Replica(node=node, devices=(0,)),)),),
        )

    return Plan(pipelines=(alone("a100-80g-0", 26), alone("l4-0", 6)), copies=0)


def test_state_goes_where_memory_is_free() -> None:
    job = make_job("llama-1b")
    costs = CostModel(job, PAIR, Profile())
    even, uneven = pair(), shared_by_room(pair(), costs)
    large, small = replica_loads(uneven, costs, segments(uneven, costs))
    assert large.owned > 5 * small.owned
    assert large.owned + small.owned == pytest.approx(
        sum(x.owned for x in replica_loads(even, costs, segments(even, costs)))
    )
    spare = [recount.room_bytes(PAIR, load.replica.node) - load.memory.total for load in (large, small)]
    assert min(spare) > 0
    assert score_with(uneven, costs).prediction is not None


def test_the_same_devices_get_layers_and_mixes_anew() -> None:
    job = make_job("llama-13b")
    cluster = make_cluster(("A10G", 8, 1))
    costs = CostModel(job, cluster, Profile())
    bounds = [0, 2, 7, 12, 17, 22, 27, 32, 40]
    stages = tuple(
        Stage(layers=((bounds[s], bounds[s + 1]),), replicas=(Replica(node=f"a10g-{s}", devices=(0,)),))
        for s in range(8)
    )
    given = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=32, stages=stages),), copies=0)
    with pytest.raises(NoPlanFits):
        score_with(given, costs)
    assert relieved(given, costs, offload=False) is None, "the state alone is more than all devices have"
    made = relieved(given, costs, offload=True)
    assert made is not None
    assert score_with(made, costs).prediction is not None
    assert made.plan_id in {other.plan_id for other in eased(given, costs, lambda _: True)}
    assert [stage.replicas for stage in made.pipelines[0].stages] == [stage.replicas for stage in stages]


def test_layers_are_divided_for_the_slowest_stage_and_the_sum() -> None:
    inf = np.inf
    times = np.array([[0, 1, 2, 3, inf], [0, 2, 4, 6, 8.0]])

    def layers(least: list[int], number: int) -> list[int]:
        found = divide(times, np.array(least), 4, number)
        assert found is not None
        return [int(count) for count in found]

    assert layers([0, 0], 1) == [3, 1]
    assert layers([0, 0], 100) == [3, 1]
    assert layers([0, 2], 1) == [2, 2]
    assert divide(times[:1], np.array([0]), 4, 1) is None


def judged(seeds: range, **options: int) -> None:
    tallies = campaign.run("tight", seeds, **options)
    assert not any(tally.failures for tally in tallies), campaign.summary("tight", tallies)


def test_plans_for_little_memory_keep_within_it_on_a_sample() -> None:
    judged(range(6), processes=1, most_devices=8)


def test_an_idle_device_holds_state_that_neither_device_nor_host_has_room_for() -> None:
    """One layer and one sample: there is one pipeline, and nothing to divide but the state."""
    job = parse_job(
        {
            "name": "one layer",
            "model": {"layers": 1, "hidden": 8192, "heads": 1, "ffn": 28672, "vocab": 256, "tie_embeddings": False},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": 1, "seq_len": 128, "steps": 1, "precision": "bf16"},
            "checkpoint": {"copies": 0},
        }
    )
    alone, two = (make_cluster(("A10G", count, 1), host_memory_gib=47) for count in (1, 2))
    with pytest.raises(NoPlanFits):
        plan(job, alone)
    result = plan(job, two)
    found = result.plan
    assert any("A10G for state" in text for text, _ in result.candidates)
    assert sorted(replica.samples for replica in found.replicas()) == [0, 1]
    assert hosted(found) == 0
    used = recount.device_bytes(found, job, two)
    assert all(size <= recount.room_bytes(two, device.rsplit(":")[0]) for device, size in used.items())
    costs = CostModel(job, two, Profile())
    stage = Stage(layers=((0, 1),), replicas=(Replica(node="a10g-0", devices=(0,)),))
    single = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(stage,)),), copies=0)
    helped = lent(single, costs)
    assert helped is not None and score_with(helped, costs).prediction is not None
    assert [replica.samples for replica in helped.replicas()] == [1, 0]
    assert lent(single, CostModel(job, alone, Profile())) is None


@pytest.mark.long
def test_plans_that_recompute_much_are_divided_anew_though_they_fit() -> None:
    """Even where much else is tried, as the best may be far from what devices could do."""
    instance = draw_any(20037, 64)
    found = plan(instance.job, instance.cluster, Profile(), time_limit_s=600).plan
    assert found.prediction is not None
    assert found.prediction.step_s < 0.2, "0.226 s without"
