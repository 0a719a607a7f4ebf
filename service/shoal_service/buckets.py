"""Which buckets a job may name without a storage profile: those are reached with whatever credentials the control plane
and the nodes find around them, which are not the project's. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from shoal_planner.errors import InvalidField

EVERYWHERE = ("s3://",)
_SCHEME = "s3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """`allowed` are `s3://bucket` or `s3://bucket/prefix`; `s3://` among them: every bucket."""

    allowed: tuple[str, ...] = EVERYWHERE

    def check(self, field: str, uri: str, profiled: bool) -> None:
        """Of a place that a job names; `profiled`: with a storage profile beside it. Raises InvalidField."""
        place = _parts(uri)
        if profiled or place is None or any(_lies_in(place, each) for each in self.allowed):
            return
        if self.allowed:
            where = f"must lie in {', '.join(self.allowed)}"
        else:
            where = "is a bucket, and this control plane lends jobs no credentials of its own"
        remedy = "name a storage profile of the project beside it" if field.rpartition(".")[2] in PROFILED else ""
        operator = "its operator lists other buckets in SHOAL_AMBIENT_STORAGE"
        raise InvalidField(field, uri, f"{where}; {' or '.join(part for part in (remedy, operator) if part)}")


ANY_BUCKET = Buckets()
PROFILED = ("uri", "eval_uri")  # of a section that may name a profile


def read_buckets(text: str) -> Buckets:
    """Of a list by commas. Raises ValueError for what is no bucket."""
    listed = tuple(item.strip() for item in text.split(",") if item.strip())
    for each in listed:
        if not each.startswith("s3://") or ".." in each.split("/"):
            raise ValueError(f"ambient_storage: {each!r} must be s3://bucket, s3://bucket/prefix, or s3:// for all")
    return Buckets(allowed=listed)


def _parts(uri: str) -> tuple[str, tuple[str, ...]] | None:
    """The bucket and the segments of the key; None for what lies in no bucket."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # as of brackets that are no IPv6 address
        return None
    if parts.scheme != _SCHEME:
        return None
    return parts.netloc, tuple(segment for segment in unquote(parts.path).split("/") if segment)


def _lies_in(place: tuple[str, tuple[str, ...]], allowed: str) -> bool:
    """By whole segments: `s3://bucket/team` does not hold `s3://bucket/team-b`. What climbs lies nowhere."""
    if allowed == EVERYWHERE[0]:
        return True
    bucket, prefix = _parts(allowed) or ("", ())
    return place[0] == bucket and place[1][: len(prefix)] == prefix and ".." not in place[1]
