"""The plain re-score model reproduces what the recorded plans of other planners scored."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.planner_cases import DEFAULT_PATH, Flavour, Setting, catalogue_name, cluster, job, load, peer_plan
from benchmarks.rescore import lower_bound_s, rescore
from shoal_planner.catalogue import device_type
from shoal_planner.cluster import parse_cluster
from shoal_planner.job import parse_job
from shoal_planner.plan import check_plan, parse_plan

pytestmark = pytest.mark.skipif(not DEFAULT_PATH.exists(), reason="the recorded settings are not here")
SETTINGS = load() if DEFAULT_PATH.exists() else ()
ANY = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.id)


@ANY
def test_recorded_scores_come_out(setting: Setting) -> None:
    found = rescore(parse_plan(peer_plan(setting)), setting, stages_form=setting.peer["form"] == "stages")
    assert found.seconds == pytest.approx(setting.peer_rescored_s, rel=5e-5)
    assert found.seconds == pytest.approx(found.pipeline_s + found.sync_s)


@ANY
def test_recorded_memory_comes_out(setting: Setting) -> None:
    found = rescore(parse_plan(peer_plan(setting)), setting)
    assert found.memory_share == pytest.approx(setting.peer["rescored_mem_ratio"], abs=0.0006)
    assert found.fits is setting.peer["rescored_fits"]
    assert {device for device, _ in found.memory_bytes} == {
        str(ref) for ref in parse_plan(peer_plan(setting)).devices()
    }


@ANY
def test_recorded_bounds_come_out(setting: Setting) -> None:
    assert lower_bound_s(setting) == pytest.approx(setting.lower_bound_s, abs=6e-5)
    assert lower_bound_s(setting) < setting.peer_rescored_s


@ANY
def test_recomputation_takes_time_and_frees_memory(setting: Setting) -> None:
    kept = parse_plan(peer_plan(setting))
    pipelines = tuple(
        dataclasses.replace(
            pipeline, stages=tuple(dataclasses.replace(stage, recompute="full") for stage in pipeline.stages)
        )
        for pipeline in kept.pipelines
    )
    before, after = rescore(kept, setting), rescore(dataclasses.replace(kept, pipelines=pipelines), setting)
    assert before.seconds < after.seconds < before.seconds * 1.5
    assert sum(size for _, size in after.memory_bytes) < sum(size for _, size in before.memory_bytes)


@ANY
@pytest.mark.parametrize("flavour", ["full", "plain"])
def test_settings_are_documents_of_the_published_forms(setting: Setting, flavour: Flavour) -> None:
    found, snapshot = parse_job(job(setting, flavour)), parse_cluster(cluster(setting, flavour))
    assert snapshot.num_devices == setting.raw["total_gpus"]
    assert {shape.id for shape in setting.nodes} == {node.id for node in snapshot.nodes}
    check_plan(parse_plan(peer_plan(setting)), found)
    for shape in setting.nodes:
        device = device_type(snapshot.node(shape.id).device, snapshot.overrides)
        assert device.memory_bytes == shape.memory_bytes
        assert device.flops_per_s("bf16") == pytest.approx(shape.flops_per_s)
        assert flavour == "full" or device.efficiency == 0.5


def test_names_of_devices_are_the_catalogue_s() -> None:
    assert catalogue_name("A100-80") == "A100-80G"
    assert catalogue_name("RTX2080Ti-11") == "RTX2080Ti"
    assert catalogue_name("Unheard-7") == "Unheard-7"
