"""Where the network is slow, what a part of the cluster does alone must not be hidden by the rest of it."""

from __future__ import annotations

import pytest

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.search import plan, step_s

MODEL = {
    **{"layers": 31, "hidden": 2048, "heads": 32, "kv_heads": 4, "ffn": 4096, "vocab": 1000},
    **{"family": "llama", "tie_embeddings": False},
}
SLOW_NETWORK = {"intra_gb_per_s": 300, "inter_gbit_per_s": 0.1, "host_memory_gib": 4096}
# Three of these hold the model if they recompute and keep some of the optimizer's state on the host.
TIGHT = {"memory_gib": 4.8, "tflops_fp32": 5, "tflops_bf16": 20, "memory_gb_per_s": 500, "efficiency": 0.5}


def job() -> JobSpec:
    train = {"global_batch": 11, "seq_len": 2048, "steps": 10, "precision": "bf16"}
    return parse_job({"name": "parts", "model": MODEL, "data": {"uri": "stdlib:"}, "train": train})


def islands(count: int, more: int = 0) -> ClusterSnapshot:
    """Nodes of three devices, and some of one, far from each other."""
    nodes = [{"name": "island", "device": "tight", "devices": 3, "count": count, **SLOW_NETWORK}]
    if more:
        nodes.append({"name": "rock", "device": "tight", "devices": 1, "count": more, **SLOW_NETWORK})
    return parse_cluster({"nodes": nodes, "devices": {"tight": TIGHT}})


@pytest.mark.parametrize(("count", "more"), [(4, 0), (5, 2)])
def test_one_node_alone_is_found_where_crossing_costs_more_than_it_brings(count: int, more: int) -> None:
    alone = plan(job(), islands(1))
    found = plan(job(), islands(count, more))
    assert step_s(found.plan) <= step_s(alone.plan) * (1 + 1e-9)


def test_without_looking_closely_less_is_found() -> None:
    close, quick = plan(job(), islands(4, 1)), plan(job(), islands(4, 1), thorough=False)
    assert step_s(close.plan) < step_s(quick.plan)


def test_the_time_limit_ends_the_look_at_parts() -> None:
    ticks = iter(range(10_000))
    found = plan(job(), islands(4, 1), time_limit_s=0.5, clock=lambda: float(next(ticks)))
    assert found.truncated
    assert found.plan.prediction is not None
