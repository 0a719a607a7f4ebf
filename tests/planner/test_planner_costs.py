"""Figures of devices and models: the catalogue, what was measured, seconds and bytes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shoal_planner.catalogue import CATALOGUE, device_type
from shoal_planner.cluster import GIB, ClusterSnapshot, DeviceOverride, parse_cluster
from shoal_planner.costs import CostModel, LinkCost, forward_seconds, matmul_flops, model_flops
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, ModelSpec, parse_job
from shoal_planner.loads import Holder, Segment
from shoal_planner.memory import (
    StageBytes,
    block_activation_bytes,
    held_elements,
    kept_bytes,
    part_elements,
    snapshot_bytes,
    stage_bytes,
    stage_memory,
    unit_elements,
    usable_bytes,
)
from shoal_planner.orders import InFlight, Place, fullest
from shoal_planner.parameters import num_parameters
from shoal_planner.plan import Recompute
from shoal_planner.predict import unit_exchange
from shoal_planner.profile import (
    LayerTime,
    LinkFigure,
    Profile,
    UpdateRate,
    profile_from_mapping,
    profile_to_mapping,
)

LLAMA_7B = ModelSpec(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, tie_embeddings=False)


def make_job(model: ModelSpec | None = None, precision: str = "fp32", seq_len: int = 128) -> JobSpec:
    job = parse_job(
        {
            "name": "costs",
            "model": {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 688, "vocab": 256},
            "data": {"uri": "stdlib:"},
            "train": {"global_batch": 8, "seq_len": seq_len, "steps": 1, "precision": precision},
        }
    )
    return job if model is None else dataclasses.replace(job, model=model)


CLUSTER = parse_cluster(
    {
        "nodes": [
            {"name": "c", "device": "cpu-1t", "count": 3, "inter_gbit_per_s": 8, "zone": "east"},
            {"name": "w", "device": "cpu-2t", "inter_gbit_per_s": 8, "zone": "west"},
            {"name": "x", "device": "cpu-2t", "inter_gbit_per_s": 8, "zone": "far"},
            {"name": "g", "device": "A100-80G", "devices": 4, "intra_gb_per_s": 100, "device_group": 2,
             "group_gb_per_s": 400},
        ],
        "links": [{"from": "west", "to": "east", "gbit_per_s": 0.8, "latency_ms": 60}],
    }
)  # fmt: skip


def make_costs(
    job: JobSpec | None = None, profile: Profile | None = None, cluster: ClusterSnapshot = CLUSTER
) -> CostModel:
    return CostModel(job or make_job(), cluster, profile or Profile())


# --- the catalogue ---------------------------------------------------------------------------------------------------


def test_the_catalogue_knows_common_devices() -> None:
    assert len(CATALOGUE) >= 17
    for name in ("A100-40G", "H100-80G", "H200-141G", "H20-96G", "L40S", "L4", "T4", "V100-32G", "RTX4090", "cpu-1t"):
        device = device_type(name)
        assert device.name == name
        assert 0 < device.efficiency <= 1
        assert device.memory_bytes_per_s > 0
        assert device.flops_per_s("bf16") >= device.flops_per_s("fp32")


def test_a_device_without_bf16_computes_it_in_fp32() -> None:
    assert device_type("V100-16G").tflops.bf16 is None
    assert device_type("V100-16G").flops_per_s("bf16") == 15.7e12


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidField, match="device = 'A100-80': is not a known device type; did you mean 'A100-80G'"):
        device_type("A100-80")
    with pytest.raises(InvalidField, match="known: P100-16G"):
        device_type("%%")


def test_overrides_change_and_add_types() -> None:
    changed = device_type(
        "T4", [DeviceOverride(name="T4", memory_bytes=GIB), DeviceOverride(name="L4", efficiency=0.1)]
    )
    assert (changed.memory_bytes, changed.efficiency, changed.source) == (
        GIB,
        CATALOGUE["T4"].efficiency,
        "cluster file",
    )
    made = device_type("tpu", [DeviceOverride(name="tpu", memory_bytes=GIB, tflops_bf16=100.0, threads=2)])
    assert (made.flops_per_s("fp32"), made.threads) == (100e12, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (DeviceOverride(name="tpu"), r"devices.tpu.memory_gib = None: is required"),
        (DeviceOverride(name="tpu", memory_bytes=1), r"devices.tpu.tflops_bf16 = None: or tflops_fp32 is required"),
        (DeviceOverride(name="tpu", memory_bytes=0, tflops_bf16=1.0), "memory_gib = 0: must be more than zero"),
        (DeviceOverride(name="tpu", memory_bytes=1, tflops_fp32=-1.0), "tflops_fp32 = -1.0: must be more than zero"),
        (
            DeviceOverride(name="tpu", memory_bytes=1, tflops_fp32=1.0, efficiency=1.5),
            "efficiency = 1.5: must be at most 1",
        ),
    ],
)
def test_overrides_are_checked(override: DeviceOverride, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        device_type("tpu", [override])


# --- what was measured -----------------------------------------------------------------------------------------------


def point(micro_batch: int, forward_s: float, **changes: object) -> LayerTime:
    values: dict[str, object] = {
        "device": "cpu-1t",
        "tp": 1,
        "micro_batch": micro_batch,
        "seq_len": 128,
        "hidden": 256,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 688,
        "forward_s": forward_s,
        "backward_s": 2 * forward_s,
        "source": "measured on c-0",
        **changes,
    }
    return LayerTime(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("samples", "expected"), [(1, 0.010), (2, 0.012), (3, 0.014), (4, 0.016), (8, 0.024)])
def test_measured_points_are_joined_by_lines(samples: int, expected: float) -> None:
    profile = Profile(layers=(point(4, 0.016), point(1, 0.010)))
    found = make_costs(profile=profile).part("block", "c-0", 1, samples)
    assert (found.forward_s, found.backward_s) == pytest.approx((expected, 2 * expected))


def test_below_the_smallest_point_nothing_is_free() -> None:
    profile = Profile(layers=(point(4, 0.01), point(8, 0.1)))
    assert make_costs(profile=profile).part("block", "c-0", 1, 1).forward_s == pytest.approx(0.0025)


def test_noise_does_not_make_more_work_cheaper() -> None:
    profile = Profile(layers=(point(4, 0.03), point(8, 0.02)))
    assert make_costs(profile=profile).part("block", "c-0", 1, 16).forward_s == pytest.approx(0.03)


def test_a_single_point_scales_the_analytic_seconds() -> None:
    plain = make_costs().part("block", "c-0", 1, 3).forward_s
    at_one = make_costs().part("block", "c-0", 1, 1).forward_s
    measured = make_costs(profile=Profile(layers=(point(1, 3 * at_one),)))
    assert measured.part("block", "c-0", 1, 3).forward_s == pytest.approx(3 * plain)


def test_a_share_that_was_timed_by_itself_has_its_exchange_added() -> None:
    """Of 2 devices one was timed; what both exchange is that of the links, however slow the devices are."""
    shares = tuple(point(samples, 0.001 * samples, device="A100-80G", tp=2, exchanges=False) for samples in (1, 4))
    whole = (point(1, 0.004, device="A100-80G"), point(4, 0.016, device="A100-80G"))
    plain = make_costs().part("block", "g-0", 2, 2)
    found = make_costs(profile=Profile(layers=(*whole, *shares))).part("block", "g-0", 2, 2)
    assert (found.forward_s, found.backward_s) == pytest.approx((0.002, 0.004))
    assert found.tensor_forward_s == plain.tensor_forward_s > 0
    assert found.tensor_backward_s == plain.tensor_backward_s
    one = make_costs(profile=Profile(layers=(*whole, *shares))).part("block", "g-0", 1, 2)
    assert (one.forward_s, one.tensor_forward_s) == (pytest.approx(0.008), 0)


def test_shares_and_what_was_timed_together_are_told_apart() -> None:
    """Where another figure contains the exchange, it is taken as its part, of both."""
    together = point(1, 0.01, device="A100-80G", tp=4)
    share = point(1, 0.001, device="A100-80G", tp=2, exchanges=False)
    costs = make_costs(profile=Profile(layers=(together, share)))
    found, plain = costs.part("block", "g-0", 2, 1), make_costs().part("block", "g-0", 2, 1)
    exchange_s = plain.tensor_forward_s
    assert found.forward_s + found.tensor_forward_s == pytest.approx(0.001 + exchange_s)


def test_another_tp_takes_over_the_speed_of_the_device() -> None:
    profile = Profile(layers=(point(1, 0.010, device="A100-80G"), point(4, 0.016, device="A100-80G")))
    plain, scaled = make_costs().part("block", "g-0", 2, 4), make_costs(profile=profile).part("block", "g-0", 2, 4)
    ratio = 0.016 / make_costs().part("block", "g-0", 1, 4).forward_s
    assert scaled.total_s == pytest.approx(ratio * plain.total_s, rel=0.5)
    assert scaled.tensor_forward_s > 0


def test_a_measurement_with_tp_contains_its_exchange() -> None:
    points = (point(1, 1e-6, tp=2, device="A100-80G"), point(4, 2e-6, tp=2, device="A100-80G"))
    found = make_costs(profile=Profile(layers=points)).part("block", "g-0", 2, 4)
    assert found.forward_s + found.tensor_forward_s == pytest.approx(2e-6)
    assert found.tensor_forward_s == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "change", [{"seq_len": 64}, {"hidden": 128}, {"ffn": 512}, {"precision": "bf16"}, {"device": "x"}]
)
def test_points_of_another_shape_do_not_count(change: dict[str, object]) -> None:
    assert make_costs(profile=Profile(layers=(point(1, 9.0, **change),))).part("block", "c-0", 1, 1).forward_s < 1


def test_ends_of_the_model_are_measured_too() -> None:
    head = point(1, 0.5, part="head", heads=0, kv_heads=0, ffn=0, vocab=256)
    costs = make_costs(profile=Profile(layers=(head,)))
    assert costs.part("head", "c-0", 1, 1).forward_s == pytest.approx(0.5)
    assert costs.part("embedding", "c-0", 1, 1).forward_s < 0.1
    both = costs.stage("c-0", 1, 1, {"none": 2}, embedding=True, head=True)
    parts = [costs.part(part, "c-0", 1, 1).total_s for part in ("block", "block", "embedding", "head")]  # type: ignore[arg-type]
    assert both.total_s == pytest.approx(sum(parts))


def test_a_profile_survives_a_round_trip() -> None:
    profile = Profile(
        layers=(point(1, 0.1),),
        links=(LinkFigure(from_node="a", to_node="b", latency_s=0.0, bytes_per_s=1e9, source="ping"),),
        updates=(UpdateRate(device="cpu-1t", elements_per_s=1e8, source="timed"),),
    )
    assert profile_from_mapping(json.loads(json.dumps(profile_to_mapping(profile)))) == profile
    assert profile_from_mapping({}) == Profile()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"layer": []}, "did you mean 'layers'"),
        ({"updates": [{"device": "x", "elements_per_s": 0, "source": ""}]}, "elements_per_s = 0.0: must be more than"),
        (
            {"links": [{"from_node": "a", "to_node": "b", "latency_s": -1, "bytes_per_s": 1, "source": ""}]},
            "latency_s = -1.0: must be zero or more",
        ),
    ],
)
def test_a_wrong_profile_names_field_and_value(value: object, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        profile_from_mapping(value)


@pytest.mark.parametrize("change", [{"tp": 0}, {"forward_s": 0.0}, {"backward_s": float("nan")}])
def test_a_wrong_point_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidField):
        point(1, 0.1, **{key: value for key, value in change.items() if key != "forward_s"}) if (
            "forward_s" not in change
        ) else point(1, 0.0)


# --- seconds ---------------------------------------------------------------------------------------------------------


def test_operations_of_a_known_model() -> None:
    """6 operations per weight and token, and 12 L H S for attention, as everyone counts them."""
    weights = num_parameters(LLAMA_7B) - 32000 * 4096
    attention = 12 * 32 * 4096 * 2048
    assert model_flops(LLAMA_7B, 2048) == pytest.approx(2048 * (6 * weights + attention), rel=1e-3)
    assert matmul_flops(LLAMA_7B, "embedding", 2048) == 0


def test_a_block_runs_at_a_plausible_share_of_the_peak() -> None:
    device = device_type("A100-80G")
    seconds = forward_seconds(device, LLAMA_7B, "block", "bf16", 2048, 1, 4)
    share = matmul_flops(LLAMA_7B, "block", 2048) * 4 / seconds / 312e12
    assert 0.35 < share < 0.55
    narrow = ModelSpec(layers=4, hidden=512, heads=8, ffn=1376, vocab=256)
    slow = matmul_flops(narrow, "block", 256) / forward_seconds(device, narrow, "block", "bf16", 256, 1, 1) / 312e12
    assert slow < 0.1


def test_more_samples_cost_more_and_tp_costs_exchange() -> None:
    costs = make_costs(make_job(LLAMA_7B, "bf16", 2048))
    one, two = (costs.part("block", "g-0", 1, samples).total_s for samples in (1, 2))
    assert one < two < 2 * one
    cut = costs.part("block", "g-0", 2, 2)
    assert two / 2 < cut.total_s < two
    assert cut.tensor_forward_s == cut.tensor_backward_s > 0
    assert costs.part("head", "g-0", 2, 2).tensor_backward_s > 0
    assert costs.part("embedding", "g-0", 2, 2).tensor_backward_s == 0


def test_devices_of_a_group_exchange_faster() -> None:
    costs = make_costs()
    assert costs.all_reduce_s("g-0", 2, 1e9) < 0.5 * costs.all_reduce_s("g-0", 4, 1e9)


@pytest.mark.parametrize(
    ("here", "there", "bytes_per_s", "latency_s"),
    [
        ("c-0", "c-1", 1e9, 300e-6),
        ("c-0", "c-0", 10e9, 100e-6),
        ("g-0", "g-0", 100e9, 15e-6),
        ("c-0", "w-0", 1e8, 0.06),
        ("w-0", "c-0", 1e8, 0.06),
        ("x-0", "c-0", 1e9, 300e-6),
    ],
)
def test_links(here: str, there: str, bytes_per_s: float, latency_s: float) -> None:
    link = make_costs().link(here, there)
    assert (link.bytes_per_s, link.latency_s) == (bytes_per_s, latency_s)


def test_a_link_of_a_zone_to_itself_is_about_its_nodes() -> None:
    nodes = [{"name": name, "device": "T4", "count": 2, "inter_gbit_per_s": 8, "zone": name} for name in ("a", "b")]
    links = [{"from": "a", "to": "a", "gbit_per_s": 4, "latency_ms": 0}]
    costs = CostModel(make_job(), parse_cluster({"nodes": nodes, "links": links}), Profile())
    assert costs.link("a-0", "a-1") == LinkCost(latency_s=0.0, bytes_per_s=0.5e9)
    assert costs.link("b-0", "b-1") == costs.link("a-0", "b-0") == LinkCost(latency_s=60e-6, bytes_per_s=1e9)
    # Within a node nothing is slower to start than between nodes, and the rate is the node's own.
    assert costs.link("a-0", "a-0") == LinkCost(latency_s=0.0, bytes_per_s=10e9)
    assert costs.link("b-0", "b-0").latency_s > 0


def test_a_measured_link_replaces_the_catalogue() -> None:
    figures = tuple(
        LinkFigure(from_node="c-1", to_node="c-0", latency_s=latency_s, bytes_per_s=5.0, source="")
        for latency_s in (1.0, 2.0)
    )
    assert make_costs(profile=Profile(links=figures)).link("c-0", "c-1").latency_s == 2.0


def test_the_optimizer_is_bound_by_memory_or_measured() -> None:
    assert make_costs().update_s("c-0", 10e9 / 32) == pytest.approx(1.0)
    rates = Profile(updates=(UpdateRate(device="cpu-1t", elements_per_s=5.0, source=""),))
    assert make_costs(profile=rates).update_s("c-0", 10) == 2.0
    assert make_costs(profile=rates).update_s("w-0", 20e9 / 32) == pytest.approx(1.0)


def test_state_on_the_host_of_a_cpu_is_updated_by_the_cpu_itself() -> None:
    """As on the device, with gradients and weights copied once more."""
    rates = Profile(updates=(UpdateRate(device="cpu-1t", elements_per_s=5.0, source=""),))
    assert make_costs(profile=rates).update_s("c-0", 10, 5) == pytest.approx(2.0 + 5 * 2 * 8 / 10e9)


def test_half_an_exchange_goes_at_the_slowest_link() -> None:
    """(n-1)/n of the bytes; within a node at its rate, between nodes at the slower node's."""
    costs = make_costs()
    inside = costs.half_exchange_s(frozenset({("g-0", 1)}), 2, 4e9)
    assert inside == pytest.approx(4e9 / 2 / costs.link("g-0", "g-0").bytes_per_s, rel=1e-3)
    between = costs.half_exchange_s(frozenset({("g-0", 1), ("c-0", 1)}), 4, 4e9)
    assert between == pytest.approx(4e9 * 3 / 4 / costs.link("g-0", "c-0").bytes_per_s, rel=1e-3)
    assert costs.half_exchange_s(frozenset({("g-0", 1), ("c-0", 1)}), 64, 0.0) < 64 * costs.link("g-0", "c-0").latency_s


