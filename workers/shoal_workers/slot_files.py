"""The memory that slots of snapshots lie in: mapped files that are used again, or made ahead.

Memory that is new takes many times as long as the copy that fills it, and a change of plan would wait for hundreds of
megabytes of it. So the files of an epoch that is over lie ready for the next one, and others are made while training
goes on. Owns which file may be used again for what. What is in one of these files is nothing: no seal stands beside it.

Nothing is used again that somebody may still write into. Copies are written by the agent, which knows when it is done.
A rank writes by itself, so what it wrote into is used again only for that process, when it says that it has left it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

NUM_SLOTS = 2
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFiles:
    """Both slots of one snapshot. `writer` is the snapshot as which a rank wrote into them; empty if none did."""

    stem: Path
    maps: tuple[mmap.mmap, ...]
    writer: str = ""

    @property
    def num_bytes(self) -> int:
        return min(len(mapped) for mapped in self.maps)

    @property
    def paths(self) -> tuple[Path, ...]:
        return slot_paths(self.stem)

    def moved(self, stem: Path) -> SlotFiles:
        """Raises FileNotFoundError."""
        for path, goal in zip(self.paths, slot_paths(stem), strict=True):
            path.replace(goal)
        return replace(self, stem=stem)

    def unlink(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the slots of a node, in bytes, the largest first: for its own ranks and for copies from other nodes."""

    local: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()

    def or_more(self, other: Sizes) -> Sizes:
        """Enough for either."""
        return Sizes(local=_larger(self.local, other.local), copies=_larger(self.copies, other.copies))


def _larger(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, zip_longest(some, others, fillvalue=0)))


def slot_paths(stem: Path) -> tuple[Path, ...]:
    return tuple(stem.with_name(f"{stem.name}.slot{slot}") for slot in range(NUM_SLOTS))


def map_slots(stem: Path, num_bytes: int) -> SlotFiles:
    """Makes what is not there, with every page: the first touch must not hit a step. Raises OSError, and has not made
    anything then."""
    there = {path for path in slot_paths(stem) if path.exists()}
    try:
        return SlotFiles(stem=stem, maps=tuple(_map(path, max(num_bytes, 1)) for path in slot_paths(stem)))
    except OSError:
        for path in slot_paths(stem):
            if path not in there:
                path.unlink(missing_ok=True)
        raise


def touch(mapped: mmap.mmap) -> None:
    """Every page is there and mapped afterwards. Other threads run meanwhile, which a mapping that is populated by the
    kernel would not let them."""
    np.frombuffer(mapped, dtype=np.uint8)[::_PAGE_BYTES].sum()


class SpareSlots:
    """Of one node. The caller sees to it that one thread at a time is in here."""

    def __init__(self, folder: Path) -> None:
        """Files that an earlier agent kept ready were lost with it: nobody knows who has them mapped."""
        self._folder = folder
        self._spares: dict[str, list[SlotFiles]] = {}
        self._num_made = 0
        for path in folder.glob("*/spare-*"):
            path.unlink(missing_ok=True)

    def add(self, job: str, files: SlotFiles) -> None:
        self._spares.setdefault(job, []).append(files)

    def next_stem(self, job: str) -> Path:
        self._num_made += 1
        return self._folder / job / f"spare-{self._num_made}"

    def fits(self, job: str, num_bytes: int, left: Collection[str]) -> bool:
        """Whether `take` would find any."""
        return any(files.num_bytes >= num_bytes for files in self._free(job, left))

    def take(self, job: str, num_bytes: int, left: Collection[str]) -> SlotFiles | None:
        """Files at least this large that nobody writes into, once those who wrote as the snapshots `left` do not."""
        fitting = [files for files in self._free(job, left) if files.num_bytes >= num_bytes]
        if not fitting:
            return None
        taken = min(fitting, key=lambda files: (files.writer not in left, files.num_bytes))
        self._spares[job].remove(taken)
        return taken

    def drop(self, job: str) -> None:
        for files in self._spares.pop(job, ()):
            files.unlink()

    def drop_all(self) -> bool:
        """Whether there was anything."""
        jobs = [job for job, spares in self._spares.items() if spares]
        for job in jobs:
            self.drop(job)
        return bool(jobs)

    def lacking(self, job: str, sizes: Sizes) -> list[int]:
        """Which of these sizes are not there; what is for none of them goes."""
        left, lacking = self._spares.pop(job, []), []
        kept = self._spares[job] = []
        wishes = [(size, False) for size in sizes.local] + [(size, True) for size in sizes.copies]
        for wanted, is_copy in sorted(wishes, reverse=True):  # small ones would take what is large
            fitting = [files for files in left if files.num_bytes >= wanted and not (is_copy and files.writer)]
            if fitting:
                chosen = min(fitting, key=lambda files: (not files.writer, files.num_bytes))
                left.remove(chosen)
                kept.append(chosen)
            else:
                lacking.append(wanted)
        for files in left:
            files.unlink()
        return lacking

    def _free(self, job: str, left: Collection[str]) -> list[SlotFiles]:
        return [files for files in self._spares.get(job, ()) if not files.writer or files.writer in left]


def _map(path: Path, num_bytes: int) -> mmap.mmap:
    with path.open("a+b") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        mapped = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED)
    touch(mapped)
    return mapped
