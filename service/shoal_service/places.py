"""Which places on this machine a job may name: what lies below the folders that the operator lists, and nothing else.

Whoever may send jobs has the control plane and Shoal's processes on the nodes read and write where they say. What a
user's own code does on the nodes is bounded by the user that it runs as there, not by this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shoal_planner.data_spec import BYTES
from shoal_planner.errors import InvalidField
from shoal_recovery.storage_access import has_access
from shoal_service.buckets import ANY_BUCKET, PROFILED, Buckets

# What is handed to a user's own code as it is.
_NOT_PLACES = ("env", "arguments", "pip")
_PATHS = (("track", "wandb", "dir"),)  # plain paths, not URIs
_PATHS_TOO = (("data", "tokenizer"), ("model", "hf"))  # either
_OF_DATA = ("uri", "eval_uri")  # either, too, where the path is absolute
_SCHEMES = ("file", "sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """`roots` are absolute folders; with `/` among them, everything is allowed that the process may do. `buckets` are
    those that need no storage profile."""

    roots: tuple[Path, ...]
    buckets: Buckets = ANY_BUCKET

    def check(self, job: object) -> None:
        """Looks at every place that a JOB document names, before anybody opens one. Raises InvalidField."""
        profiled = _profiled(job)
        for field, value in _texts(job, ()):
            if has_access(value):
                problem = "must be s3://bucket/prefix; how that is reached, a storage profile of the project says"
                raise InvalidField(".".join(field), "...", problem)
            self.buckets.check(".".join(field), value, field in profiled)
            path = _local_path(field, value)
            if path is not None:
                self._check_path(".".join(field), value, path)

    def _check_path(self, field: str, value: str, path: str) -> None:
        if Path("/") in self.roots:
            return
        if not self.roots:
            problem = "this control plane lets jobs use no folders: its operator lists those in SHOAL_FILE_ROOTS"
            raise InvalidField(field, value, problem)
        if "\0" in path or not path.startswith("/") or ".." in path.split("/"):
            raise InvalidField(field, value, "must be an absolute path without '..'")
        try:
            found = Path(path).resolve()  # symbolic links lead where they lead
            is_allowed = any(found.is_relative_to(root.resolve()) for root in self.roots)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise InvalidField(field, value, f"cannot be followed: {error}") from error
        if not is_allowed:
            allowed = ", ".join(map(str, self.roots))
            raise InvalidField(field, value, f"must lie below {allowed}, and so must what its links lead to")


def _texts(value: object, field: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """All texts of a document, with the names that lead to them. An index is part of the name before it."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _NOT_PLACES:
                yield from _texts(inner, (*field, str(name)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*field[:-1], f"{field[-1] if field else ''}[{index}]"))


def _profiled(job: object) -> frozenset[tuple[str, ...]]:
    """The fields whose places a storage profile says how to reach."""
    sections: list[tuple[tuple[str, ...], object]] = []
    if isinstance(job, Mapping):
        data, checkpoint = job.get("data"), job.get("checkpoint")
        mix = data.get("mix") if isinstance(data, Mapping) else None
        sources = mix if isinstance(mix, list | tuple) else ()
        sections = [(("data",), data), (("checkpoint",), checkpoint)]
        sections += [(("data", f"mix[{index}]"), source) for index, source in enumerate(sources)]
    named = [at for at, section in sections if isinstance(section, Mapping) and section.get("storage") is not None]
    return frozenset((*at, name) for at in named for name in PROFILED)


def _local_path(field: tuple[str, ...], value: str) -> str | None:
    """Where on this machine that is; None if it is no place there."""
    if field in _PATHS or (field in _PATHS_TOO and (value.startswith("/") or "://" not in value)):
        return None if value == BYTES and field not in _PATHS else value
    if field[:1] == ("data",) and field[-1] in _OF_DATA and value.startswith("/"):
        return value
    try:
        parts = urlsplit(value)
    except ValueError:  # as of brackets that are no IPv6 address
        return None
    if parts.scheme not in _SCHEMES:
        return None
    # sqlite:////file has an absolute path after its third slash
    return unquote(parts.path[1:] if parts.scheme == "sqlite" else parts.path)