def test_what_replicas_of_a_node_exchange_crosses_its_interfaces_once() -> None:
    """Round a ring that visits a node's replicas one after the other, whatever part of the state each of them owns."""
    costs = make_costs()
    holders = tuple(
        Holder(pipeline=pipeline, stage=0, replica=0, node=node, tp=1, share=share)
        for pipeline, (node, share) in enumerate((("g-0", 3.0), ("g-0", 1.0), ("c-0", 4.0)))
    )
    found = unit_exchange(Segment(first=1, last=2, holders=holders), costs)
    moved = unit_elements(costs.job.model, 1, 1) * 4 * 2 / 3
    assert dict(found.network_s) == pytest.approx({node: moved / costs.node_rate(node) for node in ("g-0", "c-0")})
    assert found.seconds >= max(seconds for _, seconds in found.network_s)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
def test_units_add_up_to_the_model(tie: bool) -> None:
    model = dataclasses.replace(LLAMA_7B, tie_embeddings=tie)
    units = sum(unit_elements(model, unit, 1) for unit in range(model.layers + 2))
    assert units == num_parameters(model) == held_elements(model, 1, model.layers, embedding=True, head=True)


@pytest.mark.parametrize("tie", [True, False])
def test_so_they_do_where_positions_are_learned(tie: bool) -> None:
    """Of two ends that are tied, the table of positions is the first one's alone."""
    learned = dataclasses.replace(
        LLAMA_7B, tie_embeddings=tie, learned_positions=1024, norm="layer", qkv_bias=True, mlp_bias=True
    )
    units = [unit_elements(learned, unit, 1) for unit in range(learned.layers + 2)]
    assert sum(units) == num_parameters(learned) == held_elements(learned, 1, learned.layers, embedding=True, head=True)
    assert units[-1] == 2 * 4096 + (0 if tie else 32000 * 4096)
    assert held_elements(learned, 1, 0, embedding=False, head=True) == 2 * 4096 + 32000 * 4096


