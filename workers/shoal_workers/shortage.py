"""What is said of a rank that ran out of memory: which stage, how much for what, and what its plan expected.

Owns the words alone. They stand in one line, since that is what events show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_planner.cluster import GIB
from shoal_planner.plan import Plan
from shoal_workers.errors import OutOfDeviceMemory, OutOfHostMemory
from shoal_workers.memory import DeviceMemory

_MIB = 2**20


def shortage(error: BaseException, memory: DeviceMemory, plan: Plan, rank: int, predicted: Mapping[str, Any]) -> str:
    """`error` is that of a ledger, or what the device's own allocator raised; `predicted` what was published of the
    plan's prediction."""
    place = next(place for place in plan.places() if place.rank == rank)
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    layers = ", ".join(f"{first} to {last - 1}" for first, last in stage.layers if first < last) or "none"
    on_host = isinstance(error, OutOfHostMemory)
    expected = predicted.get("host_bytes" if on_host else "memory_bytes", {}).get(str(place.device))
    where = f"the host of {memory.device}" if on_host else memory.device
    believed = "nothing was predicted" if expected is None else f"{readable(expected)} were predicted"
    return (
        f"out of memory on {where} in stage {place.stage} of pipeline {place.pipeline} (layers {layers}): "
        f"{_lack(error, memory)}; {believed} for {'its rank' if on_host else 'this device'}"
    )


def _lack(error: BaseException, memory: DeviceMemory) -> str:
    if not isinstance(error, OutOfDeviceMemory):
        first = str(error).partition("\n")[0].rstrip(".")
        return f"{first}; the buffers of the engine alone are {_sum(dict(memory.in_use))}"
    wanted_bytes = error.need_bytes - sum(num_bytes for _, num_bytes in error.in_use)
    return (
        f"{readable(wanted_bytes)} for {error.what}, beside {_sum(dict(error.in_use))}, make "
        f"{readable(error.need_bytes)}, and it may use {readable(error.limit_bytes)}"
    )


def _sum(in_use: Mapping[str, int]) -> str:
    parts = ", ".join(f"{what} {readable(num_bytes)}" for what, num_bytes in in_use.items())
    return f"{readable(sum(in_use.values()))} ({parts or 'nothing'})"


def readable(num_bytes: float) -> str:
    """Four figures at least, so that what is just too much does not look the same as what there is."""
    return f"{num_bytes / GIB:,.3f} GiB" if num_bytes >= GIB else f"{num_bytes / _MIB:,.3f} MiB"
