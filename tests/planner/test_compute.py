"""Analytic seconds of the parts of a model: what they depend on, and that a better device is never slower."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.catalogue import CATALOGUE, DeviceType, Tflops, device_type
from shoal_planner.cluster import DeviceOverride
from shoal_planner.compute import forward_seconds, matmul_flops, model_flops
from shoal_planner.job import ModelSpec
from shoal_planner.profile import Part

LARGE = ModelSpec(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, tie_embeddings=False)
SMALL = ModelSpec(layers=8, hidden=512, heads=8, ffn=1376, vocab=32000)
PARTS: tuple[Part, ...] = ("embedding", "block", "head")


def share(name: str, model: ModelSpec, seq_len: int, samples: int) -> float:
    """Of the peak, in a block's forward."""
    device = device_type(name)
    seconds = forward_seconds(device, model, "block", "bf16", seq_len, 1, samples)
    return matmul_flops(model, "block", seq_len) * samples / seconds / device.flops_per_s("bf16")


def test_the_share_of_the_peak_grows_with_hidden_size_and_tokens() -> None:
    for name in ("A100-80G", "H100-80G", "L4", "RTX3090"):
        shares = [share(name, SMALL, 256, 1), share(name, SMALL, 1024, 1), share(name, LARGE, 1024, 1),
                  share(name, LARGE, 4096, 4)]  # fmt: skip
        assert shares == sorted(shares)
        assert shares[0] < 0.12
        assert shares[-1] < device_type(name).efficiency


def test_large_models_on_large_devices_run_as_is_known_of_them() -> None:
    assert 0.4 < share("A100-80G", LARGE, 2048, 4) < 0.55
    assert 0.3 < share("H100-80G", LARGE, 4096, 4) < 0.55


def test_the_same_shape_fills_a_small_device_better() -> None:
    model = dataclasses.replace(SMALL, hidden=1024, ffn=2816)
    relative = [share(name, model, 512, 1) / device_type(name).efficiency for name in ("L4", "A100-80G", "H100-80G")]
    assert relative == sorted(relative, reverse=True)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("tp", "samples"), [(1, 1), (2, 3)])
def test_a_stated_efficiency_holds_exactly(part: Part, tp: int, samples: int) -> None:
    device = device_type("A100-80G", [DeviceOverride(name="A100-80G", efficiency=0.5)])
    seconds = forward_seconds(device, LARGE, part, "bf16", 2048, tp, samples)
    assert seconds == pytest.approx(matmul_flops(LARGE, part, 2048) * samples / tp / (312e12 * 0.5), rel=1e-12)


def test_a_plain_mlp_has_two_matrices() -> None:
    plain = dataclasses.replace(LARGE, gated_mlp=False)
    missing = 2 * 2048 * LARGE.hidden * LARGE.ffn
    assert matmul_flops(LARGE, "block", 2048) - matmul_flops(plain, "block", 2048) == missing
    assert model_flops(LARGE, 2048) - model_flops(plain, 2048) == 3 * LARGE.layers * missing


def test_grouped_queries_need_fewer_operations() -> None:
    grouped = dataclasses.replace(LARGE, kv_heads=8)
    missing = 2 * 2048 * LARGE.hidden * 2 * (LARGE.hidden - 8 * LARGE.head_dim)
    assert matmul_flops(LARGE, "block", 2048) - matmul_flops(grouped, "block", 2048) == missing


@st.composite
def devices(draw: st.DrawFn) -> tuple[DeviceType, DeviceType]:
    """One, and one that is better in some figure."""
    device = draw(st.sampled_from(sorted(CATALOGUE.values(), key=lambda device: device.name)))
    factor = draw(st.floats(min_value=1.0, max_value=50.0))
    match draw(st.integers(0, 3)):
        case 0:
            peaks = {name: (value or 0.0) * factor or None for name, value in dataclasses.asdict(device.tflops).items()}
            return device, dataclasses.replace(device, tflops=Tflops(**peaks))
        case 1:
            return device, dataclasses.replace(device, memory_bytes_per_s=device.memory_bytes_per_s * factor)
        case 2:
            return device, dataclasses.replace(device, efficiency=min(1.0, device.efficiency * factor))
        case _:
            return device, dataclasses.replace(device, kernel_s=device.kernel_s / factor)


@given(
    devices(), st.sampled_from(PARTS), st.sampled_from([64, 256, 4096]), st.integers(1, 5), st.sampled_from([1, 2, 4])
)
def test_a_better_device_is_never_slower_nor_more_samples_faster(
    pair: tuple[DeviceType, DeviceType], part: Part, hidden: int, samples: int, tp: int
) -> None:
    model = ModelSpec(layers=2, hidden=hidden, heads=8, ffn=3 * hidden, vocab=1000)
    before, after = (forward_seconds(device, model, part, "bf16", 128, tp, samples) for device in pair)
    assert after <= before * (1 + 1e-12)
    assert forward_seconds(pair[0], model, part, "bf16", 128, tp, samples + 1) > before