def test_a_tied_embedding_is_held_at_both_ends() -> None:
    model = dataclasses.replace(LLAMA_7B, tie_embeddings=True)
    weight = 32000 * 4096
    assert held_elements(model, 1, 0, embedding=True, head=False) == weight
    assert held_elements(model, 1, 0, embedding=False, head=True) == weight + 4096
    assert part_elements(model, "embedding", 2) == weight // 2


def test_activations_of_a_block_are_counted_by_what_is_kept() -> None:
    """Four of the norms, q and the output, k and v (of one key head for three, or copied for all), gate, up, silu(gate)
    and the product; of each norm a deviation, and of each head a logarithm. What the engine keeps is tested beside
    it (`tests/workers/test_engine_activations.py`)."""
    model = ModelSpec(layers=8, hidden=384, heads=6, kv_heads=2, ffn=1024, vocab=1024)
    widths = 4 * 384 + 2 * 384 + 4 * 1024
    statistics = 4 * (2 + 6)
    assert block_activation_bytes(model, 128, "bf16", 1, "none") == 128 * (2 * (widths + 2 * 128) + statistics)
    assert block_activation_bytes(model, 128, "fp32", 1, "none") == 128 * (4 * (widths + 2 * 384) + statistics)


def test_memory_of_a_stage_is_linear_in_its_layers() -> None:
    def total(layers: int, in_flight: int) -> float:
        return stage_memory(
            LLAMA_7B, 2048, "bf16", tp=2, samples=1, in_flight=in_flight, layers={"none": layers},
            embedding=True, head=False, owned=float(layers),
        ).total  # fmt: skip

    for in_flight in (1, 3):
        assert total(3, in_flight) - total(2, in_flight) == pytest.approx(total(1, in_flight) - total(0, in_flight))


