"""The object store over the S3 protocol: the only file that knows boto3.

Where the server is and who we are comes from boto3's own configuration (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID,
profiles, instance roles ...), or as the place of the store says (`storage_access`). Servers differ: some answer ranged
reads with status 200, some ignore the condition of a conditional write. The latter is found out before the first one,
and locked around (`claims`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import boto3
import botocore.session
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)
from botocore.loaders import create_loader
from urllib3.exceptions import HTTPError

from shoal_recovery import multipart
from shoal_recovery.claims import put_claimed
from shoal_recovery.errors import StoreChanged, StoreConflict, StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.storage_access import KEYS_PREFIX, PROFILE_PREFIX, StoreAccess
from shoal_recovery.store import Data, Entry, check_length, check_name, exactly, fill, probe

T = TypeVar("T")

# Of a client; whether there must be one.
_KEYS = {"aws_access_key_id": True, "aws_secret_access_key": True, "aws_session_token": False}
_ANY_REGION = "us-east-1"  # which servers other than Amazon's take, or do not look at
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
_ATTEMPTS = 3
_WORTH_ASKING_BYTES = 1024**2  # whether an object of this size is there already is asked before it is sent
_WRITER = "shoal-writer"
_REFUSED = frozenset({"403", "401", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"})
_DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem"})
_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    NoAuthTokenError,
    TokenRetrievalError,
)
_NO_ANSWER = (ConnectionError, HTTPClientError, IncompleteReadError, HTTPError)  # the last while a body is read
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_BEYOND = frozenset({"416", "InvalidRange"})
_TAKEN = frozenset({"412", "PreconditionFailed", "409"})
_NO_CONDITIONS = frozenset({"501", "NotImplemented"})
# What passes by itself, whatever the status that servers send it with; and statuses that mean that, whatever the code.
_PASSING_CODES = frozenset(
    {
        *("InternalError", "ServiceUnavailable", "SlowDown", "RequestTimeout", "RequestTimeoutException"),
        *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException"),
        *("TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded", "BandwidthLimitExceeded"),
        *("ConditionalRequestConflict", "OperationAborted"),  # another request on that object is under way
    }
)
_PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


def open_s3(uri: str, bucket: str, prefix: str, access: StoreAccess | None = None) -> S3Store:
    """Does not connect yet. Raises StoreError where boto3's configuration is incomplete."""
    access = access or StoreAccess()
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
    )
    try:
        # A session of our own: the default one is not thread-safe and keeps the first credentials for ever.
        session = botocore.session.get_session()
        session.register_component("data_loader", _models())
        named = None if access.profile is None else f"{PROFILE_PREFIX}{access.profile}"
        boto3_session = boto3.session.Session(botocore_session=session, profile_name=named)
        client = boto3_session.client("s3", config=config, **_reached(uri, access))
    except ProfileNotFound as error:
        raise StoreRefused(uri, f"the AWS credentials file here has no section {named}") from error
    except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is no URL
        raise StoreError(uri, f"the configuration of S3 access cannot be used ({error})") from error
    return S3Store(uri, bucket=bucket, prefix=prefix, client=client)


def _reached(uri: str, access: StoreAccess) -> dict[str, str]:
    """For a client of boto3's. Raises StoreRefused where the credentials are not here."""
    given = {"endpoint_url": access.endpoint, "region_name": access.region}
    if access.endpoint is not None and access.region is None:
        given["region_name"] = _ANY_REGION
    if access.keys is not None:
        for name, is_needed in _KEYS.items():
            variable = f"{KEYS_PREFIX}{access.keys}_{name.removeprefix('aws_').upper()}"
            given[name] = os.environ.get(variable)
            if is_needed and not given[name]:
                raise StoreRefused(uri, f"the environment of this process has no {variable}")
    return {name: value for name, value in given.items() if value}


@functools.cache
def _models() -> Any:
    """What botocore knows of services, read once in a process: that takes longer than a recovery may."""
    return create_loader(botocore.session.get_session().get_config_variable("data_path"))


