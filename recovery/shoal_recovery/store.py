"""The object store as recovery needs it: a few verbs over named objects.

Owns the contract, and which implementation is for which URI. Which objects there are and what stands in them is
`checkpoints`' affair.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.request import url2pathname

from shoal_planner.errors import InvalidField
from shoal_planner.uris import parts_of
from shoal_recovery.errors import StoreError
from shoal_recovery.storage_access import split_access

Data = bytes | bytearray | memoryview
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._=-]*(/[A-Za-z0-9_-][A-Za-z0-9._=-]*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object as a store lists it. `version` changes when its content does."""

    name: str
    num_bytes: int
    version: str


class Reader(Protocol):
    """What whoever only reads needs of a store."""

    uri: str

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        """See `Store`."""


class Store(Protocol):
    """Named, immutable runs of bytes. Names are parts of letters, digits and `_ - . =`, joined by `/`.

    Any thread may call. All methods raise StoreUnreachable where the store does not answer (StoreRefused where it does
    not let us), and StoreError for whatever else prevents them. A reader sees an object whole or not at all.
    """

    uri: str

    def put(self, name: str, data: Data) -> None:
        """Returns when the object is durable. Replaces one of the same name. Called again after an error, it goes on
        where it was, as far as the store allows."""

    def put_new(self, name: str, data: Data) -> None:
        """Like `put`, but raises StoreConflict if somebody else's object is already there: one writer wins."""

    def read(self, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
        """Exactly these bytes (None: all to the end). No more than these leave the store."""

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        """Fills these, one after the other, with the bytes from `offset` on. After an error they hold anything."""

    def list(self, prefix: str) -> tuple[str, ...]:
        """The names of all objects that begin with `prefix`, sorted."""

    def entries(self, prefix: str) -> tuple[Entry, ...]:
        """The same, with their sizes; names of any form."""

    def read_listed(self, entry: Entry, offset: int, num_bytes: int) -> bytes:
        """Exactly these bytes of an object that `entries` told of, and of no other that has its name by now. Raises
        StoreChanged where there is none."""

    def delete(self, name: str) -> None:
        """An object that is not there is no error."""

    def delete_listed(self, entry: Entry) -> None:
        """Deletes this object that `entries` told of; one that has its name by now stays, as far as the store can tell
        the two apart in one step."""

    def unfinished(self, prefix: str) -> tuple[str, ...]:
        """The names beginning with `prefix` under which a `put` has left something that is no object yet."""

    def abandon(self, name: str) -> None:
        """Removes what unfinished puts of this name have left."""

    def check_writable(self) -> None:
        """Writes a small object, reads it back and deletes it. Raises what prevents that."""


def open_store(uri: str) -> Store:
    """The store at `file:///folder`, `s3://bucket/prefix` or `s3://ACCESS@bucket/prefix` (`storage_access`); does not
    touch it yet. Raises InvalidField, and StoreRefused where credentials that it names are not here."""
    parts = parts_of("uri", uri)
    match parts.scheme:
        case "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise InvalidField("uri", uri, "must name an absolute folder: file:///folder")
            from shoal_recovery.store_directory import DirectoryStore  # which builds on this module

            return DirectoryStore(Path(url2pathname(parts.path)), uri)
        case "s3":
            if not parts.netloc:
                raise InvalidField("uri", uri, "must name a bucket: s3://bucket/prefix")
            # boto3 is needed, and takes a moment to load, only where S3 is used.
            from shoal_recovery.store_s3 import open_s3

            bucket, access = split_access(parts.netloc)
            return open_s3(uri, bucket=bucket, prefix=parts.path.strip("/"), access=access)
        case _:
            raise InvalidField("uri", uri, "must begin with file:// or s3://")


def check_name(name: str) -> str:
    """Raises ValueError for a name that could leave the store or that some store would not take."""
    if not NAME.fullmatch(name):
        raise ValueError(f"object name {name!r}: must be parts of letters, digits and '_-.=', joined by '/'")
    return name


def probe(store: Store) -> None:
    """`check_writable` in terms of the other verbs."""
    name = f"probe-{uuid.uuid4().hex}"
    store.put(name, name.encode())
    try:
        if store.read(name) != name.encode():
            raise StoreError(store.uri, "does not give back what was written")
    finally:
        store.delete(name)


def exactly(uri: str, name: str, data: bytes, offset: int, num_bytes: int | None) -> bytes:
    """`data`, if it is as long as was asked for."""
    if num_bytes is not None:
        check_length(uri, name, len(data), offset, num_bytes)
    return data


def check_length(uri: str, name: str, found: int, offset: int, num_bytes: int) -> None:
    """Raises StoreError."""
    if found != num_bytes:
        problem = f"{name} has {found} of the {num_bytes} bytes asked for at {offset}: it was cut short or replaced"
        raise StoreError(uri, problem)


def fill(read_into: Callable[[memoryview], int | None], places: Iterable[memoryview]) -> int:
    """How many bytes came: all, or what was there to the end."""
    total = 0
    for place in places:
        position = 0
        while position < place.nbytes:
            came = read_into(place[position:]) or 0
            if came == 0:
                return total
            position += came
            total += came
    return total