def test_state_bytes_of_a_stage() -> None:
    found = stage_memory(
        LLAMA_7B, 2048, "bf16", tp=1, samples=2, in_flight=1, layers={"none": 1}, embedding=False, head=True, owned=10.0
    )
    held = held_elements(LLAMA_7B, 1, 1, embedding=False, head=True)
    assert (found.weights, found.gradients, found.optimizer) == (2 * held, 4 * held, 120)
    assert found.staging == 2 * 4 * max(part_elements(LLAMA_7B, "block", 1), part_elements(LLAMA_7B, "head", 1))


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_two_whole_units_are_sent_and_received_at_once(precision: str, size: int) -> None:
    found = stage_memory(
        LLAMA_7B, 128, precision, tp=1, samples=1, in_flight=1, layers={"none": 1}, embedding=False, head=False,
        owned=0.0,
    )  # fmt: skip
    assert found.staging == 2 * 2 * size * part_elements(LLAMA_7B, "block", 1)


def test_logits_and_exchanges_are_never_there_at_once() -> None:
    """Unless each micro-batch exchanges weights or gradients. With a large vocabulary the head is the widest moment,
    else a block beside what is exchanged."""

    def total(vocab: int, **parts: float) -> tuple[float, StageBytes]:
        model = dataclasses.replace(LLAMA_7B, vocab=vocab)
        memory = stage_memory(
            model, 2048, "bf16", tp=1, samples=2, in_flight=1, layers={"none": 1}, embedding=False, head=True,
            owned=0.0, **parts,
        )  # fmt: skip
        line = stage_bytes(model, 2048, "bf16", 1, 2, embedding=False, head=True)
        state = memory.weights + memory.gradients + line.flight + line.border + line.block_flight["none"]
        return memory.total - state, line

    few, line = total(1000)
    assert few == pytest.approx(line.staging + line.backward) and few > line.logits
    many, line = total(200_000)
    assert many == pytest.approx(line.logits) and line.staging > line.backward
    split, line = total(200_000, gradients=0.5)
    assert split == pytest.approx(line.logits + line.staging + 4 * line.largest)


