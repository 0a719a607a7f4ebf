"""Predictions of given plans, and why some of them cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shoal_planner.cluster import parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.explain import describe, shape
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.loads import replica_loads, segments
from shoal_planner.plan import Plan, parse_plan, plan_to_mapping
from shoal_planner.profile import LayerTime, LinkFigure, Profile
from shoal_planner.score import score
from shoal_recovery.shard_map import shard_map

CLUSTER = parse_cluster(
    {
        "nodes": [
            {"name": "c", "device": "cpu-1t", "count": 3, "price_per_hour": 0.5, "host_memory_gib": 1},
            {"name": "g", "device": "T4", "devices": 2, "host_memory_gib": 1},
        ],
        "devices": {"cpu-1t": {"memory_gib": 0.25}},
    }
)


def make_job(batch: int = 4, layers: int = 4, **train: object) -> JobSpec:
    return parse_job(
        {
            "name": "score",
            "model": {"layers": layers, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": batch, "seq_len": 32, "steps": 1, **train},
        }
    )


def stage(first: int, last: int, *replicas: tuple[str, list[int], int]) -> dict[str, Any]:
    return {
        "layers": [[first, last]],
        "replicas": [
            {"node": node, "devices": devices, "tp": len(devices), "samples": samples}
            for node, devices, samples in replicas
        ],
    }


def make_plan(*pipelines: tuple[int, int, list[dict[str, Any]]], copies: int = 1) -> Plan:
    return parse_plan(
        {
            "copies": copies,
            "pipelines": [
                {"micro_batch": micro_batch, "micro_batches": micro_batches, "stages": stages}
                for micro_batch, micro_batches, stages in pipelines
            ],
        }
    )


def exact_profile(forward_s: float, links_s: float = 0.0) -> Profile:
    """Every block takes this long forward and twice backward; the ends take next to nothing, messages `links_s`."""
    common: dict[str, Any] = {
        "device": "cpu-1t",
        "tp": 1,
        "micro_batch": 1,
        "seq_len": 32,
        "hidden": 64,
        "source": "test",
    }
    parts: list[LayerTime] = [
        LayerTime(**common, forward_s=forward_s, backward_s=2 * forward_s, heads=4, kv_heads=2, ffn=128),
        LayerTime(**common, forward_s=1e-12, backward_s=1e-12, part="embedding", vocab=256),
        LayerTime(**common, forward_s=1e-12, backward_s=1e-12, part="head", vocab=256),
    ]
    links = tuple(
        LinkFigure(from_node=f"c-{i}", to_node=f"c-{j}", latency_s=links_s, bytes_per_s=1e18, source="test")
        for i in range(3)
        for j in range(3)
    )
    return Profile(layers=tuple(parts), links=links)


def test_a_balanced_pipeline_takes_what_theory_says() -> None:
    """(m + P - 1) times the stage's seconds: 1F1B with equal stages and no communication."""
    plan = make_plan((1, 4, [stage(0, 2, ("c-0", [0], 1)), stage(2, 4, ("c-1", [0], 1))]))
    scored = score(plan, make_job(), CLUSTER, exact_profile(0.1))
    assert scored.prediction is not None
    assert scored.prediction.step_s == pytest.approx((4 + 1) * 2 * 0.3, rel=1e-3)
    assert scored.prediction.terms.compute_s == pytest.approx(4 * 2 * 0.3, rel=1e-6)
    assert scored.prediction.terms.bubble_s == pytest.approx(2 * 0.3, rel=1e-2)
    assert scored.prediction.tokens_per_s == pytest.approx(4 * 32 / scored.prediction.step_s)
    assert scored.prediction.price_per_million_tokens == pytest.approx(
        2 * 0.5 / 3600 / scored.prediction.tokens_per_s * 1e6
    )
    assert scored.unused == ("c-2:0", "g-0:0", "g-0:1")


