"""Whole parameters out of a stored step, for whoever is no rank of a plan. Owns putting pieces together, verified."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_recovery.crc import checksum
from shoal_recovery.errors import StoredPieceCorrupt
from shoal_recovery.manifest import check_whole
from shoal_recovery.state import ELEMENT_BYTES, Kind, Manifest, StoredPiece
from shoal_recovery.store import Store


def read_parameters(
    store: Store, manifest: Manifest, model: ModelSpec, kind: Kind = Kind.MASTER
) -> Iterator[tuple[str, bytearray]]:
    """Each parameter of `model`, in the order of `parameters`, as little-endian float32, row-major. One is in memory at
    a time. Raises StoreError, StoredPieceCorrupt, and InvalidField if the step is not one of this model."""
    check_whole(manifest, model)
    pieces: defaultdict[str, list[StoredPiece]] = defaultdict(list)
    for piece in manifest.pieces:
        if piece.key.kind is kind:
            pieces[piece.key.fqn].append(piece)
    for parameter in parameters(model):
        whole = bytearray(parameter.numel * ELEMENT_BYTES)
        for piece in pieces[parameter.fqn]:
            first = piece.key.first * ELEMENT_BYTES
            whole[first : first + piece.num_bytes] = _read(store, piece)
        yield parameter.fqn, whole


class MasterIntervals:
    """Intervals of parameters, from whole pieces, as these are what can be verified; the last one is kept, in case that
    the next interval is in it too."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._pieces: defaultdict[str, list[StoredPiece]] = defaultdict(list)
        for piece in manifest.pieces:
            if piece.key.kind is Kind.MASTER:
                self._pieces[piece.key.fqn].append(piece)
        self._last: tuple[StoredPiece, bytes] | None = None

    def read(self, fqn: str, first: int, last: int) -> bytearray:
        """Elements [first, last) as little-endian float32. Raises StoreError, StoredPieceCorrupt."""
        found = bytearray((last - first) * ELEMENT_BYTES)
        for piece in self._pieces[fqn]:
            low, high = max(first, piece.key.first), min(last, piece.key.last)
            if low < high:
                content = memoryview(self._content(piece))
                part = content[(low - piece.key.first) * ELEMENT_BYTES : (high - piece.key.first) * ELEMENT_BYTES]
                found[(low - first) * ELEMENT_BYTES : (high - first) * ELEMENT_BYTES] = part
        return found

    def _content(self, piece: StoredPiece) -> bytes:
        if self._last is None or self._last[0] is not piece:
            self._last = None  # two of them may be more than there is room for
            self._last = piece, _read(self._store, piece)
        return self._last[1]


def _read(store: Store, piece: StoredPiece) -> bytes:
    data = store.read(piece.object, piece.offset, piece.num_bytes)
    if checksum(data) != piece.checksum:
        problem = f"{piece.key.fqn} in {piece.object} has checksum {checksum(data)}, not {piece.checksum}"
        raise StoredPieceCorrupt(store.uri, problem)
    return data
