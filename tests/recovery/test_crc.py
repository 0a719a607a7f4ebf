"""Checksums of runs that are put together from those of their parts."""

from __future__ import annotations

import itertools
import zlib

from hypothesis import given
from hypothesis import strategies as st

from shoal_recovery.crc import checksum, joined


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_the_parts_give_the_sum_of_the_whole(data: bytes, cuts: list[int]) -> None:
    borders = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    parts = [data[first:last] for first, last in itertools.pairwise(borders)]
    assert joined((zlib.crc32(part), len(part)) for part in parts) == checksum(data) == checksum(*parts)


def test_runs_may_be_longer_than_anything_at_hand() -> None:
    """2 ** 40 zero bytes, doubled up from one."""
    value, num_bytes = zlib.crc32(b"\0"), 1
    while num_bytes < 2**40:
        value, num_bytes = int(joined([(value, num_bytes)] * 2).removeprefix("crc32:"), 16), 2 * num_bytes
    assert joined([(zlib.crc32(b"\0" * 1000), 1000), (value, num_bytes - 1000)]) != f"crc32:{value:08x}"
    assert joined([(zlib.crc32(b""), 0), (value, num_bytes)]) == f"crc32:{value:08x}"
