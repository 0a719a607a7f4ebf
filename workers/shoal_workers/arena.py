"""Memory that one process writes and its neighbours on the same node only read.

Owns the mapping and which parts of it are in use. It has no name anywhere: neighbours get a descriptor of it over a
socket, so nothing is left behind when all of them are killed. It is sealed: the kernel refuses every other writable
mapping, so whatever an abandoned or mistaken process does, it never writes into a neighbour.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from bisect import insort

import numpy as np
import torch
from torch import Tensor

_SEALS = 0x2 | 0x4 | 0x10  # F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE: fcntl lacks the last one
_ALIGNMENT = 64


class Arena:
    """As large as the machine's memory, of which only what was ever used exists."""

    def __init__(self) -> None:
        self.num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.fd = os.memfd_create("shoal-exchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.num_bytes)
        self._map = mmap.mmap(self.fd, self.num_bytes, flags=mmap.MAP_SHARED)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._free = [(0, self.num_bytes)]  # offset and size, in order, never adjacent
        self._used: dict[int, int] = {}
        self._readers: dict[int, int] = {}

    def allocate(self, num_bytes: int, readers: int = 1) -> int:
        """The offset of a block for so many `readers`; the lowest that fits, so that the same memory is used again and
        again."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                self._used[offset] = size
                self._readers[offset] = readers
                return offset
        raise MemoryError(f"{num_bytes} bytes more than the memory of this machine are under way to neighbours")

    def free(self, offset: int) -> None:
        """One reader has done with the block; the last one gives it back."""
        self._readers[offset] -= 1
        if self._readers[offset]:
            return
        del self._readers[offset]
        insort(self._free, (offset, self._used.pop(offset)))
        index = next(index for index, (first, _) in enumerate(self._free) if first == offset)
        for low in (index, index - 1):  # with the block behind it, then with the one before
            if 0 <= low < len(self._free) - 1 and sum(self._free[low]) == self._free[low + 1][0]:
                self._free[low : low + 2] = [(self._free[low][0], self._free[low][1] + self._free[low + 1][1])]

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)


class NeighbourArena:
    """A neighbour's memory, read-only. Whoever writes into a view of it is ended by the kernel."""

    def __init__(self, fd: int) -> None:
        """Closes the descriptor."""
        try:
            self._map = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._address = np.frombuffer(self._map, dtype=np.uint8, count=1).ctypes.data

    def view(self, offset: int, like: Tensor) -> Tensor:
        """As many elements of the same type as `like` has, flat; valid as long as this object."""
        # torch warns of buffers that are not writable, and cannot be told that nobody is going to write.
        memory = (ctypes.c_char * (like.numel() * like.itemsize)).from_address(self._address + offset)
        return torch.frombuffer(memory, dtype=like.dtype)
