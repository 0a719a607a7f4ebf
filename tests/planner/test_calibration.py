"""Factors of a cluster: what they change, that runs give them back, and which runs to measure."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from planner_ground import make_job

from shoal_planner.calibrate import MeasuredRun, calibrate, choose_runs
from shoal_planner.calibration import FACTORS, Calibration
from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot, DeviceOverride, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Sharding, Stage
from shoal_planner.predict import predict
from shoal_planner.profile import LayerTime, LinkFigure, Profile, joined, profile_from_mapping, profile_to_mapping

LAYERS, BATCH, DEVICES = 8, 16, 4
JOB = make_job(layers=LAYERS, batch=BATCH, precision="bf16", seq_len=1024, hidden=1024, vocab=32000)
TRUE = Calibration(compute=0.8, passes=3.0, kernel=2.5, inside=0.25, network=0.5)


def cluster(**device: float) -> ClusterSnapshot:
    node = {"name": "n", "device": "A10G", "count": 2, "devices": DEVICES, "intra_gb_per_s": 30, "inter_gbit_per_s": 50}
    return parse_cluster({"nodes": [node], "devices": {"A10G": device} if device else {}})


CLUSTER = cluster()


def uniform(tp: int, dp: int, micro_batch: int) -> Plan:
    """All eight devices; ranks count through tp, dp, then stages."""
    pp = 2 * DEVICES // (tp * dp)
    pipelines = []
    for d in range(dp):
        stages = []
        for s in range(pp):
            rank = (s * dp + d) * tp
            devices = tuple(range(rank % DEVICES, rank % DEVICES + tp))
            replica = Replica(node=f"n-{rank // DEVICES}", devices=devices, tp=tp, samples=micro_batch)
            stages.append(Stage(layers=((LAYERS * s // pp, LAYERS * (s + 1) // pp),), replicas=(replica,)))
        pipelines.append(
            Pipeline(micro_batch=micro_batch, micro_batches=BATCH // (dp * micro_batch), stages=tuple(stages))
        )
    return Plan(pipelines=tuple(pipelines), sharding=Sharding(optimizer="none"))


PLANS = tuple(
    uniform(tp, dp, micro_batch)
    for tp, dp in ((1, 8), (1, 4), (1, 2), (1, 1), (2, 4), (2, 2), (2, 1), (4, 2), (4, 1))
    for micro_batch in (1, 2)
)


def seconds(plan: Plan, calibration: Calibration | None, job: JobSpec = JOB, on: ClusterSnapshot = CLUSTER) -> float:
    return predict(plan, CostModel(job, on, Profile(calibration=calibration))).step_s


def measured(plans: tuple[Plan, ...], on: ClusterSnapshot = CLUSTER) -> list[MeasuredRun]:
    return [MeasuredRun(job=JOB, plan=plan, step_s=seconds(plan, TRUE, on=on)) for plan in plans]


def test_factors_of_one_change_nothing() -> None:
    for plan in PLANS:
        assert seconds(plan, Calibration()) == seconds(plan, None)


@pytest.mark.parametrize(
    ("name", "slower"),
    [(name, 2.0 if name in ("passes", "kernel") else 0.5) for name in FACTORS if name != "parts"],
)
def test_each_factor_makes_steps_slower_or_faster(name: str, slower: float) -> None:
    worse, better = Calibration(**{name: slower}), Calibration(**{name: 1 / slower})  # type: ignore[arg-type]
    plans = [uniform(1, 8, 1), uniform(2, 4, 1), uniform(4, 1, 2)]
    for plan in plans:
        assert seconds(plan, better) <= seconds(plan, None) <= seconds(plan, worse)
    assert sum(seconds(plan, worse) for plan in plans) > 1.01 * sum(seconds(plan, None) for plan in plans)


def test_steps_that_take_longer_than_their_parts_alone() -> None:
    """What is timed by itself is as good as its conditions: whole steps correct it too."""
    model = JOB.model
    block = LayerTime(
        device="A10G",
        tp=1,
        micro_batch=1,
        seq_len=JOB.train.seq_len,
        precision="bf16",
        **{name: getattr(model, name) for name in ("hidden", "heads", "kv_heads", "ffn")},
        forward_s=0.01,
        backward_s=0.02,
        source="a bench",
    )
    timed = Profile(layers=(block,))
    plans = (uniform(1, 8, 1), uniform(1, 4, 1))
    within = dataclasses.replace(timed, calibration=Calibration(parts=1.25))
    steps = [predict(plan, CostModel(JOB, CLUSTER, within)).step_s for plan in plans]
    assert all(
        step_s > 1.15 * predict(plan, CostModel(JOB, CLUSTER, timed)).step_s
        for step_s, plan in zip(steps, plans, strict=True)
    )
    runs = [MeasuredRun(job=JOB, plan=plan, step_s=step_s) for plan, step_s in zip(plans, steps, strict=True)]
    found = calibrate(runs, CLUSTER, timed)
    fitted = dataclasses.replace(timed, calibration=found)
    for plan, step_s in zip(plans, steps, strict=True):
        assert predict(plan, CostModel(JOB, CLUSTER, fitted)).step_s == pytest.approx(step_s, rel=0.05)


def test_many_runs_give_the_factors_back() -> None:
    found = calibrate(measured(PLANS), CLUSTER)
    for name in ("kernel", "inside", "network"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.25), name
    # Slow products and much memory traffic look alike but for the head: of these two only the sum is sure.
    assert all(seconds(plan, found) == pytest.approx(seconds(plan, TRUE), rel=0.02) for plan in PLANS)
    assert found.error < 0.01
    assert found.source == f"{len(PLANS)} measured runs"


def test_five_chosen_runs_predict_the_others() -> None:
    chosen = choose_runs([(JOB, plan) for plan in PLANS], CLUSTER)
    assert len(chosen) == len(set(chosen)) == 5
    found = calibrate(measured(tuple(PLANS[index] for index in chosen)), CLUSTER, source="a morning's runs")
    assert found.source == "a morning's runs"
    rest = [plan for index, plan in enumerate(PLANS) if index not in chosen]
    assert max(abs(seconds(plan, found) / seconds(plan, TRUE) - 1) for plan in rest) < 0.05
    assert max(abs(seconds(plan, None) / seconds(plan, TRUE) - 1) for plan in rest) > 0.25


def test_what_the_runs_say_nothing_of_stays() -> None:
    """One device: no link is used."""
    stage = Stage(layers=((0, LAYERS),), replicas=(Replica(node="n-0", devices=(0,), samples=2),))
    plan = Plan(pipelines=(Pipeline(micro_batch=2, micro_batches=8, stages=(stage,)),))
    found = calibrate(measured((plan,)), CLUSTER)
    assert (found.inside, found.network) == pytest.approx((1, 1), abs=1e-6)
    assert seconds(plan, found) == pytest.approx(seconds(plan, TRUE), rel=0.02)
    assert seconds(plan, None) < 0.8 * seconds(plan, TRUE)


def test_a_network_is_expected_at_half_its_rate_where_runs_hardly_tell() -> None:
    """A single run over the network, as slow as the catalogue has it: all factors share what the network's explains."""
    plan = uniform(1, 8, 1)
    found = calibrate([MeasuredRun(job=JOB, plan=plan, step_s=seconds(plan, None))], CLUSTER)
    assert 0.4 < found.network < 0.95
    assert seconds(plan, found) == pytest.approx(seconds(plan, None), rel=0.02)