class S3Store:
    def __init__(self, uri: str, *, bucket: str, prefix: str, client: Any) -> None:
        self.uri = uri
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = client
        self._minds: bool | None = None  # conditions

    def put(self, name: str, data: Data) -> None:
        """Of a large object, parts that are there already are not sent again; nor is one that is there as a whole."""
        place, view = self._place(name), memoryview(data).cast("B")
        if len(view) >= _WORTH_ASKING_BYTES and self._is_there(name, view):
            return
        if len(view) <= multipart.PART_BYTES:
            self._call(name, lambda: self._client.put_object(**place, Body=_View(view)))
        else:
            self._call(name, lambda: multipart.put_in_parts(self._client, place, view, _View))

    def put_new(self, name: str, data: Data) -> None:
        if not self._minds_conditions():
            put_claimed(self, name, bytes(data))
            if self.read(name) != bytes(data):
                raise StoreConflict(self.uri, f"{name} was written by somebody else at the same time")
            return
        token = uuid.uuid4().hex
        place = self._place(name) | {"IfNoneMatch": "*"}
        try:
            self._call(name, lambda: self._client.put_object(**place, Body=_View(data), Metadata={_WRITER: token}))
        except StoreConflict:
            # Ours all the same if the first answer was lost and boto3 asked again.
            if self._writer(name) != token:
                raise

    def read(self, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
        if num_bytes == 0:
            return b""  # HTTP has no way to ask for an empty range
        place = self._place(name) | ({} if not offset and num_bytes is None else _range(offset, num_bytes))
        data = self._call(name, lambda: self._read(name, place, offset))
        return exactly(self.uri, name, data, offset, num_bytes)

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        num_bytes = sum(place.nbytes for place in places)
        if num_bytes == 0:
            return
        ask = self._place(name) | _range(offset, num_bytes)

        def read() -> int:
            with self._body(name, ask, offset) as (body, promised):
                found = fill(body.readinto, places)
            if found < min(promised, num_bytes):
                raise IncompleteReadError(actual_bytes=found, expected_bytes=promised)
            return found

        check_length(self.uri, name, self._call(name, read), offset, num_bytes)

    def _read(self, name: str, place: dict[str, str], offset: int) -> bytes:
        with self._body(name, place, offset) as (body, _):
            data: bytes = body.read()
        return data

    @contextlib.contextmanager
    def _body(self, name: str, place: dict[str, str], offset: int) -> Iterator[tuple[Any, int]]:
        """What is read from, and how many bytes of the range that was asked for the server says it has."""
        answer = self._client.get_object(**place)
        if "IfMatch" in place and answer.get("ETag", place["IfMatch"]).strip('"') != place["IfMatch"].strip('"'):
            answer["Body"].close()
            raise StoreChanged(self.uri, f"{name} was replaced")  # some servers mind no conditions
        # Some servers answer 200 with a true part, and some with the length of the whole: only this header can be
        # believed.
        part = re.match(r"bytes (\d+)-(\d+)", str(answer.get("ContentRange", "")))
        with answer["Body"] as body:
            if "Range" in place and (part is None or int(part[1]) != offset):
                raise StoreError(self.uri, f"the server did not answer with the part of {name} that was asked for")
            yield body, int(part[2]) + 1 - offset if part else 0

    def list(self, prefix: str) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries(prefix))

    def entries(self, prefix: str) -> tuple[Entry, ...]:
        pages = self._client.get_paginator("list_objects_v2")
        found = self._call(
            prefix,
            lambda: [
                Entry(
                    name=str(entry["Key"]).removeprefix(self._prefix),
                    num_bytes=int(entry["Size"]),
                    version=str(entry.get("ETag", "")),
                )
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
                for entry in page.get("Contents", ())
            ],
        )
        return tuple(sorted(found, key=lambda entry: entry.name))

    def read_listed(self, entry: Entry, offset: int, num_bytes: int) -> bytes:
        place = {"Bucket": self._bucket, "Key": self._prefix + entry.name}

        def read() -> bytes:
            try:
                data = self._read(entry.name, place | _only(entry) | _range(offset, num_bytes), offset)
            except ClientError as error:
                if _code(error) in _TAKEN | _MISSING | _BEYOND:
                    raise StoreChanged(self.uri, f"{entry.name} was replaced or removed") from error
                raise
            if len(data) != num_bytes:
                raise StoreChanged(self.uri, f"{entry.name} was cut short")
            return data

        return self._call(entry.name, read)

    def delete(self, name: str) -> None:
        self._call(name, lambda: self._client.delete_object(**self._place(name)))

    def delete_listed(self, entry: Entry) -> None:
        """On a condition, which also holds for what boto3 sends again where an answer was lost. Servers that mind none
        are looked at first."""

        def delete() -> None:
            try:
                self._client.delete_object(**self._place(entry.name), **_only(entry))
            except ClientError as error:
                if _code(error) in _NO_CONDITIONS:
                    self._client.delete_object(**self._place(entry.name))
                elif _code(error) not in _TAKEN | _MISSING:
                    raise

        if entry in self.entries(entry.name):
            self._call(entry.name, delete)

    def unfinished(self, prefix: str) -> tuple[str, ...]:
        keys = {key for key, _ in self._call(prefix, lambda: self._unfinished(prefix))}
        return tuple(sorted(key.removeprefix(self._prefix) for key in keys))

    def abandon(self, name: str) -> None:
        place = self._place(name)

        def abort() -> None:
            for key, upload in self._unfinished(name):
                if key == place["Key"]:
                    self._client.abort_multipart_upload(**place, UploadId=upload)

        self._call(name, abort)

    def check_writable(self) -> None:
        self.list("probe-")  # some servers would make a bucket that is not there for the first object
        probe(self)
        self._minds_conditions()

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_name(name)}

    def _unfinished(self, prefix: str) -> tuple[tuple[str, str], ...]:
        return multipart.unfinished(self._client, self._bucket, self._prefix + prefix)

    def _is_there(self, name: str, data: memoryview) -> bool:
        """Whether an object with this content has this name, as far as the server tells."""
        head = self._head(name)
        return (
            head is not None
            and head.get("ContentLength") == len(data)
            and str(head.get("ETag", "")).strip('"') in multipart.sums(data)
        )

    def _minds_conditions(self) -> bool:
        """Whether the server refuses to overwrite where it was asked to; found out once."""
        if self._minds is None:
            name = f"probe-{uuid.uuid4().hex}"
            place = self._place(name) | {"IfNoneMatch": "*"}

            def refused() -> bool:
                try:
                    for _ in range(2):
                        self._client.put_object(**place, Body=b"probe")
                except ClientError as error:
                    if _code(error) in _TAKEN:
                        return True
                    if _code(error) not in _NO_CONDITIONS:
                        raise
                return False

            self._minds = self._call(name, refused)
            self.delete(name)
        return self._minds

    def _writer(self, name: str) -> str | None:
        """The mark of whoever wrote this object with `put_new` ("" if by other means); None if there is none."""
        head = self._head(name)
        return None if head is None else str(head["Metadata"].get(_WRITER, ""))

    def _head(self, name: str) -> dict[str, Any] | None:
        """What the server says of an object; None if it is not there."""
        place = self._place(name)

        def head() -> dict[str, Any] | None:
            try:
                return dict(self._client.head_object(**place))
            except ClientError as error:
                if _code(error) in _MISSING:
                    return None
                raise

        return self._call(name, head)

    def _call(self, name: str, call: Callable[[], T]) -> T:
        """Whatever boto3 raises, in our words."""
        try:
            return call()
        except ClientError as error:
            raise self._explained(name, error) from error
        except _NO_CREDENTIALS as error:
            raise StoreRefused(self.uri, f"no credentials for {self._endpoint} ({error})") from error
        except _NO_ANSWER as error:
            raise StoreUnreachable(self.uri, f"{self._endpoint} does not answer ({error})") from error
        except (BotoCoreError, Boto3Error) as error:
            raise StoreError(self.uri, f"{name}: {error}") from error

    def _explained(self, name: str, error: ClientError) -> StoreError:
        code, message = _code(error), error.response.get("Error", {}).get("Message", "")
        if code == "NoSuchBucket":
            return StoreRefused(self.uri, f"{self._endpoint} has no bucket {self._bucket!r}")
        if code in _MISSING:
            return StoreError(self.uri, f"{name} is not there")
        if code in _TAKEN:
            return StoreConflict(self.uri, f"{name} is already there")
        if code in _REFUSED:
            return StoreRefused(self.uri, f"{self._endpoint} refuses the credentials ({code}: {message})")
        if code in _DENIED:
            who = f"these credentials this access to bucket {self._bucket!r}"
            return StoreRefused(self.uri, f"{self._endpoint} denies {who} ({code}: {message})")
        if code == "NoSuchUpload":
            return StoreUnreachable(self.uri, f"{self._endpoint} has dropped the parts of {name}; send them again")
        if code in _PASSING_CODES or _status(error) in _PASSING_STATUSES:
            return StoreUnreachable(self.uri, f"{self._endpoint} cannot answer at present ({code}: {message})")
        return StoreError(self.uri, f"{name}: {self._endpoint} answered {code}: {message}")

    @property
    def _endpoint(self) -> str:
        return str(self._client.meta.endpoint_url)


def _range(offset: int, num_bytes: int | None) -> dict[str, str]:
    return {"Range": f"bytes={offset}-{'' if num_bytes is None else offset + num_bytes - 1}"}


def _only(entry: Entry) -> dict[str, str]:
    """The condition that an object is the one that was listed."""
    tag = entry.version.strip('"')  # some servers leave its quotes away where they list objects
    return {"IfMatch": f'"{tag}"'} if tag else {}


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


class _View(io.RawIOBase):
    """Reads bytes where they lie; BytesIO would copy gigabytes."""

    def __init__(self, data: Data) -> None:
        self._view = memoryview(data).cast("B")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
