"""Cuts a rank's restore into parts, so that it can tell of progress between them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from shoal_recovery.state import Transfer

PART_BYTES = 1 << 28


def in_parts(transfers: Iterable[Transfer], part_bytes: int = PART_BYTES) -> Iterator[tuple[Transfer, ...]]:
    """Parts of about this many bytes, at least one. Every part takes from all sources that still have something,
    evenly; weights that are made of master weights come last, when those are there."""
    last_bytes: Counter[tuple[str, str, str]] = Counter()
    places: list[tuple[bool, int, Transfer]] = []
    for transfer in transfers:
        source = (transfer.tier.value, transfer.node or "", transfer.name or "")
        last_bytes[source] += transfer.num_bytes
        places.append((transfer.is_derived, last_bytes[source], transfer))
    part: list[Transfer] = []
    num_bytes = 0
    for _, _, transfer in sorted(places, key=lambda place: place[:2]):
        if part and num_bytes + transfer.num_bytes > part_bytes:
            yield tuple(part)
            part, num_bytes = [], 0
        part.append(transfer)
        num_bytes += transfer.num_bytes
    yield tuple(part)