def test_a_fit_is_deterministic_and_replaces_the_older_one() -> None:
    runs = measured(PLANS[:5])
    older = Profile(calibration=Calibration(compute=0.1, network=0.1))
    assert calibrate(runs, CLUSTER) == calibrate(runs, CLUSTER, older)


def test_stated_efficiency_and_measured_links_stay() -> None:
    stated = device_type("A10G", [DeviceOverride(name="A10G", efficiency=0.3)])
    assert TRUE.device(stated) == stated
    figure = LinkFigure(from_node="n-0", to_node="n-1", latency_s=0.0, bytes_per_s=1e9, source="ping")
    assert CostModel(JOB, CLUSTER, Profile(links=(figure,), calibration=TRUE)).link("n-0", "n-1").bytes_per_s == 1e9
    plain = CostModel(JOB, CLUSTER, Profile(calibration=TRUE))
    assert plain.link("n-0", "n-1").bytes_per_s == pytest.approx(0.5 * 50e9 / 8)
    assert plain.link("n-0", "n-0").bytes_per_s == pytest.approx(0.25 * 30e9)
    assert plain.snapshot is CLUSTER


def test_links_between_zones_and_groups_of_devices_are_calibrated_too() -> None:
    node = {"name": "a", "device": "A10G", "devices": 4, "zone": "a", "device_group": 2, "group_gb_per_s": 100}
    links = [{"from": "a", "to": "b", "gbit_per_s": 1, "latency_ms": 1}]
    zones = parse_cluster({"nodes": [node, {**node, "name": "b", "zone": "b"}], "links": links})
    found = TRUE.cluster(zones)
    assert found.links[0].bytes_per_s == pytest.approx(0.5 * 1e9 / 8)
    assert found.nodes[0].group_bytes_per_s == pytest.approx(25e9)
    assert CostModel(JOB, zones, Profile(calibration=TRUE)).link("a-0", "b-0").bytes_per_s == pytest.approx(0.5e9 / 8)


def test_no_device_exceeds_its_peak() -> None:
    assert Calibration(compute=9.0).device(device_type("A10G")).efficiency == 1


def test_a_profile_carries_it_and_a_newer_one_goes_first() -> None:
    profile = Profile(calibration=dataclasses.replace(TRUE, source="five runs", error=0.02))
    assert profile_from_mapping(json.loads(json.dumps(profile_to_mapping(profile)))) == profile
    assert joined(profile, Profile()).calibration == profile.calibration
    assert joined(profile, Profile(calibration=Calibration())).calibration == Calibration()


def test_known_runs_are_among_the_chosen() -> None:
    plans = [(JOB, plan) for plan in PLANS]
    assert {3, 4} < set(choose_runs(plans, CLUSTER, count=3, known=(4, 3)))
    assert choose_runs(plans, CLUSTER, count=len(PLANS)) == tuple(range(len(PLANS)))


@pytest.mark.parametrize(("count", "known"), [(0, (1,)), (len(PLANS) + 1, ())])
def test_a_count_that_cannot_be_chosen_is_refused(count: int, known: tuple[int, ...]) -> None:
    with pytest.raises(InvalidField, match=f"count = {count}: must be {len(known)}"):
        choose_runs([(JOB, plan) for plan in PLANS], CLUSTER, count=count, known=known)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(InvalidField, match=r"runs = \[\]: must have at least one entry"):
        calibrate([], CLUSTER)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidField, match="step_s"):
            MeasuredRun(job=JOB, plan=PLANS[0], step_s=wrong)
        with pytest.raises(InvalidField, match="kernel"):
            Calibration(kernel=wrong)