def test_what_heads_keep_of_micro_batches_that_wait_is_counted() -> None:
    """Where groups of micro-batches get smaller, the last stage runs ahead of its backwards."""

    def waiting(stage: int, micro_batches: int, chunks: int) -> int:
        place = Place(stage=stage, stages=3, micro_batches=micro_batches, chunks=chunks)
        return max(moment.waiting for moment in fullest("interleaved", place))

    assert [waiting(2, 16, 2), waiting(2, 16, 3)] == [1, 2]
    assert waiting(2, 15, 2) == waiting(1, 16, 2) == 0
    line = stage_bytes(LLAMA_7B, 2048, "bf16", 1, 2, embedding=False, head=True)
    chunks: list[dict[Recompute, int]] = [{"none": 1}, {"none": 1}]
    one, other = (kept_bytes(line, InFlight(forward=(2, 2), waiting=heads), chunks, 0.0) for heads in (0, 2))
    assert other - one == pytest.approx(2 * 2 * 2048 * (4 * 32000 + 2 * 2 * 4096))


def test_headroom_and_snapshots() -> None:
    assert usable_bytes(device_type("cpu-2t")) == pytest.approx(2 * GIB * 0.95)
    assert usable_bytes(device_type("T4")) == pytest.approx(15 * GIB * 0.95 - GIB * 0.6)
    assert snapshot_bytes(100) == 2 * 2 * 12 * 100


def test_recomputation_keeps_less_and_holds_one_block_more_while_it_runs() -> None:
    def activations(layers: dict[Recompute, int]) -> float:
        return stage_memory(
            LLAMA_7B, 2048, "bf16", tp=1, samples=1, in_flight=2, layers=layers, embedding=False, head=False, owned=0.0
        ).activations

    kept: dict[Recompute, float] = {
        kind: block_activation_bytes(LLAMA_7B, 2048, "bf16", 1, kind) for kind in ("none", "selective", "full")
    }
    assert kept["full"] < kept["selective"] < kept["none"]
    for kind in ("selective", "full"):
        saved = activations({"none": 8}) - activations({"none": 3, kind: 5})
        assert saved == pytest.approx(2 * 5 * (kept["none"] - kept[kind]) - kept["none"])


def test_optimizer_state_on_the_host_takes_no_memory_of_the_device() -> None:
    found = stage_memory(
        LLAMA_7B, 2048, "bf16", tp=1, samples=1, in_flight=1, layers={"none": 1}, embedding=False, head=False,
        owned=10.0, offloaded=4.0,
    )  # fmt: skip
    assert found.optimizer == 12 * 6
