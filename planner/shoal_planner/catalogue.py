"""What is publicly known of device types: the figures that hold until something was measured.

Owns what a device type is, the CPU kinds, how a cluster file changes a type, and the answer to an unknown one. Does
not own published figures (`datasheets`) nor measured ones (`profile`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shoal_planner.cluster import GIB, DeviceOverride
from shoal_planner.datasheets import DATASHEETS
from shoal_planner.errors import InvalidField

Precision = Literal["fp32", "tf32", "fp16", "bf16"]

# An addition to the catalogue that does not say how good it is gets these.
_DEFAULT_EFFICIENCY = 0.5
_DEFAULT_MEMORY_BYTES_PER_S = 500e9
# What the start of a kernel costs where nobody measured it.
GPU_KERNEL_S = 8e-6
CPU_KERNEL_S = 12e-6
_NUM_NEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tflops:
    """Peak dense rates in 10^12 operations per second; None where the device has no unit for it."""

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """`efficiency` is the share of the peak that large matrix products reach, or, where `efficiency_stated` in the
    cluster file, the share that this job reaches. `threads` is None unless it is a CPU; `kernel_s` is what the start of
    a kernel costs, `passes` how often activations cross memory, over what `compute` counts. `link_bytes_per_s` and
    `node_sizes` tell of usual nodes: no cost rests on them where a cluster says what it has."""

    name: str
    memory_bytes: int
    tflops: Tflops
    memory_bytes_per_s: float
    efficiency: float
    threads: int | None = None
    kernel_s: float = GPU_KERNEL_S
    passes: float = 1.0
    efficiency_stated: bool = False
    link_bytes_per_s: float | None = None
    node_sizes: tuple[int, ...] = ()
    source: str = "datasheet"

    def flops_per_s(self, precision: Precision) -> float:
        """Peak of one device. Without units for `precision`, products are computed in fp32 and rounded."""
        found: float | None = getattr(self.tflops, precision)
        if found is None:
            found = self.tflops.fp32 or max(self.tflops.tf32 or 0.0, self.tflops.bf16 or 0.0, self.tflops.fp16 or 0.0)
        return found * 1e12


def _gpu(name: str) -> DeviceType:
    sheet = DATASHEETS[name]
    return DeviceType(
        name=name,
        memory_bytes=int(sheet.memory_gib * GIB),
        tflops=Tflops(fp32=sheet.fp32, tf32=sheet.tf32, fp16=sheet.fp16, bf16=sheet.bf16),
        memory_bytes_per_s=sheet.memory_gb_per_s * 1e9,
        efficiency=sheet.efficiency,
        link_bytes_per_s=sheet.link_gb_per_s * 1e9,
        node_sizes=sheet.node_sizes,
        source=sheet.source,
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
        kernel_s=CPU_KERNEL_S,
        source="typical x86 core with 512-bit vectors",
    )


CATALOGUE: dict[str, DeviceType] = {
    **{name: _gpu(name) for name in DATASHEETS},
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
        raise InvalidField("device", name, f"is not a known device type; {_hint(name)}")
    _check(found)
    return found


def _hint(name: str) -> str:
    """The nearest names of the catalogue, first those that begin alike; case and hyphens do not keep apart."""
    plain = {_plain(known): known for known in CATALOGUE}
    wanted = _plain(name)
    longer = [found for found in plain if wanted and found.startswith(wanted)]
    close = difflib.get_close_matches(wanted, [found for found in plain if found not in longer], n=_NUM_NEAREST)
    near = [plain[found] for found in (longer + close)[:_NUM_NEAREST]]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(CATALOGUE)}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


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
    if override.efficiency is not None:
        given["efficiency_stated"] = True
    if override.threads is not None and known.threads is None:
        given["kernel_s"] = CPU_KERNEL_S
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
