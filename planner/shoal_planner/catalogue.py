"""What is publicly known of device types: the figures that hold until something was measured.

Owns names, memory, peak rates and the share of the peak that large matrix products reach in practice. Rates are dense
(no structured sparsity). Does not own measured figures (`profile`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shoal_planner.cluster import GIB, DeviceOverride
from shoal_planner.errors import InvalidField

Precision = Literal["fp32", "tf32", "fp16", "bf16"]

# An addition to the catalogue that does not say how good it is gets these.
_DEFAULT_EFFICIENCY = 0.5
_DEFAULT_MEMORY_BYTES_PER_S = 500e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tflops:
    """Peak dense rates in 10^12 operations per second; None where the device has no unit for it."""

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """`efficiency` is the share of the peak that large matrix products reach; `threads` is None unless it is a CPU."""

    name: str
    memory_bytes: int
    tflops: Tflops
    memory_bytes_per_s: float
    efficiency: float
    threads: int | None = None
    source: str = "datasheet"

    def flops_per_s(self, precision: Precision) -> float:
        """Peak of one device. Without units for `precision`, products are computed in fp32 and rounded."""
        found: float | None = getattr(self.tflops, precision)
        if found is None:
            found = self.tflops.fp32 or max(self.tflops.tf32 or 0.0, self.tflops.bf16 or 0.0, self.tflops.fp16 or 0.0)
        return found * 1e12


# name: GiB, then TFLOPS fp32, tf32, fp16, bf16, then GB/s of memory, then efficiency. Power-limited cards (T4, L4)
# and cards that halve the rate with fp32 accumulation hold a smaller share of their peak.
_GPUS: dict[str, tuple[float, float | None, float | None, float | None, float | None, float, float]] = {
    "P100-16G": (16, 9.3, None, 18.7, None, 732, 0.6),
    "V100-16G": (16, 15.7, None, 125, None, 900, 0.45),
    "V100-32G": (32, 15.7, None, 125, None, 900, 0.45),
    "T4": (15, 8.1, None, 65, None, 320, 0.15),
    "A10": (22.5, 31.2, 62.5, 125, 125, 600, 0.45),
    "A10G": (22.5, 31.5, 35, 70, 70, 600, 0.5),
    "A30": (24, 10.3, 82, 165, 165, 933, 0.5),
    "A40": (45, 37.4, 74.8, 149.7, 149.7, 696, 0.5),
    "A6000": (48, 38.7, 77.4, 154.8, 154.8, 768, 0.5),
    "A100-40G": (40, 19.5, 156, 312, 312, 1555, 0.55),
    "A100-80G": (80, 19.5, 156, 312, 312, 2039, 0.55),
    "A800-80G": (80, 19.5, 156, 312, 312, 2039, 0.55),
    "H20-96G": (96, 44, 74, 148, 148, 4000, 0.7),
    "H100-80G": (80, 67, 495, 989, 989, 3350, 0.55),
    "H800-80G": (80, 67, 495, 989, 989, 3350, 0.55),
    "H200-141G": (141, 67, 495, 989, 989, 4800, 0.55),
    "B200-180G": (180, 75, 1100, 2250, 2250, 7700, 0.5),
    "L4": (22.5, 30.3, 60, 121, 121, 300, 0.35),
    "L40": (45, 90.5, 90.5, 181, 181, 864, 0.5),
    "L40S": (45, 91.6, 183, 362, 362, 864, 0.45),
    "TitanRTX": (24, 16.3, None, 130, None, 672, 0.4),
    "RTX2080": (8, 10.1, None, 40.3, None, 448, 0.5),
    "RTX2080Ti": (11, 13.4, None, 53.8, None, 616, 0.5),
    "RTX3080Ti": (12, 34.1, 34.1, 68.2, 68.2, 912, 0.55),
    "RTX3090": (24, 35.6, 35.6, 71.2, 71.2, 936, 0.55),
    "RTX4090": (24, 82.6, 82.6, 165.2, 165.2, 1008, 0.5),
    "RTX5090": (32, 104.8, 104.8, 209.5, 209.5, 1792, 0.5),
}


def _gpu(name: str) -> DeviceType:
    memory_gib, fp32, tf32, fp16, bf16, gb_per_s, efficiency = _GPUS[name]
    return DeviceType(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        tflops=Tflops(fp32=fp32, tf32=tf32, fp16=fp16, bf16=bf16),
        memory_bytes_per_s=gb_per_s * 1e9,
        efficiency=efficiency,
    )


def _cpu(threads: int) -> DeviceType:
    """The CPU kinds of the embedded cluster. Their true figures are measured at the start of a cluster."""
    return DeviceType(
        name=f"cpu-{threads}t",
        memory_bytes=threads * GIB,
        tflops=Tflops(fp32=0.12 * threads, bf16=0.3 * threads),
        memory_bytes_per_s=10e9 * threads,
        efficiency=0.75,
        threads=threads,
        source="typical x86 core with 512-bit vectors",
    )


CATALOGUE: dict[str, DeviceType] = {
    **{name: _gpu(name) for name in _GPUS},
    **{f"cpu-{threads}t": _cpu(threads) for threads in (1, 2)},
}


def device_type(name: str, overrides: Iterable[DeviceOverride] = ()) -> DeviceType:
    """The figures of this type, with the overrides of that name applied; the last one wins.

    An override of a name that the catalogue lacks defines a new type if it gives memory and a rate.
    Raises InvalidField.
    """
    found = CATALOGUE.get(name)
    for override in overrides:
        if override.name == name:
            found = _new(override) if found is None else _changed(found, override)
    if found is None:
        near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(CATALOGUE)}"
        raise InvalidField("device", name, f"is not a known device type; {hint}")
    _check(found)
    return found


def _new(override: DeviceOverride) -> DeviceType:
    field = f"devices.{override.name}"
    if override.memory_bytes is None:
        raise InvalidField(f"{field}.memory_gib", None, "is required for a type that the catalogue does not know")
    if override.tflops_fp32 is None and override.tflops_bf16 is None:
        problem = "or tflops_fp32 is required for a type that the catalogue does not know"
        raise InvalidField(f"{field}.tflops_bf16", None, problem)
    blank = DeviceType(
        name=override.name,
        memory_bytes=override.memory_bytes,
        tflops=Tflops(),
        memory_bytes_per_s=_DEFAULT_MEMORY_BYTES_PER_S,
        efficiency=_DEFAULT_EFFICIENCY,
    )
    return _changed(blank, override)


def _changed(known: DeviceType, override: DeviceOverride) -> DeviceType:
    given = {
        name: getattr(override, name)
        for name in ("memory_bytes", "memory_bytes_per_s", "efficiency", "threads")
        if getattr(override, name) is not None
    }
    rates = {
        name: getattr(override, f"tflops_{name}")
        for name in ("fp32", "bf16")
        if getattr(override, f"tflops_{name}") is not None
    }
    tflops = dataclasses.replace(known.tflops, **rates)
    return dataclasses.replace(known, **given, tflops=tflops, source="cluster file")


def _check(device: DeviceType) -> None:
    figures = {
        "memory_gib": device.memory_bytes,
        "memory_gb_per_s": device.memory_bytes_per_s,
        "efficiency": device.efficiency,
        "tflops_fp32": device.tflops.fp32,
        "tflops_bf16": device.tflops.bf16,
        "threads": device.threads,
    }
    for name, value in figures.items():
        if value is not None and not value > 0:
            raise InvalidField(f"devices.{device.name}.{name}", value, "must be more than zero")
    if device.efficiency > 1:
        raise InvalidField(f"devices.{device.name}.efficiency", device.efficiency, "must be at most 1")
