"""Files that hold token ids: back to back (as nanoGPT writes them), or with an index beside them (Megatron).

Owns what such files must be to be read. An index is not read through: its head and its last entries tell whether the
ids are all there, and where documents begin is looked up in it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shoal_planner.errors import InvalidField
from shoal_workers.data_cache import DataCache
from shoal_workers.data_files import check_unused, chosen, find, find_text
from shoal_workers.errors import DataError
from shoal_workers.file_ranges import File
from shoal_workers.numbered import KINDS, TokenFile
from shoal_workers.token_beginnings import check_ids

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, kind of ids, sequences, entries of documents
_DOCUMENTS_AT_ONCE = 64
_NOWHERE = 2**63 - 1
_INDEX_KINDS = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """Where documents begin, as an index tells it: behind the lengths of sequences and the bytes at which these begin
    stands for each document the number of its first sequence, and last how many there are."""

    file: File
    num_sequences: int
    num_entries: int
    token_bytes: int

    def begins(self, first: int, last: int) -> list[int]:
        """See `Index`."""
        if not self.num_documents:
            raise DataError(self.file.name, "in its head", f"{self.num_entries} entries", "tell of no documents")
        low, high = 0, -(-self.num_documents // _DOCUMENTS_AT_ONCE)
        while low < high:  # to the first lot of documents that begins at this token or behind it
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._lot(middle, 1)[0] < first else (low, middle)
        found: list[int] = []
        at = max(0, low - 1)
        while at * _DOCUMENTS_AT_ONCE < self.num_documents and (not found or found[-1] < last):
            found += self._lot(at, _DOCUMENTS_AT_ONCE)
            at += 1
        return [start for start in found if first <= start < last]

    def _lot(self, number: int, most: int) -> list[int]:
        low = number * _DOCUMENTS_AT_ONCE
        return self._starts(low, min(low + most, self.num_documents))

    @property
    def num_documents(self) -> int:
        return max(0, self.num_entries - 1)

    def _starts(self, low: int, high: int) -> list[int]:
        """The tokens at which documents [low, high) begin; of one without sequences, the end of all tokens or less."""
        sequences = self._longs(12 * self.num_sequences + 8 * low, high - low)
        at, end = sequences[0], min(sequences[-1] + 1, self.num_sequences)
        if sequences != sorted(sequences) or not 0 <= at <= sequences[-1] <= self.num_sequences:
            problem = f"is no order of sequences below {self.num_sequences}"
            raise DataError(self.file.name, f"documents {low} to {high - 1}", str(sequences[:3]), problem)
        bytes_ = self._longs(4 * self.num_sequences + 8 * at, end - at) if at < end else []
        starts = [start // self.token_bytes for start in bytes_]
        if starts != sorted(starts):
            raise DataError(self.file.name, f"sequences {at} to {end - 1}", str(starts[:3]), "begin in no order")
        return [starts[one - at] if one < end else _NOWHERE for one in sequences]

    def _longs(self, offset: int, count: int) -> list[int]:
        """Behind the head."""
        return list(struct.unpack(f"<{count}q", self.file.read(_HEAD.size + offset, 8 * count)))


def byte_files(field: str, uri: str, cache: DataCache | None) -> list[TokenFile]:
    """Text whose bytes are its tokens. Raises InvalidField."""
    files = find_text(field, uri, cache)
    return [TokenFile(file, KINDS["uint8"], file.num_bytes, is_text=True) for file in files]


def id_files(field: str, uri: str, token_type: str, vocab: int, cache: DataCache | None) -> list[TokenFile]:
    """Files of ids alone; of a folder, all that end in `.bin`. Raises InvalidField, DataError."""
    kind = KINDS[token_type]
    files = chosen(field, uri, find(field, uri, cache), ".bin")
    check_ids(field, uri, files, token_type, vocab)
    for file in files:
        if file.num_bytes % kind.num_bytes:
            problem = f"is no file of {token_type}: {file.name} has {file.num_bytes} bytes, and may be cut short"
            raise InvalidField(field, uri, problem)
    return [TokenFile(file, kind, file.num_bytes // kind.num_bytes) for file in files]


def indexed_files(field: str, uri: str, cache: DataCache | None) -> list[TokenFile]:
    """Pairs of NAME.bin and NAME.idx, of which `uri` may name either, NAME alone, or a folder. Raises InvalidField."""
    stem = uri.removesuffix(".bin").removesuffix(".idx")
    try:
        files = find(field, uri, cache)
    except InvalidField:
        if stem != uri:
            raise
        files = find(field, f"{uri}.bin", cache)
    if len(files) == 1:
        files = [*find(field, f"{stem}.bin", cache), *find(field, f"{stem}.idx", cache)]
    named = {file.name: file for file in files}
    found, used = [], set()
    for name, file in sorted(named.items(), key=lambda item: item[1].relative):
        if name.endswith(".idx"):
            tokens = named.get(f"{name.removesuffix('.idx')}.bin")
            if tokens is None:
                raise InvalidField(field, uri, f"is incomplete: beside {name} there is no .bin")
            found.append(_indexed(field, uri, file, tokens))
            used |= {name, tokens.name}
    if not found:
        raise InvalidField(field, uri, "has no file that ends in .idx")
    check_unused(field, uri, [file for file in files if file.name not in used])
    return found


def _indexed(field: str, uri: str, index: File, tokens: File) -> TokenFile:
    def wrong(problem: str) -> InvalidField:
        return InvalidField(field, uri, f"cannot be read: {index.name} {problem}")

    if index.num_bytes < _HEAD.size:
        raise wrong(f"has {index.num_bytes} bytes, which is no whole head")
    magic, version, code, num_sequences, num_documents = _HEAD.unpack(index.read(0, _HEAD.size))
    if magic != _MAGIC or version != 1:
        raise wrong(f"is no index of version 1: it begins with {magic!r} and {version}")
    if code not in _INDEX_KINDS:
        raise wrong(f"says that ids are of kind {code}, which is none of {', '.join(map(str, _INDEX_KINDS))}")
    needed = _HEAD.size + 12 * num_sequences + 8 * num_documents
    if index.num_bytes < needed:
        raise wrong(f"is cut short: it has {index.num_bytes} of the {needed} bytes of {num_sequences} sequences")
    kind = KINDS[_INDEX_KINDS[code]]
    num_bytes = 0
    if num_sequences:
        lengths_end = _HEAD.size + 4 * num_sequences
        (length,) = struct.unpack("<i", index.read(lengths_end - 4, 4))
        (start,) = struct.unpack("<q", index.read(lengths_end + 8 * (num_sequences - 1), 8))
        num_bytes = start + length * kind.num_bytes
    if tokens.num_bytes != num_bytes:
        raise InvalidField(
            field,
            uri,
            f"cannot be read: {tokens.name} has {tokens.num_bytes} bytes, and its index tells of {num_bytes}",
        )
    documents = MegatronIndex(index, num_sequences, num_documents, kind.num_bytes)
    return TokenFile(tokens, kind, num_bytes // kind.num_bytes, index=documents)
