"""How an object store is reached that is not where this machine's own configuration says: endpoint, region, and whose
credentials. It travels within the place of a store, `s3://ACCESS@bucket/prefix`, so that whoever is told the place can
open it. Credentials are named, never told: they are looked up where the store is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from shoal_planner.errors import InvalidField

KEYS_PREFIX = "SHOAL_STORAGE_"
PROFILE_PREFIX = "shoal-"
_KEYS = re.compile(r"[A-Z0-9][A-Z0-9_]{0,59}")
_PROFILE = re.compile(r"[a-z0-9][a-z0-9-]{0,59}")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,59}")
_ENDPOINT = re.compile(r"https?://(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?/?")
_ACCESS = re.compile(r"(?<=\bs3://)[^/@\s]*@")
_FIELDS = ("endpoint", "region", "keys", "profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAccess:
    """`endpoint` is where the S3 protocol is spoken (None: Amazon). Credentials are those in the variables
    SHOAL_STORAGE_`keys`_ACCESS_KEY_ID and so on of whoever opens the store, or of the section shoal-`profile` of its
    AWS credentials file; with neither, what boto3 finds by itself."""

    endpoint: str | None = None
    region: str | None = None
    keys: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            check_endpoint(self.endpoint)
        if self.region is not None and not _REGION.fullmatch(self.region):
            raise InvalidField("region", self.region, "must be lower-case letters, digits and dashes, as in eu-west-1")
        # Not what was given for these: it may be the secret itself.
        if self.keys is not None and not _KEYS.fullmatch(self.keys):
            problem = f"must be the capital letters, digits and underscores between {KEYS_PREFIX} and _ACCESS_KEY_ID"
            raise InvalidField("credentials.environment", "...", problem)
        if self.profile is not None and not _PROFILE.fullmatch(self.profile):
            problem = (
                f"must be lower-case letters, digits and dashes, as they follow {PROFILE_PREFIX} in a section's name"
            )
            raise InvalidField("credentials.profile", "...", problem)
        if self.keys is not None and self.profile is not None:
            raise InvalidField("credentials", "...", "name environment or profile, not both")


def check_endpoint(endpoint: str) -> None:
    """Raises InvalidField."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or len(endpoint) > 200 or int(found["port"] or 1) not in range(1, 65536):
        shown = "..." if "@" in endpoint else endpoint
        raise InvalidField(
            "endpoint", shown, "must be http:// or https:// and a host, as in https://minio.example:9000"
        )


def located(uri: str, access: StoreAccess) -> str:
    """The place with its access. Raises InvalidField for one that is not in S3."""
    if not uri.startswith("s3://"):
        raise InvalidField("storage", uri, "is for places that begin with s3://")
    given = {name: getattr(access, name) for name in _FIELDS if getattr(access, name) is not None}
    return f"s3://{urlencode(given, quote_via=quote, safe='')}@{uri.removeprefix('s3://')}" if given else uri


def split_access(netloc: str) -> tuple[str, StoreAccess | None]:
    """Bucket and access of the part between `s3://` and the next slash. Raises InvalidField."""
    given, is_there, bucket = netloc.rpartition("@")
    if not is_there:
        return netloc, None
    fields = dict(parse_qsl(given, keep_blank_values=True))
    if not fields or not set(fields) <= set(_FIELDS):
        raise InvalidField("uri", f"s3://...@{bucket}", "has something before the bucket that is no access to a store")
    return bucket, StoreAccess(**fields)


def has_access(uri: str) -> bool:
    return _ACCESS.search(uri) is not None


def without_access(value: Any) -> Any:
    """Plain JSON values in which no place says how it is reached."""
    match value:
        case str():
            return _ACCESS.sub("", value) if "@" in value else value
        case Mapping():
            return {name: without_access(inner) for name, inner in value.items()}
        case list() | tuple():
            return [without_access(inner) for inner in value]
        case _:
            return value
