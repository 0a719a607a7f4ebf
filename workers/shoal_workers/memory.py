"""Ledgers of memory: every buffer that the engine allocates is charged to one, so a limit holds exactly.

A rank has two: that of its device, and that of the part of its node's own memory that it may use for state. Owns the
sums. Does not own the buffers, and does not ask the allocator: what an allocator keeps is not what is in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal_workers.errors import OutOfDeviceMemory, OutOfHostMemory


class Ledger:
    """What is in use of some memory, by purpose. `limit_bytes` None means no limit. One thread charges."""

    shortage: type[OutOfDeviceMemory] = OutOfDeviceMemory

    def __init__(self, device: str, limit_bytes: int | None) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._in_use: Counter[str] = Counter()
        self._at_peak: Counter[str] = Counter()

    @property
    def in_use(self) -> tuple[tuple[str, int], ...]:
        """Bytes by purpose, now."""
        return tuple((what, count) for what, count in sorted(self._in_use.items()) if count)

    @property
    def breakdown(self) -> Mapping[str, int]:
        """Bytes by purpose at the moment of the peak."""
        return {what: count for what, count in sorted(self._at_peak.items()) if count}

    def charge(self, what: str, num_bytes: int) -> None:
        """Raises `shortage`, and charges nothing, if that is more than the limit."""
        assert num_bytes >= 0, num_bytes
        need_bytes = self.used_bytes + num_bytes
        if self.limit_bytes is not None and need_bytes > self.limit_bytes:
            raise self.shortage(self.device, need_bytes, self.limit_bytes, what, self.in_use)
        self.used_bytes = need_bytes
        self._in_use[what] += num_bytes
        if need_bytes > self.peak_bytes:
            self.peak_bytes = need_bytes
            self._at_peak = self._in_use.copy()

    def release(self, what: str, num_bytes: int) -> None:
        assert 0 <= num_bytes <= self._in_use[what], (what, num_bytes)
        self.used_bytes -= num_bytes
        self._in_use[what] -= num_bytes

    def release_all(self, what: str) -> None:
        """Gives back whatever is charged for this purpose: after an abandoned step, say."""
        self.release(what, self._in_use[what])


class HostMemory(Ledger):
    """What the rank of `device` may use of its node's own memory."""

    shortage = OutOfHostMemory


class DeviceMemory(Ledger):
    """A device's, and beside it what its rank may use of the `host`."""

    def __init__(self, device: str, limit_bytes: int | None, host_limit_bytes: int | None = None) -> None:
        super().__init__(device, limit_bytes)
        self.host = HostMemory(device, host_limit_bytes)
