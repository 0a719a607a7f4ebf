"""Checksums of runs that are put together from those of their parts."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_recovery import crc
from shoal_recovery.crc import checksum, joined


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_the_parts_give_the_sum_of_the_whole(data: bytes, cuts: list[int]) -> None:
    borders = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    parts = [data[first:last] for first, last in itertools.pairwise(borders)]
    assert joined((zlib.crc32(part), len(part)) for part in parts) == checksum(data) == checksum(*parts)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_003])
@pytest.mark.parametrize("library", [crc._LIBRARY, "libnowhere.so.0"])
def test_whichever_library_takes_the_sum_it_is_the_same(
    size: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crc, "_LIBRARY", library)
    crc._libdeflate.cache_clear()
    try:
        data = random.Random(size).randbytes(size)
        for form in (data, bytearray(data), memoryview(data), memoryview(bytearray(data)), memoryview(b"." + data)[1:]):
            assert crc.crc32(form) == zlib.crc32(data)
            assert crc.crc32(form, 0x12345678) == zlib.crc32(data, 0x12345678)
    finally:
        crc._libdeflate.cache_clear()


def test_runs_may_be_longer_than_anything_at_hand() -> None:
    """2 ** 40 zero bytes, doubled up from one."""
    value, num_bytes = zlib.crc32(b"\0"), 1
    while num_bytes < 2**40:
        value, num_bytes = int(joined([(value, num_bytes)] * 2).removeprefix("crc32:"), 16), 2 * num_bytes
    assert joined([(zlib.crc32(b"\0" * 1000), 1000), (value, num_bytes - 1000)]) != f"crc32:{value:08x}"
    assert joined([(zlib.crc32(b""), 0), (value, num_bytes)]) == f"crc32:{value:08x}"
