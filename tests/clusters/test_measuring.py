"""What a supervisor has measured, over real processes: before the first plan, beside a job, and after a restart."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_cluster import SETTINGS, ProcessCluster
from supervised import Supervised, supervised, tiny_job

from shoal_planner.cluster import DeviceOverride, Node
from shoal_planner.plan import parse_plan
from shoal_planner.profile import Profile, joined, profile_from_mapping
from shoal_recovery.journal import FiguresMeasured, PlanAdopted, PredictionChecked, RecoveryDone
from shoal_workers.cluster_profile import ClusterProfile
from shoal_workers.measure import measure_update

MEASURED = SETTINGS.model_copy(update={"link_limit_s": 1.0})
SHAPES = {"a": ("cpu-2t", 1), "b": ("cpu-1t", 2), "c": ("cpu-1t", 1), "late": ("cpu-odd", 1)}
ODD = DeviceOverride(
    name="cpu-odd",
    memory_bytes=1 << 30,
    tflops_fp32=0.05,
    tflops_bf16=0.05,
    memory_bytes_per_s=1e10,
    efficiency=0.5,
    threads=1,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path_factory.mktemp("nodes"), SHAPES, (ODD,))
    yield started
    started.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return path.as_uri()


def known(running: Supervised) -> Profile:
    profile = Profile()
    for event in running.events(FiguresMeasured):
        profile = joined(profile, profile_from_mapping(event.profile))
    return profile


def test_figures_precede_the_first_plan_outlive_the_supervisor_and_no_recovery_waits_for_one(
    cluster: ProcessCluster, text: str
) -> None:
    """A new type of device is measured beside the job, once it is there."""
    cluster.kill_node("late")
    spec = tiny_job(text, steps=2000, min_devices=3)
    with supervised(cluster, "figures", spec, settings=MEASURED) as running:
        running.reaches(10)
        before = running.events_before(running.events(PlanAdopted)[0])
        measured = [event for event in before if isinstance(event, FiguresMeasured)]
        assert len(measured) == len(running.events(FiguresMeasured)) == 3, "two types of devices, and links"
        assert measured[-1].num_bytes > 0
        profile = known(running).on(seen.node for seen in cluster.nodes())
        for device in ("cpu-1t", "cpu-2t"):
            assert profile.points("block", device, "fp32", spec.model, spec.train.seq_len)
            assert profile.update_rate(device) is not None
        for here, there in (("a", "b"), ("a", "c"), ("b", "c"), ("b", "b")):
            link = profile.link(here, there)
            assert link is not None, (here, there)
            assert link.bytes_per_s < 1e12, "not what the node says of itself"
        sources = {figure.source for figure in profile.layers} | {figure.source for figure in profile.updates}
        assert all("T" in source and "Z, " in source for source in sources)
        (checked,) = running.events(PredictionChecked)
        assert (checked.epoch, checked.num_steps) == (running.epoch.epoch, 5)
        assert min(checked.predicted_s, checked.measured_s) > 0

        running.vanish()
        after = Supervised(cluster, "figures", spec, restarted=True, settings=MEASURED)
        try:
            after.steps_on()
            assert known(after) == known(running)
            # The plan follows what this machine measured, and may leave devices out.
            replica = parse_plan(running.epoch.plan).pipelines[0].stages[-1].replicas[0]
            cluster.kill_rank("figures", replica.node, replica.devices[0])
            after.recovers(len(running.events(RecoveryDone)))
            after.steps_on()
            assert known(after) == known(running), "what was known went into the new plan"
            assert len(after.events(PredictionChecked)) <= 2

            cluster.bring_back("late")
            after.eventually(lambda: known(after).update_rate("cpu-odd") is not None)
            late = node_of(cluster, "late")
            after.eventually(lambda: known(after).on([late, node_of(cluster, "a")]).link("a", "late") is not None)
        finally:
            after.supervisor.cancel()
            assert after.supervisor.ended.wait(30.0)


def node_of(cluster: ProcessCluster, name: str) -> Node:
    return next(seen.node for seen in cluster.nodes() if seen.node.id == name)


def test_the_update_is_timed_on_as_much_state_as_there_is(text: str) -> None:
    assert 1e4 < measure_update(tiny_job(text, steps=1), 1, 2) < 1e12


def test_a_cluster_keeps_what_any_of_its_jobs_found(cluster: ProcessCluster) -> None:
    first = {"kind": "figures_measured", "profile": {"updates": [rate("T4", 1.0), rate("V100", 2.0)]}}
    newer = {"kind": "figures_measured", "profile": {"updates": [rate("T4", 3.0)]}}
    kept = ClusterProfile()
    kept.learn([first, {"kind": "step_done"}])
    kept.learn([newer])
    kept.learn_older(profile_from_mapping({"updates": [rate("T4", 9.0), rate("A10G", 4.0)]}))
    nodes = [seen.node for seen in cluster.nodes()]
    found = kept.on(nodes)
    assert [found.update_rate(device) for device in ("T4", "V100", "A10G")] == [3.0, 2.0, 4.0]
    assert sorted(found.kinds) == [node.id for node in nodes]


def rate(device: str, elements_per_s: float) -> dict[str, object]:
    return {"device": device, "elements_per_s": elements_per_s, "source": "test"}
