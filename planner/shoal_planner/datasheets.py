"""Figures of device types as their makers publish them, and where.

Owns the table alone. Rates are dense (no structured sparsity), and those that hold with sums in fp32: GeForce cards
reach half of their fp16 figure then. Memory is what the driver shows (binary GiB), less than the label where error
correction takes a part. A link's rate is nominal, in one direction, of one device to the others of its node: NVLink or
Infinity Fabric where nodes usually have it, else PCI Express x16. `efficiency` is not from a datasheet: it is our
estimate of the share of the peak that large matrix products reach, lower where a power limit (T4, L4) or a low rate
of memory holds the clock or the units back; measurements replace it.
"""

from __future__ import annotations

from typing import NamedTuple

PCIE3, PCIE4, PCIE5 = 15.8, 31.5, 63.0
BUS_BYTES_PER_S = 10e9  # where a bus is shared, and all bytes pass through the host


class Datasheet(NamedTuple):
    """GiB of memory; 10^12 operations per second in fp32, tf32, fp16 and bf16 (None: no unit for it); GB/s of memory;
    share of the peak; GB/s of the link within a node; devices that a node usually has; where the figures stand."""

    memory_gib: float
    fp32: float
    tf32: float | None
    fp16: float | None
    bf16: float | None
    memory_gb_per_s: float
    efficiency: float
    link_gb_per_s: float
    node_sizes: tuple[int, ...]
    source: str


_SERVER = (1, 2, 4, 8)
_HGX = (4, 8)
_DESK = (1, 2, 4)

