"""Whether a job's data is still what it was when training began, and on each node the same.

The order of samples follows from which files there are and how long they are, so ranks that see others train on other
samples. What is compared is small: a row of (URI, files, bytes, groups) for each source, where a group is the name of
its first file and a digest of names, sizes and (in an object store) versions of all its files. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from shoal_recovery.storage_access import without_access
from shoal_workers.errors import DataDiffers, DataError
from shoal_workers.file_ranges import File
from shoal_workers.rows import Row

_MOST_GROUPS = 64
_FAR = "s3://"


def identity(uri: str, files: Sequence[File]) -> Row:
    """The row of one source."""
    size = _group_size(len(files))
    groups = [[files[at].relative, _digest(files[at : at + size])] for at in range(0, len(files), size)]
    return [without_access(uri), len(files), sum(file.num_bytes for file in files), groups]


def difference(told: Sequence[Sequence[Any]], found: Sequence[Sequence[Any]]) -> DataError | None:
    """The first one, DataDiffers where another node may have what was told. Where nobody told a row, there is none."""
    for before, now in zip(told, found, strict=False):
        if list(before) != list(now):
            file, problem = _first_difference(before, now)
            kind = DataError if str(now[0]).startswith(_FAR) else DataDiffers
            return kind(str(now[0]), file, f"{now[1]} files of {now[2]} bytes", problem)
    return None


def _first_difference(before: Sequence[Any], now: Sequence[Any]) -> tuple[str, str]:
    """The file at which it is, as far as that is known, and the clause that completes the sentence."""
    uri, num_files, num_bytes, groups = before
    if uri != now[0]:
        return "", f"are not the data of {uri}, with which training began"
    began = f"training began with {num_files} of {num_bytes}"
    size = _group_size(num_files)
    if size != _group_size(now[1]):
        return "", f"are there now, and {began}"
    pairs = zip_longest(map(tuple, groups), map(tuple, now[3]), fillvalue=None)
    old, new = next((old, new) for old, new in pairs if old != new)
    name = min(one[0] for one in (old, new) if one is not None)
    if size > 1:
        return f"from {name} on", f"are there now, and {began}"
    if old is not None and new is not None and old[0] == new[0]:
        return name, f"are there now, and {began}: this one has other content"
    is_new = new is not None and new[0] == name
    return name, f"are there now, and {began}: this one {'is new' if is_new else 'is missing'}"


def _group_size(num_files: int) -> int:
    size = 1
    while num_files > size * _MOST_GROUPS:
        size *= 2
    return size


def _digest(files: Sequence[File]) -> str:
    text = "\n".join(f"{file.relative} {file.num_bytes} {file.tag}" for file in files)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
