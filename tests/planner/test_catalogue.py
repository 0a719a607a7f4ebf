"""The published figures of devices: that they are there, that they hang together, and that a wrong name is answered."""

from __future__ import annotations

import pytest

from shoal_planner.catalogue import CATALOGUE, CPU_KERNEL_S, device_type
from shoal_planner.cluster import GIB, DeviceOverride, parse_cluster
from shoal_planner.datasheets import DATASHEETS
from shoal_planner.errors import InvalidField

# (name, GiB at least and at most, TFLOPS in fp32 and in half precision, GB/s) as their makers' datasheets have them.
KNOWN = [
    ("T4", 14, 16, 8.1, 65, 320),
    ("V100-16G", 15, 16, 15.7, 125, 900),
    ("A100-40G", 39, 40, 19.5, 312, 1555),
    ("A100-80G", 79, 80, 19.5, 312, 2039),
    ("H100-80G", 79, 80, 67, 989, 3350),
    ("H200-141G", 131, 141, 67, 989, 4800),
    ("L4", 22, 24, 30.3, 121, 300),
    ("L40S", 44, 48, 91.6, 362, 864),
    ("A10G", 22, 24, 31.5, 70, 600),
    ("RTX3090", 23, 24, 35.6, 71, 936),
    ("RTX4090", 23, 24, 82.6, 165, 1008),
    ("MI300X", 191, 192, 163.4, 1307, 5300),
]


@pytest.mark.parametrize(("name", "least", "most", "fp32", "half", "gb_per_s"), KNOWN)
def test_figures_of_well_known_devices(
    name: str, least: float, most: float, fp32: float, half: float, gb_per_s: float
) -> None:
    device = device_type(name)
    assert least * GIB <= device.memory_bytes <= most * GIB
    assert device.tflops.fp32 == fp32
    assert device.tflops.fp16 == pytest.approx(half, abs=0.5)
    assert device.memory_bytes_per_s == gb_per_s * 1e9


def test_there_are_enough_and_every_figure_has_a_source() -> None:
    assert len(DATASHEETS) >= 25
    for sheet in DATASHEETS.values():
        assert "datasheet" in sheet.source or "white paper" in sheet.source or "specification" in sheet.source \
            or "product brief" in sheet.source  # fmt: skip


@pytest.mark.parametrize("name", DATASHEETS)
def test_figures_hang_together(name: str) -> None:
    """Lower precision is not slower, a bf16 unit has an fp16 unit beside it, memory is read in 5 to 70 ms."""
    device = device_type(name)
    rates = device.tflops
    assert rates.fp32 is not None and rates.fp16 is not None
    assert rates.fp32 <= (rates.tf32 or rates.fp16) <= rates.fp16
    assert rates.bf16 is None or rates.fp16 / 2 <= rates.bf16 <= rates.fp16
    assert 0.005 < device.memory_bytes / device.memory_bytes_per_s < 0.09
    assert device.link_bytes_per_s is not None and 10e9 < device.link_bytes_per_s < device.memory_bytes_per_s
    assert device.node_sizes == tuple(sorted(set(device.node_sizes))) and device.node_sizes
    assert 0.1 < device.efficiency <= 0.75
    assert not device.efficiency_stated


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("A100", "'A100-40G' or 'A100-80G' or 'A100-PCIE-40G'"),
        ("h100-80g", "'H100-80G'"),
        ("RTX 3090", "'RTX3090'"),
        ("titan-rtx", "'TitanRTX'"),
        ("H200", "'H200-141G'"),
    ],
)
def test_an_unknown_device_is_answered_with_the_nearest_names(name: str, nearest: str) -> None:
    with pytest.raises(InvalidField, match=f"is not a known device type; did you mean {nearest}"):
        device_type(name)


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(InvalidField, match=r"known: P100-16G, .*cpu-2t"):
        device_type("%%")


def test_what_a_cluster_file_states_is_marked() -> None:
    stated = device_type("T4", [DeviceOverride(name="T4", efficiency=0.5)])
    assert (stated.efficiency, stated.efficiency_stated, stated.source) == (0.5, True, "cluster file")
    assert not device_type("T4", [DeviceOverride(name="T4", memory_bytes=GIB)]).efficiency_stated
    new = device_type("mine", [DeviceOverride(name="mine", memory_bytes=GIB, tflops_fp32=1.0, threads=2)])
    assert (new.kernel_s, new.efficiency_stated) == (CPU_KERNEL_S, False)
    assert CATALOGUE["cpu-2t"].kernel_s == CPU_KERNEL_S


@pytest.mark.parametrize(
    ("device", "link_bytes_per_s"), [("H100-80G", 450e9), ("V100-16G", 150e9), ("L40S", 10e9), ("cpu-1t", 10e9)]
)
def test_nodes_of_which_nothing_is_said_have_the_links_of_their_devices(device: str, link_bytes_per_s: float) -> None:
    (node,) = parse_cluster({"nodes": [{"name": "n", "device": device}]}).nodes
    assert node.intra_bytes_per_s == link_bytes_per_s
    (stated,) = parse_cluster({"nodes": [{"name": "n", "device": device, "intra_gb_per_s": 7}]}).nodes
    assert stated.intra_bytes_per_s == 7e9
