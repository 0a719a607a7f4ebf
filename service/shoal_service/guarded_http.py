"""Posts to addresses that users give, and never into the operator's own network: names are looked up here, every answer
is checked, and what was checked is what is connected to. Owns no retries. Redirects are not followed, and proxies of
the environment are not used. A process of a library's own can be kept out of that network as a whole, too."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpcore

_CONNECTIONS = 40
_LOOKUPS = 8
_IPv6 = ipaddress.IPv6Address


class Refused(Exception):
    """The address is none that is posted to."""


class Unreachable(Exception):
    """Nobody answered, or not as HTTP does."""


def check_url(url: str, *, allow_private: bool) -> None:
    """Raises ValueError with what is wrong. Names are looked up only when something is sent."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from error
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("has characters that a URL does not have")
    if parts.scheme != "https" and not (allow_private and parts.scheme == "http"):
        raise ValueError("must begin with https://" + (" or http://" if allow_private else ""))
    if not host or port == 0:
        raise ValueError("names no server")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must carry no user or password: they would be shown in lists")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if not allow_private and (host == "localhost" or host.endswith((".localhost", ".local", ".internal"))):
            raise ValueError(f"{host} is a name of a private network") from None
        return
    if not allow_private and not is_public(address):
        raise ValueError(f"{host} is an address of a private network")


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether everybody means the same by it, and it is no other address in disguise."""
    if isinstance(address, _IPv6):
        within = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            within.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(each is not None and not is_public(each) for each in within):
            return False
    return address.is_global and not address.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def connect_to_public_alone() -> None:
    """From now on, and for as long as it lives, this process connects to public addresses alone, whichever library
    wants to, and by whatever name: for what was looked up is seen here, and not the name. PermissionError is raised."""
    sys.addaudithook(_refuse_private)


def _refuse_private(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        return
    address = arguments[1] if len(arguments) > 1 else None
    if address is None and event != "socket.connect":  # to whom it is connected already
        return
    host = str(address[0]) if isinstance(address, tuple) and address else ""
    with contextlib.suppress(ValueError):
        if is_public(ipaddress.ip_address(host.partition("%")[0])):
            return
    raise PermissionError(f"{host or 'a socket of this machine'} is an address of a private network")


class _Guarded(httpcore.AsyncNetworkBackend):
    """Connects to public addresses alone, unless it may go anywhere; to which one of a name is decided here, so it
    cannot become another. Names are looked up in threads of their own: those of the event loop are others'."""

    def __init__(self, *, allow_private: bool) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._allow_private = allow_private
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="webhook-names")

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - as httpcore has it
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        for address in addresses:
            if not self._allow_private and not is_public(ipaddress.ip_address(address.partition("%")[0])):
                raise Refused(f"{host} is {address}, an address of a private network")
        return await self._inner.connect_tcp(addresses[0], port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - as httpcore has it
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise Refused("a socket of this machine")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class Poster:
    """Use from one event loop; `close` ends its connections. `allow_private`: anywhere."""

    def __init__(self, *, allow_private: bool, timeout_s: float) -> None:
        self._backend = _Guarded(allow_private=allow_private)
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=self._backend, max_connections=_CONNECTIONS, max_keepalive_connections=0
        )
        self._timeout_s = timeout_s

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """The status of the answer, whose body is not read. Raises Refused, and Unreachable with a sentence."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._pool.stream("POST", url, headers=list(headers.items()), content=body) as answer,
            ):
                return answer.status
        except TimeoutError as error:
            raise Unreachable(f"no answer within {self._timeout_s:g} s") from error
        except (
            OSError,
            UnicodeError,
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
        ) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._pool.aclose()
        self._backend.close()