# fmt: off
DATASHEETS: dict[str, Datasheet] = {
    # NVIDIA, data centre
    "P100-16G": Datasheet(15.9, 9.3, None, 18.7, None, 732, 0.6, PCIE3, _SERVER, "NVIDIA Tesla P100 PCIe datasheet"),
    "V100-16G": Datasheet(16, 15.7, None, 125, None, 900, 0.45, 150, _SERVER, "NVIDIA V100 SXM2 datasheet"),
    "V100-32G": Datasheet(32, 15.7, None, 125, None, 900, 0.45, 150, _HGX, "NVIDIA V100 SXM2 32 GB datasheet"),
    "T4": Datasheet(15, 8.1, None, 65, None, 320, 0.35, PCIE3, _SERVER, "NVIDIA T4 datasheet"),
    "A10": Datasheet(22.5, 31.2, 62.5, 125, 125, 600, 0.45, PCIE4, _SERVER, "NVIDIA A10 datasheet"),
    "A10G": Datasheet(22.5, 31.5, 35, 70, 70, 600, 0.5, PCIE4, _SERVER, "NVIDIA A10G product brief (EC2 G5)"),
    "A30": Datasheet(24, 10.3, 82, 165, 165, 933, 0.5, PCIE4, _SERVER, "NVIDIA A30 datasheet"),
    "A40": Datasheet(45, 37.4, 74.8, 149.7, 149.7, 696, 0.5, PCIE4, _SERVER, "NVIDIA A40 datasheet"),
    "A100-40G": Datasheet(40, 19.5, 156, 312, 312, 1555, 0.55, 300, _HGX, "NVIDIA A100 SXM4 40 GB datasheet"),
    "A100-80G": Datasheet(80, 19.5, 156, 312, 312, 2039, 0.55, 300, _HGX, "NVIDIA A100 SXM4 80 GB datasheet"),
    "A100-PCIE-40G": Datasheet(40, 19.5, 156, 312, 312, 1555, 0.5, PCIE4, _SERVER, "NVIDIA A100 PCIe 40 GB datasheet"),
    "A100-PCIE-80G": Datasheet(80, 19.5, 156, 312, 312, 1935, 0.5, PCIE4, _SERVER, "NVIDIA A100 PCIe 80 GB datasheet"),
    "A800-80G": Datasheet(80, 19.5, 156, 312, 312, 2039, 0.55, 200, _HGX, "NVIDIA A800 SXM4 80 GB datasheet"),
    "H20-96G": Datasheet(95.5, 44, 74, 148, 148, 4000, 0.7, 450, (8,), "NVIDIA H20 datasheet"),
    "H100-80G": Datasheet(79.6, 67, 495, 989, 989, 3350, 0.55, 450, _HGX, "NVIDIA H100 SXM5 datasheet"),
    "H100-PCIE-80G": Datasheet(79.6, 51, 378, 756, 756, 2000, 0.5, PCIE5, _SERVER, "NVIDIA H100 PCIe datasheet"),
    "H100-NVL-94G": Datasheet(93.5, 60, 417, 835, 835, 3938, 0.5, PCIE5, _SERVER, "NVIDIA H100 NVL datasheet"),
    "H800-80G": Datasheet(79.6, 67, 495, 989, 989, 3350, 0.55, 200, (8,), "NVIDIA H800 SXM5 datasheet"),
    "H200-141G": Datasheet(140.4, 67, 495, 989, 989, 4800, 0.55, 450, _HGX, "NVIDIA H200 SXM datasheet"),
    "GH200-96G": Datasheet(95.5, 67, 495, 989, 989, 4000, 0.55, 450, (1, 4), "NVIDIA GH200 Grace Hopper datasheet"),
    "B200-180G": Datasheet(179, 75, 1100, 2250, 2250, 7700, 0.5, 900, (8,), "NVIDIA DGX B200 datasheet"),
    "L4": Datasheet(22.5, 30.3, 60, 121, 121, 300, 0.35, PCIE4, _SERVER, "NVIDIA L4 datasheet"),
    "L40": Datasheet(45, 90.5, 90.5, 181, 181, 864, 0.5, PCIE4, _SERVER, "NVIDIA L40 datasheet"),
    "L40S": Datasheet(45, 91.6, 183, 362, 362, 864, 0.45, PCIE4, _SERVER, "NVIDIA L40S datasheet"),
    # NVIDIA, workstation
    "A4000": Datasheet(16, 19.2, 38.3, 76.7, 76.7, 448, 0.5, PCIE4, _DESK, "NVIDIA RTX A4000 datasheet"),
    "A5000": Datasheet(24, 27.8, 55.6, 111.1, 111.1, 768, 0.5, PCIE4, _SERVER, "NVIDIA RTX A5000 datasheet"),
    "A6000": Datasheet(48, 38.7, 77.4, 154.8, 154.8, 768, 0.5, PCIE4, _SERVER, "NVIDIA RTX A6000 datasheet"),
    "RTX6000Ada": Datasheet(48, 91.1, 182.1, 364.2, 364.2, 960, 0.45, PCIE4, _SERVER, "NVIDIA RTX 6000 Ada datasheet"),
    "RTXPRO6000-96G": Datasheet(95.5, 125, 252, 504, 504, 1792, 0.45, PCIE5, _SERVER, "NVIDIA RTX PRO 6000 datasheet"),
    # NVIDIA, desktop
    "TitanRTX": Datasheet(24, 16.3, None, 130.5, None, 672, 0.4, PCIE3, _DESK, "NVIDIA Turing white paper"),
    "RTX2080": Datasheet(8, 10.1, None, 40.3, None, 448, 0.5, PCIE3, _DESK, "NVIDIA Turing white paper"),
    "RTX2080Ti": Datasheet(11, 13.4, None, 53.8, None, 616, 0.5, PCIE3, _DESK, "NVIDIA Turing white paper"),
    "RTX3060": Datasheet(12, 12.7, 12.7, 25.5, 25.5, 360, 0.55, PCIE4, _DESK, "NVIDIA Ampere GA10x specification"),
    "RTX3080": Datasheet(10, 29.8, 29.8, 59.5, 59.5, 760, 0.55, PCIE4, _DESK, "NVIDIA Ampere GA102 white paper"),
    "RTX3080Ti": Datasheet(12, 34.1, 34.1, 68.2, 68.2, 912, 0.55, PCIE4, _DESK, "NVIDIA Ampere GA102 white paper"),
    "RTX3090": Datasheet(24, 35.6, 35.6, 71.2, 71.2, 936, 0.55, PCIE4, _DESK, "NVIDIA Ampere GA102 white paper"),
    "RTX4080": Datasheet(16, 48.7, 48.7, 97.5, 97.5, 717, 0.5, PCIE4, _DESK, "NVIDIA Ada white paper"),
    "RTX4090": Datasheet(24, 82.6, 82.6, 165.2, 165.2, 1008, 0.5, PCIE4, _DESK, "NVIDIA Ada white paper"),
    "RTX5080": Datasheet(15.9, 56.3, 56.3, 112.6, 112.6, 960, 0.5, PCIE5, _DESK, "NVIDIA RTX Blackwell white paper"),
    "RTX5090": Datasheet(31.8, 104.8, 104.8, 209.5, 209.5, 1792, 0.5, PCIE5, _DESK, "NVIDIA RTX Blackwell white paper"),
    # AMD; MI250X: one of the two dies, which is what a program sees as a device
    "MI100": Datasheet(32, 23.1, None, 184.6, 92.3, 1229, 0.4, PCIE4, _HGX, "AMD Instinct MI100 datasheet"),
    "MI210": Datasheet(64, 22.6, None, 181, 181, 1638, 0.4, PCIE4, _HGX, "AMD Instinct MI210 datasheet"),
    "MI250X": Datasheet(64, 23.9, None, 191.5, 191.5, 1638, 0.4, 50, (8,), "AMD Instinct MI250X datasheet, per die"),
    "MI300X": Datasheet(192, 163.4, 653.7, 1307.4, 1307.4, 5300, 0.4, 448, (8,), "AMD Instinct MI300X datasheet"),
    "MI325X": Datasheet(256, 163.4, 653.7, 1307.4, 1307.4, 6000, 0.4, 448, (8,), "AMD Instinct MI325X datasheet"),
}
# fmt: on


def usual_link_bytes_per_s(device: str) -> float:
    """Between devices of a node of which nobody said: the device's own links where it has such, else what usually is
    left of a bus."""
    sheet = DATASHEETS.get(device)
    return BUS_BYTES_PER_S if sheet is None or sheet.link_gb_per_s <= PCIE5 else sheet.link_gb_per_s * 1e9
