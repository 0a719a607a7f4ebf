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

from shoal_planner.data_spec import STDLIB, problem_of_name
from shoal_planner.errors import InvalidField
from shoal_recovery.store import open_store
from shoal_workers.data_cache import DataCache
from shoal_workers.far_files import FarFile
from shoal_workers.file_ranges import File, NearFile
from shoal_workers.plain_text import check_beginnings, check_names

# Folders of the standard library's folder that differ between machines, or that many machines lack.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests"})
_HIDDEN = "."
_MOST_NAMED = 3
# Usual companions of data.
_DESCRIBING = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "meta.pkl", "_metadata"}
    | {"_common_metadata", "_success"}
)
_DESCRIBING_STARTS = ("readme", "license", "licence", "notice", "citation", "changelog")
_DESCRIBING_ENDS = (".md", ".rst", ".py", ".ipynb", ".yaml", ".yml", ".crc", ".md5", ".sha256")


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


def find_text(field: str, uri: str, cache: DataCache | None = None) -> list[File]:
    """Files that are read as text, all of them. Raises what `find` does."""
    files = find(field, uri, cache)
    if uri != STDLIB:
        check_names(field, uri, files)
    check_beginnings(field, uri, files)
    return files


def chosen(field: str, uri: str, files: Sequence[File], *endings: str) -> list[File]:
    """Of a folder the files that end so. Nobody is to believe that others were read, so there must be none but those
    that describe data. Raises InvalidField."""
    if len(files) == 1 and _is_itself(uri, files[0]):
        return list(files)
    found = [file for file in files if file.relative.endswith(endings) and not describes(file)]
    if not found:
        beside = f": there is {_some(files)}" if files else ""
        if files and (problem := problem_of_name(files[0].relative, "")) is not None:
            beside += f", and the first {problem}"
        raise InvalidField(field, uri, f"has no file that ends in {' or '.join(endings)}{beside}")
    check_unused(field, uri, [file for file in files if not file.relative.endswith(endings)])
    return found


def check_unused(field: str, uri: str, files: Sequence[File]) -> None:
    """Raises InvalidField where a folder has, beside what is read, any of these that may be meant to be."""
    others = [file for file in files if not describes(file)]
    if others:
        problem = problem_of_name(others[0].relative, "") or "is nothing of this format"
        way = "take it away, or let its name begin with a dot"
        raise InvalidField(field, uri, f"has what would not be read, {_some(others)}: the first {problem}; else {way}")


def _some(files: Sequence[File]) -> str:
    named = ", ".join(file.name for file in files[:_MOST_NAMED])
    return named if len(files) <= _MOST_NAMED else f"{named} and {len(files) - _MOST_NAMED} more"


def _is_itself(uri: str, file: File) -> bool:
    """Whether the URI names the file, and not a folder that it is in."""
    return file.name in (uri.rstrip("/"), str(Path(unquote(urlsplit(uri).path))))


def describes(file: File) -> bool:
    """Whether it lies beside data to describe it, to make it, or as a trace of who wrote it."""
    name = file.relative.rpartition("/")[2].lower()
    is_cache = name.startswith("cache-") and name.endswith(".arrow")  # what `datasets` computed of others
    return is_cache or name in _DESCRIBING or name.startswith(_DESCRIBING_STARTS) or name.endswith(_DESCRIBING_ENDS)


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
