"""Bytes out of shards, with what whoever gets them needs to verify them: checksums are those of whole shards. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from shoal_recovery.crc import crc32

Surrounded = tuple[list[memoryview], list[tuple[int, int]]]


def surrounded(content: memoryview, shards: Sequence[tuple[int, int]], wanted: Iterable[tuple[int, int]]) -> Surrounded:
    """`wanted` bytes (offset, length) of `content`, and the CRC-32 of what lies before and behind each in its shard.
    `shards` (offset, length) are sorted. Raises ValueError for bytes that are not within one of them."""
    parts, around = [], []
    offsets = [offset for offset, _ in shards]
    for offset, num_bytes in wanted:
        last = offset + num_bytes
        index = bisect_right(offsets, offset) - 1
        first_of_shard, length = shards[index] if index >= 0 else (offset, 0)
        if not 0 <= offset <= last <= first_of_shard + length <= content.nbytes:
            raise ValueError(f"bytes [{offset}, {last}) are not within one shard")
        parts.append(content[offset:last])
        around.append((crc32(content[first_of_shard:offset]), crc32(content[last : first_of_shard + length])))
    return parts, around
