"""The object store over the S3 protocol: the only file that knows boto3.

Where the server is and who we are comes from boto3's own configuration (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID,
profiles, instance roles ...), never from here. Servers differ: some answer ranged reads with status 200, some ignore
the condition of a conditional write. Both are met below. An upload whose writer is killed may leave parts that the
server keeps until the bucket's lifecycle rule for incomplete uploads removes them.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
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
    TokenRetrievalError,
)
from urllib3.exceptions import HTTPError

from shoal_recovery.errors import StoreConflict, StoreError, StoreUnreachable
from shoal_recovery.store import Data, check_name, exactly, probe

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
_ATTEMPTS = 3
_PART_BYTES = 16 * 1024**2
_WRITER = "shoal-writer"
_TRANSFER = TransferConfig(multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=4)
_REFUSED = frozenset(
    {"403", "401", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
)
_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    NoAuthTokenError,
    TokenRetrievalError,
)
_NO_ANSWER = (ConnectionError, HTTPClientError, IncompleteReadError, HTTPError)  # the last while a body is read
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_TAKEN = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})
_NO_ANSWER_CODES = frozenset({"500", "502", "503", "504", "InternalError", "ServiceUnavailable", "SlowDown"})


def open_s3(uri: str, bucket: str, prefix: str) -> S3Store:
    """Does not connect yet. Raises StoreError where boto3's configuration is incomplete."""
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
    )
    try:
        # A session of our own: the default one is not thread-safe and keeps the first credentials for ever.
        client = boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is no URL
        raise StoreError(uri, f"the configuration of S3 access cannot be used ({error})") from error
    return S3Store(uri, bucket=bucket, prefix=prefix, client=client)


class S3Store:
    def __init__(self, uri: str, *, bucket: str, prefix: str, client: Any) -> None:
        self.uri = uri
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = client

    def put(self, name: str, data: Data) -> None:
        place = self._place(name)
        if len(data) <= _PART_BYTES:
            self._call(name, lambda: self._client.put_object(**place, Body=_View(data)))
            return
        self._call(
            name,
            lambda: self._client.upload_fileobj(_View(data), place["Bucket"], place["Key"], Config=_TRANSFER),
        )

    def put_new(self, name: str, data: Data) -> None:
        """A server that ignores the condition would overwrite: so we look first, and see afterwards whose object stands
        there. That leaves such a server one gap, two writers within the same round trip, of whom the later wins."""
        place = self._place(name)
        if self._writer(name) is not None:
            raise StoreConflict(self.uri, f"{name} is already there")
        token = uuid.uuid4().hex
        try:
            self._call(
                name,
                lambda: self._client.put_object(**place, Body=_View(data), IfNoneMatch="*", Metadata={_WRITER: token}),
            )
        except StoreConflict:
            # Ours all the same if the first answer was lost and boto3 asked again.
            if self._writer(name) != token:
                raise
        if self._writer(name) != token or self.read(name) != bytes(data):
            raise StoreConflict(self.uri, f"{name} was written by somebody else at the same time")

    def read(self, name: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
        if num_bytes == 0:
            return b""  # HTTP has no way to ask for an empty range
        end = "" if num_bytes is None else offset + num_bytes - 1
        place = self._place(name) | ({} if not offset and num_bytes is None else {"Range": f"bytes={offset}-{end}"})
        data = self._call(name, lambda: self._read(name, place, offset))
        return exactly(self.uri, name, data, offset, num_bytes)

    def _read(self, name: str, place: dict[str, str], offset: int) -> bytes:
        answer = self._client.get_object(**place)
        with answer["Body"] as body:
            # The header and not the status says whether this is a part: some servers answer 200 with a true part.
            if "Range" in place and not str(answer.get("ContentRange", "")).startswith(f"bytes {offset}-"):
                raise StoreError(self.uri, f"the server did not answer with the part of {name} that was asked for")
            data: bytes = body.read()
        return data

    def list(self, prefix: str) -> tuple[str, ...]:
        pages = self._client.get_paginator("list_objects_v2")
        found = self._call(
            prefix,
            lambda: [
                entry["Key"]
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
                for entry in page.get("Contents", ())
            ],
        )
        return tuple(sorted(key.removeprefix(self._prefix) for key in found))

    def delete(self, name: str) -> None:
        self._call(name, lambda: self._client.delete_object(**self._place(name)))

    def check_writable(self) -> None:
        probe(self)

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_name(name)}

    def _writer(self, name: str) -> str | None:
        """The mark of whoever wrote this object with `put_new` ("" if by other means); None if there is none."""
        place = self._place(name)

        def head() -> str | None:
            try:
                return str(self._client.head_object(**place)["Metadata"].get(_WRITER, ""))
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
            raise StoreUnreachable(self.uri, f"no credentials for {self._endpoint} ({error})") from error
        except _NO_ANSWER as error:
            raise StoreUnreachable(self.uri, f"{self._endpoint} does not answer ({error})") from error
        except (BotoCoreError, Boto3Error) as error:
            raise StoreError(self.uri, f"{name}: {error}") from error

    def _explained(self, name: str, error: ClientError) -> StoreError:
        code, message = _code(error), error.response.get("Error", {}).get("Message", "")
        if code == "NoSuchBucket":
            return StoreError(self.uri, f"{self._endpoint} has no bucket {self._bucket!r}")
        if code in _MISSING:
            return StoreError(self.uri, f"{name} is not there")
        if code in _TAKEN:
            return StoreConflict(self.uri, f"{name} is already there")
        if code in _REFUSED:
            return StoreUnreachable(self.uri, f"{self._endpoint} refuses the credentials ({code}: {message})")
        if code in _NO_ANSWER_CODES:
            return StoreUnreachable(self.uri, f"{self._endpoint} cannot answer at present ({code}: {message})")
        return StoreError(self.uri, f"{name}: {self._endpoint} answered {code}: {message}")

    @property
    def _endpoint(self) -> str:
        return str(self._client.meta.endpoint_url)


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
