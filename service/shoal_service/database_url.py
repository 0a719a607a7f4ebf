"""What a database URL says, as libpq has it, for the drivers of this server. Pure, but for looking whether files that
it names are there. No message repeats a value that may be a password."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
# What the driver reads of a URL of its own, and SQLAlchemy would hand it as arguments that it does not have.
_OF_DRIVER = ("sslmode", *_FILES, "sslpassword", "sslnegotiation", "target_session_attrs", "krbsrvname", "gsslib")
_VERSIONS = ("ssl_min_protocol_version", "ssl_max_protocol_version")
# And what SQLAlchemy knows how to hand over.
_OF_SQLALCHEMY = ("host", "port", "user", "password", "passfile", "prepared_statement_cache_size")


def with_driver(url: str) -> URL:
    """The URL with the driver that this server uses, and options as `connection_options` takes them. Raises ValueError
    for one of another database, and for options that nobody would heed."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ValueError("database_url: is not a URL, as postgresql://USER:PASSWORD@HOST/NAME") from error
    match parsed.get_backend_name():
        case "postgresql" | "postgres":
            parsed = parsed.set(drivername="postgresql+asyncpg", query=_with_libpq_names(parsed.query))
            _check(parsed.query)
            return parsed
        case "sqlite":
            return parsed.set(drivername="sqlite+aiosqlite")
        case other:
            raise ValueError(f"database_url = {other}://...: must be postgresql:// or sqlite://")


def connection_options(url: URL) -> tuple[URL, str]:
    """Of a URL of `with_driver`: what SQLAlchemy is given, and a URL of options alone, which the driver reads."""
    mine = {name: value for name, value in url.query.items() if name in (*_OF_DRIVER, *_VERSIONS)}
    return url.difference_update_query(mine), f"postgresql://?{urlencode(mine)}" if mine else "postgresql://"


def _with_libpq_names(query: Mapping[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
    """`ssl` is what the driver calls `sslmode`."""
    if "ssl" not in query:
        return dict(query)
    if "sslmode" in query:
        raise ValueError("database_url: ssl and sslmode say the same: give sslmode")
    return {"sslmode" if name == "ssl" else name: value for name, value in query.items()}


def _check(query: Mapping[str, str | tuple[str, ...]]) -> None:
    known = (*_OF_DRIVER, *_VERSIONS, *_OF_SQLALCHEMY)
    for name, value in query.items():
        if name not in known:
            raise ValueError(f"database_url: the option {name!r} is not known; known are {', '.join(known)}")
        if not isinstance(value, str) and name != "host":
            raise ValueError(f"database_url: the option {name!r} is given more than once")
        if name == "sslmode" and value not in _MODES:
            raise ValueError(f"database_url: sslmode = {value!r} must be one of {', '.join(_MODES)}")
        if name in _FILES and not Path(str(value)).is_file():
            raise ValueError(f"database_url: {name} = {value!r} is no file that is there")
