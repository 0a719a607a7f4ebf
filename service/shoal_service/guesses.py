"""How often an address may be wrong about a secret. Owns counting; what counts as wrong is the callers' to say.

Secrets are 256 random bits, so this is not what keeps guesses from succeeding: it keeps them from being a load, and
makes them visible.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from shoal_service.errors import TooManyGuesses

_BURST = 20
_REFILL_PER_S = 1 / 3
_MAX_ADDRESSES = 10_000  # of more, those that were wrong the longest ago are forgotten
_MAX_KNOWN = 4096


class Guesses:
    """A bucket of wrong attempts for each kind of secret and address. It holds up what is wrong: whoever can tell
    cheaply that a secret is right asks for `held`, and lets it through; one that was right before is never held up."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._left: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    def check(self, kind: str, address: str, hashed: str) -> None:
        """Raises TooManyGuesses."""
        if (held := self.held(kind, address, hashed)) is not None:
            raise held

    def held(self, kind: str, address: str, hashed: str) -> TooManyGuesses | None:
        """What is to be said to this secret if it is not right: None as long as the address may guess."""
        left = self._left_of((kind, _network(address)))
        return None if hashed in self._known or left >= 1 else TooManyGuesses((1 - left) / _REFILL_PER_S)

    def right(self, hashed: str) -> None:
        self._known[hashed] = None
        self._known.move_to_end(hashed)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def wrong(self, kind: str, address: str, hashed: str) -> None:
        self._known.pop(hashed, None)
        key = (kind, _network(address))
        self._left[key] = (max(0.0, self._left_of(key) - 1), self._clock_s())
        self._left.move_to_end(key)
        if len(self._left) > _MAX_ADDRESSES:
            self._left.popitem(last=False)

    def _left_of(self, key: tuple[str, str]) -> float:
        left, at_s = self._left.get(key, (float(_BURST), 0.0))
        return min(float(_BURST), left + (self._clock_s() - at_s) * _REFILL_PER_S)


def _network(address: str) -> str:
    """Whoever has one IPv6 address has 2^64 of them."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else address
