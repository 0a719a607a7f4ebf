"""Checksums of runs of bytes, also of runs of which only a part is at hand and of the rest no more than its sum.

CRC-32 as zlib has it: it finds what breaks by itself. It is no proof against somebody who wants to deceive. Pure, but
for the look for libdeflate: where a machine has that, it is asked, as it is some six times as fast as zlib.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable, Iterable

Data = bytes | bytearray | memoryview
Run = tuple[int, int]  # the CRC-32 of some bytes, and how many they are

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # polynomials stand with their lowest power in the highest bit


_LIBRARY = "libdeflate.so.0"
_LEAST_BYTES = 1 << 12  # less is not worth a call by way of ctypes


def crc32(data: Data, value: int = 0) -> int:
    """As `zlib.crc32`. Other threads run meanwhile."""
    fast = _libdeflate()
    if fast is None or len(data) < _LEAST_BYTES:
        return zlib.crc32(data, value)
    if isinstance(data, bytes):
        return fast(value, data, len(data))
    view = memoryview(data).cast("B")
    if view.readonly:  # ctypes gives no address of these
        return zlib.crc32(data, value)
    first = ctypes.c_char.from_buffer(view)  # keeps it where it is
    return fast(value, ctypes.addressof(first), view.nbytes)


def checksum(*parts: Data) -> str:
    """Of the parts as if they were one."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return as_text(value)


def as_text(value: int) -> str:
    return f"crc32:{value:08x}"


def joined(runs: Iterable[Run]) -> str:
    """The checksum of these runs, one after the other."""
    value = 0
    for crc, num_bytes in runs:
        value = _product(_shift(num_bytes), value) ^ crc
    return as_text(value)


@functools.cache
def _libdeflate() -> Callable[[int, bytes | int, int], int] | None:
    try:
        found = ctypes.CDLL(_LIBRARY).libdeflate_crc32
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32
    return found if found(0, b"123456789", 9) == zlib.crc32(b"123456789") else None


def _product(one: int, other: int) -> int:
    """Of polynomials over two elements, modulo that of the CRC."""
    found, power = 0, _ONE
    while one:
        if one & power:
            found ^= other
            one ^= power
        power >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return found


@functools.lru_cache(maxsize=64)
def _square(times: int) -> int:
    """x ** (2 ** times)."""
    if not times:
        return _ONE >> 1
    half = _square(times - 1)
    return _product(half, half)


@functools.lru_cache(maxsize=65536)
def _shift(num_bytes: int) -> int:
    """x ** (8 * num_bytes): what so many bytes behind a run multiply its sum by."""
    found, times = _ONE, 3
    while num_bytes:
        if num_bytes & 1:
            found = _product(found, _square(times))
        num_bytes >>= 1
        times += 1
    return found
