"""The files that a job's data lies in, near or far: which there are.

Owns listing, in an order that is the same on every machine. Nothing is kept open. How files are read is `file_ranges`'
and `far_files`' affair, what stands in them others'.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shoal_planner.data_spec import STDLIB
from shoal_planner.errors import InvalidField
from shoal_recovery.store import open_store
from shoal_workers.data_cache import DataCache
from shoal_workers.far_files import FarFile
from shoal_workers.file_ranges import File, NearFile

# Folders of the standard library's folder that differ between machines, or that many machines lack.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests"})
_HIDDEN = "."


def find(field: str, uri: str, cache: DataCache | None = None) -> list[File]:
    """The files at `uri` that are neither empty nor hidden, by relative path. Raises InvalidField, which calls the URI
    `field`, where there are none that could be read; StoreError where a store does not answer."""
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        return _far(field, uri, cache)
    try:
        if uri == STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            return _near(root, _walk(root, suffix=".py", left_out=_LEFT_OUT))
        root = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not root.is_absolute():
            raise InvalidField(field, uri, "must name a place on every node: file:///absolute/path")
        if not root.exists():
            raise InvalidField(field, uri, "does not exist")
        if root.is_dir():
            return _near(root, _walk(root, suffix="", left_out=frozenset()))
        with root.open("rb"):  # whether we may
            return _near(root.parent, [root])
    except OSError as error:
        raise InvalidField(field, uri, f"cannot be read: {error}") from error


def chosen(field: str, uri: str, files: Sequence[File], *endings: str) -> list[File]:
    """Of several files those that end so: others lie beside data to describe it. Raises InvalidField."""
    found = [file for file in files if file.relative.endswith(endings)] if len(files) > 1 else list(files)
    if not found:
        raise InvalidField(field, uri, f"has no file that ends in {' or '.join(endings)}")
    return found


def _near(root: Path, paths: list[Path]) -> list[File]:
    found: list[File] = []
    for path in paths:
        status = path.stat()
        if status.st_size:
            name, version = path.relative_to(root).as_posix(), str(status.st_mtime_ns)
            found.append(NearFile(path=path, relative=name, num_bytes=status.st_size, version=version))
    return found


def _far(field: str, uri: str, cache: DataCache | None) -> list[File]:
    bucket, _, path = uri.removeprefix("s3://").partition("/")  # keys may have what ends the path of a URL
    prefix = path.strip("/")
    store = open_store(f"s3://{bucket}")
    try:
        entries = store.entries(prefix)
    except ValueError as error:
        raise InvalidField(field, uri, f"cannot be read: {error}") from error
    below = {entry.name.removeprefix(f"{prefix}/"): entry for entry in entries if entry.name.startswith(f"{prefix}/")}
    named = {entry.name: entry for entry in entries if entry.name == prefix}
    if not below and not named:
        raise InvalidField(field, uri, "does not exist: there is no object of that name, nor any below it")
    # An empty object, or one that ends in a slash, is what the tools of stores make of a folder.
    return [
        FarFile(store, entry, relative, cache)
        for relative, entry in (named | {name: entry for name, entry in below.items() if not _is_hidden(name)}).items()
        if entry.num_bytes and not entry.name.endswith("/")
    ]


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(_HIDDEN) for part in relative.split("/"))


def _walk(root: Path, *, suffix: str, left_out: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(_HIDDEN)]
        found.extend(Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(_HIDDEN))
    return sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error
