"""One writer wins, on a store that lets everybody overwrite everything.

Owns a lock made of small objects beside the contested one: safe agreement (Borowsky and Gafni, 1993). A writer first
says that it comes (1). Then it looks around: if somebody stands (2), it leaves, else it stands itself. Once nobody
is coming any more, the first by name of those who stand wins. Whoever begins to look after one stands, leaves; so
nobody joins those among whom the first is sought. That takes puts and a listing that shows what was put before it. It
is safe at any speed; a writer that dies at a bad moment holds up the others, and nothing is written then.

A writer's name is the sum of what it writes: so who comes back, or takes over, goes on where it was.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Protocol

from shoal_recovery.errors import StoreConflict, StoreHeldUp

MARK = ".claim-"  # in the names of objects that are no content
_COMES, _STANDS = 1, 2
_PAUSE_S = 0.1
_PATIENCE_S = 10.0


class ClaimStore(Protocol):
    uri: str

    def put(self, name: str, data: bytes) -> None: ...
    def list(self, prefix: str) -> tuple[str, ...]: ...
    def delete(self, name: str) -> None: ...


def put_claimed(
    store: ClaimStore,
    name: str,
    data: bytes,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Puts an object that is not there yet, if nobody else does. Raises StoreConflict if somebody has, StoreHeldUp if
    somebody is about to and does not."""
    me = hashlib.sha256(data).hexdigest()[:32]
    if name in store.list(name):
        raise StoreConflict(store.uri, f"{name} is already there")

    def wait_until(done: Callable[[], bool], problem: str) -> None:
        deadline_s = clock() + _PATIENCE_S
        while not done():
            if clock() > deadline_s:
                raise StoreHeldUp(store.uri, f"{name}: another writer {problem}")
            pause(_PAUSE_S)

    if not _wins(store, name, me, wait_until):
        _withdraw(store, name, me)
        wait_until(lambda: name in store.list(name), "has claimed it and does not write it")
    # A winner takes its claims away once the object is there: so the object is looked for after the claims.
    if name in store.list(name):
        _withdraw(store, name, me)
        raise StoreConflict(store.uri, f"{name} is already there")
    store.put(name, data)
    _withdraw(store, name, me)


def _wins(store: ClaimStore, name: str, me: str, wait_until: Callable[[Callable[[], bool], str], None]) -> bool:
    if _levels(store, name).get(me) != _STANDS:
        _say(store, name, me, _COMES)
        if _STANDS in _levels(store, name).values():
            return False
        _say(store, name, me, _STANDS)
    try:
        wait_until(lambda: _COMES not in _levels(store, name).values(), "has begun to claim it and does not go on")
    except StoreHeldUp:
        _withdraw(store, name, me)  # or the other one, if it comes back, would wait for this one
        raise
    # Nobody can begin to stand any more, so this may be looked at again; who is away by now has lost, or has written.
    standing = (writer for writer, level in _levels(store, name).items() if level == _STANDS)
    return min(standing, default=None) == me


def _levels(store: ClaimStore, name: str) -> dict[str, int]:
    """How far each writer is."""
    levels: dict[str, int] = {}
    for claim in store.list(name + MARK):
        writer, _, level = claim.removeprefix(name + MARK).partition("-")
        levels[writer] = max(levels.get(writer, 0), int(level))
    return levels


def _say(store: ClaimStore, name: str, me: str, level: int) -> None:
    store.put(f"{name}{MARK}{me}-{level}", b"-")


def _withdraw(store: ClaimStore, name: str, me: str) -> None:
    for level in (_COMES, _STANDS):
        store.delete(f"{name}{MARK}{me}-{level}")
