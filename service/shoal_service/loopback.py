"""Whether an address to listen on is this machine's alone. Pure."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Of a name that is no address only `localhost` is."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
