"""Mixed clusters of publications: what their authors show of their planners must hold of ours."""

from __future__ import annotations

import time

import pytest

from benchmarks.baselines import best
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.memory import usable_bytes
from shoal_planner.profile import Profile
from shoal_planner.search import plan, step_s

SEARCH_S = 60.0  # what FlashFlex's paper calls quick for these; ours takes a second or two

# FlashFlex (2409.01143), its mixed set-ups: nodes of (device, devices, nodes), and the model they train.
DESKS = (("RTX3080Ti", 8, 1), ("RTX3090", 8, 1), ("RTX4090", 8, 3))
DESKS_AND_A_SERVER = (("RTX3080Ti", 8, 1), ("RTX3090", 8, 1), ("RTX4090", 8, 1), ("A100-80G", 8, 1))
LARGE = (("RTX3090", 8, 1), ("RTX4090", 4, 2), ("RTX4090", 8, 4), ("A100-80G", 8, 1))
SETTINGS = {
    "desks-7b": (DESKS, "llama-2-7b"),
    "desks-and-a-server-7b": (DESKS_AND_A_SERVER, "llama-2-7b"),
    "desks-and-a-server-13b": (DESKS_AND_A_SERVER, "llama-2-13b"),
    "large-30b": (LARGE, "llama-30b"),
}


def cluster_of(nodes: tuple[tuple[str, int, int], ...]) -> ClusterSnapshot:
    listed = [
        {
            "name": f"n{number}",
            "device": device,
            "devices": devices,
            "count": count,
            "host_memory_gib": 512,
            "intra_gb_per_s": 300 if device.startswith("A100") else 20,
            "inter_gbit_per_s": 5,
        }
        for number, (device, devices, count) in enumerate(nodes)
    ]
    return parse_cluster({"nodes": listed})


def job_of(model: str) -> JobSpec:
    train = {"global_batch": 64, "seq_len": 4096, "steps": 1, "precision": "bf16"}
    return parse_job({"name": "setting", "model": {"preset": model}, "data": {"uri": "stdlib:"}, "train": train})


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "setting", [name if name == "desks-7b" else pytest.param(name, marks=pytest.mark.long) for name in SETTINGS]
)
def test_in_mixed_settings_more_of_the_peak_is_used_than_by_equal_pipelines(setting: str) -> None:
    nodes, model = SETTINGS[setting]
    job, cluster = job_of(model), cluster_of(nodes)
    began_s = time.process_time()
    found = plan(job, cluster).plan
    assert time.process_time() - began_s < SEARCH_S
    assert plan(job, cluster).plan == found
    costs = CostModel(job, cluster, Profile())
    assert found.prediction is not None
    for name, used in found.prediction.memory_bytes:
        assert used <= usable_bytes(costs.device(name.rsplit(":", 1)[0]))
    # What share of the cluster's peak is used goes by the step alone, whichever devices a plan leaves out.
    for family in ("uniform", "memory_proportional"):
        theirs = best(family, job, cluster)
        assert theirs.step_s is not None and found.prediction.step_s < theirs.step_s


@pytest.mark.parametrize("gbit_per_s", [100, 1])
def test_a_device_of_a_tenth_of_the_speed_stands_by_where_it_would_hold_others_up(gbit_per_s: int) -> None:
    """Hetis (2509.08309): the weak one is kept out of the critical path, where no sample is quicker there."""
    train = {"global_batch": 64, "seq_len": 1024, "steps": 1, "precision": "bf16"}
    model = {"preset": "tinyllama-1.1b"}
    job = parse_job({"name": "weak", "model": model, "data": {"uri": "stdlib:"}, "train": train})
    strong = {"name": "strong", "device": "A100-80G", "devices": 4, "host_memory_gib": 512, "inter_gbit_per_s": 100}
    weak = strong | {"name": "weak", "device": "weak", "devices": 1, "inter_gbit_per_s": gbit_per_s}
    tenth = {"memory_gib": 80, "tflops_bf16": 31.2, "tflops_fp32": 1.95, "memory_gb_per_s": 204, "efficiency": 0.55}
    with_it = parse_cluster({"nodes": [strong, weak], "devices": {"weak": tenth}})
    found = plan(job, with_it).plan
    assert step_s(found) <= step_s(plan(job, parse_cluster({"nodes": [strong]})).plan)
    stages = [stage for pipeline in found.pipelines for stage in pipeline.stages]
    at_work = {replica.node for stage in stages for replica in stage.replicas if replica.samples}
    assert at_work == {"strong-0"}
