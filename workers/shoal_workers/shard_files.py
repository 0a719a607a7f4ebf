"""Copies of snapshots on a node's disk, each as the object that it is or becomes in the store, with a file beside it
that says what it is, with a sum of its own: no flipped bit makes a copy one of another step or parameter. Without the
latter it is not whole: the content is written first, and removed first.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import structlog

from shoal_recovery.checkpoints import shard_header
from shoal_recovery.crc import checksum
from shoal_recovery.patient_disk import Progress, no_matter
from shoal_recovery.state import Piece, Snapshot
from shoal_workers.rows import snapshot_rows, snapshots_from_rows
from shoal_workers.shards import epoch_of

log = structlog.get_logger()

_SAID = ".task"
_FORGOTTEN_AFTER_S = 24 * 3600.0
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """The offsets of `snapshot` are those within the file at `path`; it belongs at `uri`."""

    job: str
    snapshot: Snapshot
    uri: str
    path: Path

    @classmethod
    def write(
        cls,
        path: Path,
        job: str,
        snapshot: Snapshot,
        uri: str,
        content: memoryview,
        progress: Progress = no_matter,
    ) -> Self:
        """`content` is what `snapshot` describes. Raises OSError, and leaves nothing then."""
        header = shard_header(snapshot.pieces)
        shifted = tuple(replace(piece, offset=piece.offset + len(header)) for piece in snapshot.pieces)
        made = cls(job=job, snapshot=replace(snapshot, pieces=shifted), uri=uri, path=path)
        try:
            with path.open("wb") as file:
                file.write(header)
                for begin in range(0, made.num_bytes, _CHUNK_BYTES):
                    file.write(content[begin : min(begin + _CHUNK_BYTES, made.num_bytes)])
                    progress()
            said = {"job": job, "uri": uri, "snapshot": snapshot_rows((made.snapshot,))[0]}
            unfinished = _unfinished(path)
            unfinished.write_text(json.dumps(said | {"sum": _sum(said)}))
            unfinished.rename(_said(path))
        except OSError:
            made.remove()
            raise
        return made

    @property
    def epoch(self) -> int:
        return epoch_of(self.snapshot.name)

    @property
    def num_bytes(self) -> int:
        """Of the content, without what stands before it."""
        return sum(piece.num_bytes for piece in self.snapshot.pieces)

    def mapped(self) -> memoryview:
        """The whole file. Raises OSError, also for a file that somebody cut short: to touch what is missing would end
        the process."""
        with self.path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))  # goes with the last view of it
        wanted = max((piece.offset + piece.num_bytes for piece in self.snapshot.pieces), default=0)
        if content.nbytes < wanted:
            raise OSError(f"the file has {content.nbytes} of its {wanted} bytes")
        return content

    def spoilt(self, *, verified: bool) -> Iterator[tuple[Piece, str]]:
        """Those that are not what was sealed, and why; if not `verified`, those that are not there at all."""
        try:
            content = self.mapped()
        except (OSError, ValueError) as error:
            yield from ((piece, str(error)) for piece in self.snapshot.pieces)
            return
        for piece in self.snapshot.pieces if verified else ():
            found = checksum(content[piece.offset : piece.offset + piece.num_bytes])
            if found != piece.checksum:
                yield piece, f"it was sealed with {piece.checksum}, and has {found}"

    def has_header(self) -> bool:
        """Whether what stands before the content is what belongs there. Raises OSError."""
        first = min((piece.offset for piece in self.snapshot.pieces), default=0)
        header = shard_header(replace(piece, offset=piece.offset - first) for piece in self.snapshot.pieces)
        return bytes(self.mapped()[:first]) == (header if self.snapshot.pieces else b"")

    def moved(self, folder: Path) -> Self:
        """Raises OSError."""
        path = folder / self.path.name
        self.path.rename(path)
        _said(self.path).rename(_said(path))
        return replace(self, path=path)

    def remove(self) -> None:
        for path in (self.path, _said(self.path), _unfinished(self.path)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def remove_all(files: Iterable[ShardFile]) -> None:
    for file in files:
        file.remove()


def left_behind(folder: Path) -> list[ShardFile]:
    """What lies there, the oldest step first. Removes what is not whole, and what is too old for anybody to come
    back for it."""
    found = []
    for said in folder.glob(f"*{_SAID}"):
        try:
            if said.stat().st_mtime > time.time() - _FORGOTTEN_AFTER_S:
                found.append(_read(said))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("what a copy on disk is cannot be read", file=said.name, error=str(error))
    whole = {path for one in found for path in (one.path, _said(one.path))}
    for path in folder.iterdir():
        if path not in whole:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda one: one.snapshot.step)


def _read(said_path: Path) -> ShardFile:
    said: dict[str, Any] = json.loads(said_path.read_text())
    if said.pop("sum") != _sum(said):
        raise ValueError("it is not as it was written")
    (snapshot,) = snapshots_from_rows([said["snapshot"]])
    path = said_path.with_name(said_path.name.removesuffix(_SAID))
    path.stat()
    return ShardFile(job=said["job"], snapshot=snapshot, uri=said["uri"], path=path)


def _sum(said: dict[str, Any]) -> str:
    return checksum(json.dumps(said, sort_keys=True).encode())


def _said(path: Path) -> Path:
    return path.with_name(path.name + _SAID)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")
