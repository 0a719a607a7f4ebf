"""One writer wins where a store refuses nobody, at any speed of the others, and after their deaths."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal_recovery.claims import MARK, put_claimed
from shoal_recovery.errors import StoreConflict, StoreUnreachable
from shoal_recovery.store_directory import DirectoryStore


class _Stepped:
    """A store that overwrites, and lets one call of one writer through at a time, in an order drawn from a seed."""

    uri = "test:"

    def __init__(self, seed: int, writers: int) -> None:
        self.objects: dict[str, bytes] = {}
        self.overwritten = False
        self._random = random.Random(seed)
        self._turn = threading.Condition()
        self._waiting: set[int] = set()
        self._running = writers

    def _take_turn(self) -> None:
        me = threading.get_ident()
        with self._turn:
            self._waiting.add(me)
            self._choose()
            self._turn.wait_for(lambda: self._chosen == me)
            self._waiting.discard(me)
            self._chosen = None

    _chosen: int | None = None

    def _choose(self) -> None:
        if self._chosen is None and len(self._waiting) == self._running:
            self._chosen = self._random.choice(sorted(self._waiting)) if self._waiting else None
            self._turn.notify_all()

    def leave(self) -> None:
        with self._turn:
            self._running -= 1
            self._choose()

    def put(self, name: str, data: bytes) -> None:
        self._take_turn()
        self.overwritten |= MARK not in name and name in self.objects
        self.objects[name] = bytes(data)

    def list(self, prefix: str) -> tuple[str, ...]:
        self._take_turn()
        return tuple(sorted(name for name in self.objects if name.startswith(prefix)))

    def delete(self, name: str) -> None:
        self._take_turn()
        self.objects.pop(name, None)


@pytest.mark.parametrize("seed", range(30))
def test_one_wins_in_any_order_of_calls(seed: int) -> None:
    writers = 2 + seed % 3
    store = _Stepped(seed, writers)

    def write(number: int) -> bool:
        try:
            put_claimed(store, "m", b"writer %d" % number, clock=lambda: 0.0, pause=lambda _: None)
        except StoreConflict:
            return False
        finally:
            store.leave()
        return True

    with ThreadPoolExecutor(writers) as pool:
        won = list(pool.map(write, range(writers)))
    assert sum(won) == 1
    assert not store.overwritten
    assert store.objects == {"m": b"writer %d" % won.index(True)}


class _Ends(Exception):
    pass


class _Mortal(DirectoryStore):
    """Its user dies at the call of this number."""

    def __init__(self, folder: Path, last: int) -> None:
        super().__init__(folder)
        self._left = last

    def _live(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _Ends

    def put(self, name: str, data: object) -> None:
        self._live()
        super().put(name, data)  # type: ignore[arg-type]

    def list(self, prefix: str) -> tuple[str, ...]:
        self._live()
        return super().list(prefix)

    def delete(self, name: str) -> None:
        self._live()
        super().delete(name)


@pytest.mark.parametrize("last", range(11))
def test_after_a_death_others_wait_or_win_and_the_same_writer_goes_on(tmp_path: Path, last: int) -> None:
    times = iter(range(1000))
    with pytest.raises(_Ends):
        put_claimed(_Mortal(tmp_path, last), "m", b"dead")
    store = DirectoryStore(tmp_path)
    try:
        put_claimed(store, "m", b"other", clock=lambda: float(next(times)), pause=lambda _: None)
    except (StoreConflict, StoreUnreachable):
        if "m" not in store.list("m"):
            put_claimed(store, "m", b"dead")
        assert store.read("m") == b"dead"
    else:
        assert store.read("m") == b"other"