def test_messages_between_stages_are_counted() -> None:
    plan = make_plan((1, 1, [stage(0, 2, ("c-0", [0], 1)), stage(2, 4, ("c-1", [0], 1))]))
    scored = score(plan, make_job(batch=1), CLUSTER, exact_profile(0.1, links_s=0.05))
    assert scored.prediction is not None
    assert scored.prediction.terms.pipeline_s >= 0.05
    plain = score(plan, make_job(batch=1), CLUSTER, exact_profile(0.1))
    assert plain.prediction is not None
    assert scored.prediction.step_s > plain.prediction.step_s + 0.1


def test_unequal_replicas_share_a_micro_batch_and_the_state() -> None:
    plan = make_plan((4, 1, [stage(0, 4, ("c-0", [0], 3), ("c-1", [0], 1)), stage(4, 4, ("g-0", [0, 1], 4))]))
    job = make_job()
    scored = score(plan, job, CLUSTER)
    assert scored.prediction is not None
    assert scored.prediction.terms.gradient_s > 0
    costs = CostModel(job, CLUSTER, Profile())
    ranks = replica_loads(plan, costs, segments(plan, costs))
    assert ranks[0].owned == ranks[1].owned
    assert ranks[0].memory.activations == pytest.approx(3 * ranks[1].memory.activations)
    owned = sum(rank.owned for rank in ranks)
    model = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 256 * 64 + 64
    assert owned == pytest.approx(model, rel=0.02)
    assert describe(scored, CLUSTER) == "[4 on 2 cpu-1t | 0 on T4 tp2] 1 x 4"


def test_a_description_tells_plans_apart_that_recompute_and_counts_what_has_no_room() -> None:
    overrides = [
        {"layers": [1, 2], "recompute": "none"},
        {"layers": [2, 4], "recompute": "full", "offload": "optimizer"},
    ]
    first = {**stage(0, 4, ("c-0", [0], 1)), "recompute": "selective", "overrides": overrides}
    last = {**stage(4, 8, ("c-1", [0], 1)), "recompute": "full"}
    plan = make_plan((1, 2, [first, last]))
    assert describe(plan, CLUSTER) == (
        "[4 on cpu-1t (recompute selective in 1, recompute full in 2, optimizer of 2 on the host) | "
        "4 on cpu-1t (recompute full)] 2 x 1"
    )
    plain = make_plan((1, 2, [stage(0, 4, ("c-0", [0], 1)), stage(4, 8, ("c-1", [0], 1))]))
    assert shape(plan, CLUSTER) != shape(plain, CLUSTER)
    swapped = make_plan((1, 2, [stage(0, 4, ("c-1", [0], 1)), stage(4, 8, ("c-0", [0], 1))]))
    assert shape(swapped, CLUSTER) == shape(plain, CLUSTER)
    nodes = parse_cluster({"nodes": [{"name": "n", "device": "T4", "count": 10}]})
    many = make_plan(*((1, 1 + index, [stage(0, 4, (f"n-{index}", [0], 1))]) for index in range(10)))
    assert describe(many, nodes).endswith("[4 on T4] 5 x 1 + 5 more pipelines")
    assert describe(plain, CLUSTER) == "[8 in 2 stages on cpu-1t] 2 x 1"


def test_the_state_is_owned_in_proportion_to_the_shares() -> None:
    """As the recovery package splits it: memory, the update and the host's snapshots follow."""
    even = make_plan((2, 2, [stage(0, 4, ("c-0", [0], 1), ("c-1", [0], 1))]))
    mapping: Any = plan_to_mapping(even)
    mapping["pipelines"][0]["stages"][0]["replicas"][0]["state_share"] = 3.0
    uneven = parse_plan(mapping)
    costs = CostModel(make_job(), CLUSTER, Profile())
    ranks = replica_loads(uneven, costs, segments(uneven, costs))
    owned = [sum(span.last - span.first for span in rank.owns) for rank in shard_map(uneven, costs.job.model).ranks]
    assert [rank.owned for rank in ranks] == pytest.approx(owned, rel=1e-3)
    assert ranks[0].owned == pytest.approx(3 * ranks[1].owned)
    assert ranks[0].memory.optimizer == pytest.approx(12 * ranks[0].owned)
    before, after = (score(found, costs.job, CLUSTER).prediction for found in (even, uneven))
    assert before is not None and after is not None
    assert dict(after.memory_bytes)["c-0:0"] > dict(before.memory_bytes)["c-0:0"]
    assert after.step_s > before.step_s


