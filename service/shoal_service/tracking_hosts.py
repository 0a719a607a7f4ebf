"""Which tracking servers jobs may name, and which of them get the operator's credentials. Pure.

Whoever may send a job chooses an address that the control plane writes to. It writes with its operator's credentials to
those that the operator named, to all others with none, and to private networks only where the operator allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shoal_planner.track_spec import Tool
from shoal_service.guarded_http import check_url

_PORTS = {"http": 80, "https": 443}
Origin = tuple[str, str, int]  # scheme, host, port


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Of a writer's process: whether it has the operator's credentials, and whether it may connect to private
    networks."""

    credentials: bool
    private: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingHosts:
    """`named` are those that the operator named; `allow_private` is whether jobs may name private ones besides."""

    named: frozenset[Origin] = frozenset()
    allow_private: bool = False

    def check(self, uri: str) -> None:
        """Raises ValueError with what is wrong with the address of an MLflow server that a job names."""
        if not _is_http(uri) or origin_of(uri) in self.named:
            return
        try:
            check_url(uri, allow_private=self.allow_private)
        except ValueError as error:
            raise ValueError(f"{error}; the operator names other tracking servers in SHOAL_TRACKING_HOSTS") from None

    def reach(self, tool: Tool, settings: Mapping[str, Any]) -> Reach:
        """For the fields of a job's tool. Of all but MLflow the operator says where they are, as of Databricks."""
        uri = str(settings.get("tracking_uri", ""))
        if tool != "mlflow" or urlsplit(uri).scheme == "databricks" or uri == "databricks":
            return Reach(credentials=True, private=True)
        named = origin_of(uri) in self.named
        return Reach(credentials=named, private=named or self.allow_private)


def named_origins(addresses: Iterable[str]) -> frozenset[Origin]:
    """Of `https://host[:port]`, with or without a path. Raises ValueError for what is no such address."""
    found = set()
    for address in addresses:
        origin = origin_of(address)
        if origin is None:
            raise ValueError(f"{urlsplit(address).hostname or '...'!r} must be http(s)://HOST[:PORT]")
        found.add(origin)
    return frozenset(found)


def origin_of(uri: str) -> Origin | None:
    """None where it is not of HTTP, or parsers might differ about whose it is."""
    if not _is_http(uri) or not uri.isascii() or not uri.isprintable() or " " in uri or "\\" in uri:
        return None
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or parts.username is not None or parts.password is not None:
        return None
    return parts.scheme, host, port or _PORTS[parts.scheme]


def _is_http(uri: str) -> bool:
    return uri.strip().lower().startswith(("http:", "https:"))
