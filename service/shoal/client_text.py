"""How arguments become parts of a request."""

from __future__ import annotations

from typing import Any


def given(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def path_part(text: str) -> str:
    """A path segment; an id with a slash must not become another path."""
    return text.replace("%", "%25").replace("/", "%2F").replace("?", "%3F").replace("#", "%23") or "%20"


def matching(if_match: str | None) -> dict[str, str]:
    """The headers of a request that holds only while what it changes has this ETag."""
    return {} if if_match is None else {"If-Match": if_match}