def test_stages_of_a_node_share_its_network() -> None:
    """Two pipelines, each over the two devices of a node: all gradients leave through one interface."""
    cluster = parse_cluster(
        {"nodes": [{"name": "t", "device": "T4", "devices": 2, "count": 2, "inter_gbit_per_s": 0.1}]}
    )
    one = make_plan((1, 2, [stage(0, 4, ("t-0", [0], 1))]), (1, 2, [stage(0, 4, ("t-1", [0], 1))]))
    two = make_plan(
        *((1, 2, [stage(0, 2, (f"t-{node}", [0], 1)), stage(2, 4, (f"t-{node}", [1], 1))]) for node in (0, 1))
    )
    alone, shared = (score(plan, make_job(), cluster).prediction for plan in (one, two))
    assert alone is not None
    assert shared is not None
    assert shared.terms.gradient_s == pytest.approx(alone.terms.gradient_s, rel=0.15)


GOOD = make_plan((2, 2, [stage(0, 4, ("c-0", [0], 2))]))


@pytest.mark.parametrize(
    ("plan", "job", "message"),
    [
        (GOOD, make_job(batch=5), r"must add up to global_batch \(5\)"),
        (GOOD, make_job(layers=5), "must cover the 5 layers"),
        (
            make_plan((2, 2, [stage(0, 4, ("zz", [0], 2))])),
            make_job(),
            r"pipelines\[0\].stages\[0\].replicas\[0\].node = 'zz': is not a node of this cluster",
        ),
        (
            make_plan((2, 2, [stage(0, 4, ("g-0", [2], 2))])),
            make_job(),
            r"replicas\[0\].devices = \[2\]: node g-0 has devices 0 to 1",
        ),
        (make_plan((2, 2, [stage(0, 4, ("g-0", [-1], 2))])), make_job(), r"devices = \[-1\]"),
        (
            make_plan((2, 2, [stage(0, 4, ("c-0", [0], 2))]), copies=4),
            make_job(),
            "copies = 4: each copy needs another",
        ),
        (
            GOOD,
            dataclasses.replace(make_job(), limits=dataclasses.replace(make_job().limits, device_types=("T4",))),
            "has cpu-1t; limits.device_types allows T4",
        ),
        (
            GOOD,
            dataclasses.replace(make_job(), limits=dataclasses.replace(make_job().limits, min_devices=2)),
            "uses fewer devices than limits.min_devices",
        ),
    ],
    ids=["batch", "layers", "node", "device", "negative device", "copies", "type", "least devices"],
)
def test_a_plan_of_another_job_or_cluster_is_refused(plan: Plan, job: JobSpec, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        score(plan, job, CLUSTER)


def test_a_plan_that_does_not_fit_names_need_and_have() -> None:
    tight = parse_cluster({"nodes": [{"name": "c", "device": "cpu-1t"}], "devices": {"cpu-1t": {"memory_gib": 0.004}}})
    with pytest.raises(NoPlanFits, match=r"needs \d+\.\d MiB on c-0, which has 4\.1"):
        score(dataclasses.replace(GOOD, copies=0), make_job(), tight)


def test_a_host_that_cannot_hold_snapshots_is_named() -> None:
    tight = parse_cluster({"nodes": [{"name": "c", "device": "cpu-1t", "host_memory_gib": 0.001}]})
    with pytest.raises(NoPlanFits, match=r"needs \d+\.\d MiB on the host of c-0 for snapshots, which has 1"):
        score(dataclasses.replace(GOOD, copies=0), make_job(), tight)
