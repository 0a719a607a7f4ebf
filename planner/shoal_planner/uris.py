"""Places as users write them, taken apart. What may stand in which field is the field's to say."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from shoal_planner.errors import InvalidField


def parts_of(field: str, uri: str) -> SplitResult:
    """Raises InvalidField for what no parser takes, as brackets that hold no IPv6 address."""
    try:
        return urlsplit(uri)
    except ValueError as error:
        raise InvalidField(field, uri, f"is not a URI: {error}") from error
