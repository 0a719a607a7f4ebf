"""Large objects over the S3 protocol: in parts, a few side by side, and none that an upload before has brought.

What was sent stays on the server when the wire breaks or the sender dies: whoever puts the same object next looks for
it, and takes it if each part has the sum and the size that it should have. Nobody sees the object before it is whole.

Owns the parts. Uses a client of boto3; what that raises is for `store_s3` to explain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PART_BYTES = 16 * 1024**2
_MIB = 1024**2
_MAX_PARTS = 10_000  # of one object, by the protocol
_SIDE_BY_SIDE = 4  # so many parts are on their way at once

Place = Mapping[str, str]  # Bucket and Key
_Part = Mapping[str, Any]  # as the server told: PartNumber, ETag, Size, perhaps checksums
_ECHOED = ("ETag", "ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256")


def put_in_parts(client: Any, place: Place, data: memoryview, body: Callable[[memoryview], Any]) -> None:
    """`body` makes of bytes what the client reads from. Raises what the client raises; the parts sent so far stay."""
    parts = _cut(data)
    upload, there = _begun(client, place)
    if upload is not None and not all(
        number <= len(parts) and _is(it, parts[number - 1]) for number, it in there.items()
    ):
        # Of other content. Some servers cannot take another part in the place of one that they have.
        client.abort_multipart_upload(**place, UploadId=upload)
        upload, there = None, {}
    if upload is None:
        upload = str(client.create_multipart_upload(**place)["UploadId"])

    def sent(number: int, part: memoryview) -> dict[str, Any]:
        answer = there.get(number)
        if answer is None:
            answer = client.upload_part(**place, UploadId=upload, PartNumber=number, Body=body(part))
        return {"PartNumber": number} | {name: answer[name] for name in _ECHOED if name in answer}

    with ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="parts") as pool:
        # The first that fails cancels those that have not begun.
        done = list(pool.map(sent, range(1, len(parts) + 1), parts))
    client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": done})


def sums(data: memoryview) -> frozenset[str]:
    """What a server may call the ETag of an object with this content: of one put whole, of one put in our parts."""
    digests = [_md5(part).digest() for part in _cut(data)]
    return frozenset({_md5(data).hexdigest(), f"{_md5(b''.join(digests)).hexdigest()}-{len(digests)}"})


def unfinished(client: Any, bucket: str, prefix: str) -> tuple[tuple[str, str], ...]:
    """Key and id of each upload in parts that nobody has finished or given up."""
    found: list[tuple[str, str]] = []
    try:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            found.extend((str(one["Key"]), str(one["UploadId"])) for one in page.get("Uploads", ()))
    except client.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchUpload":  # of a bucket that never had any, rclone says that
            raise
    return tuple((key, upload) for key, upload in found if key.startswith(prefix))


def _begun(client: Any, place: Place) -> tuple[str | None, dict[int, _Part]]:
    """An unfinished upload of this object, and its parts by number. Who may not look, or asks a server that cannot
    tell, begins anew."""
    try:
        uploads = [upload for key, upload in unfinished(client, place["Bucket"], place["Key"]) if key == place["Key"]]
        if not uploads:
            return None, {}
        pages = client.get_paginator("list_parts").paginate(**place, UploadId=uploads[-1])
        return uploads[-1], {int(part["PartNumber"]): part for page in pages for part in page.get("Parts", ())}
    except client.exceptions.ClientError:
        return None, {}


def _cut(data: memoryview) -> list[memoryview]:
    size = max(PART_BYTES, -(-len(data) // _MAX_PARTS // _MIB) * _MIB)
    return [data[first : first + size] for first in range(0, len(data), size)]


def _is(there: _Part, part: memoryview) -> bool:
    return there.get("Size") == len(part) and str(there.get("ETag", "")).strip('"') == _md5(part).hexdigest()


def _md5(data: memoryview | bytes) -> Any:
    return hashlib.md5(data, usedforsecurity=False)
