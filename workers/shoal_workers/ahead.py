"""Chunks of documents as tokens, made by threads of their own before whoever packs them comes to need them.

A chunk is a fact about the data, so it is the same whoever makes it and when. What a read ahead came to is used by the
one who would have made it else, at the moment he would have; if it failed it counts for nothing, and is made again
there, so errors are raised where they belong. Owns when chunks are made, not which.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from shoal_workers.documents import Blocks, Encoded, Encoder

# Tokenizers compute without Python's lock; more threads would take their cores from the step itself.
_THREADS = 2
_MOST_TOKENS = 2**21  # that are held ahead at once by all sources of a process, unless one document has more

Place = tuple[int, int]  # a block, and a place of it


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Made:
    """Documents, and where those behind them begin (None: the block ends)."""

    documents: list[Encoded]
    end: int | None
    num_tokens: int


class Ahead:
    """Of one source. `want` and `take` are for one thread at a time."""

    def __init__(self, blocks: Blocks, encoder: Encoder) -> None:
        self._blocks = blocks
        self._encoder = encoder
        self._process = os.getpid()
        self._wanted: dict[int, tuple[Place, Future[Made | None]]] = {}

    def want(self, stream: int, place: Place, num_tokens: int) -> None:
        """Has made what the stream takes next, about so many tokens, or until the block ends. Of each stream one."""
        self._notice_fork()
        if stream in self._wanted:
            if self._wanted[stream][0] == place:
                return
            self._wanted.pop(stream)[1].cancel()
        # Whoever drops this source does not wait for it.
        source = weakref.ref(self)
        self._wanted[stream] = place, _reader(self._process).submit(lambda: _made(source(), place, num_tokens))

    def take(self, stream: int, place: Place) -> Made:
        """The next documents from there on. Raises DataError, OSError, StoreError."""
        self._notice_fork()
        wanted, future = self._wanted.pop(stream, (None, None))
        if future is None or future.cancel() or wanted != place or future.exception() is not None:
            return self.make(place, 0)
        return future.result() or self.make(place, 0)

    def clear(self) -> None:
        """Nothing that was wanted is wanted any more."""
        for _, future in self._wanted.values():
            future.cancel()
        self._wanted.clear()

    def make(self, at: Place, num_tokens: int) -> Made:
        """At least one chunk. Raises what `take` does."""
        documents: list[Encoded] = []
        found = 0
        block, place = at
        while True:
            chunk = self._blocks.read(block, place)
            encoded = self._encoder.encode(chunk.documents)
            documents += encoded
            found += sum(len(document.tokens) for document in encoded)
            if chunk.end is None or found >= num_tokens:
                return Made(documents, chunk.end, found)
            place = chunk.end

    def _notice_fork(self) -> None:
        """No thread came along, and nobody makes what was wanted."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._wanted.clear()


class _Reader:
    """A few threads, each of which makes one after the other. They are given the next only when they are done with one:
    so a process that ends waits for as many chunks as they are, and not for all that are wanted."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="data")
        self._waiting: deque[tuple[Future[Made | None], Callable[[], Made | None]]] = deque()
        self._num_busy = 0
        self._lock = Lock()

    def submit(self, work: Callable[[], Made | None]) -> Future[Made | None]:
        future: Future[Made | None] = Future()
        with self._lock:
            self._waiting.append((future, work))
            self._go_on()
        return future

    def _go_on(self) -> None:
        if self._waiting and self._num_busy < _THREADS:
            with contextlib.suppress(RuntimeError):  # the process ends: whoever still reads does without
                self._pool.submit(self._next, *self._waiting.popleft())
                self._num_busy += 1

    def _next(self, future: Future[Made | None], work: Callable[[], Made | None]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # a panic of the tokenizers' library is no Exception
                future.set_exception(error)
        del future, work  # what was made is its taker's alone
        with self._lock:
            self._num_busy -= 1
            self._go_on()


@functools.lru_cache(maxsize=1)
def _reader(process: int) -> _Reader:
    """Of this process: what a fork copies has no thread."""
    return _Reader()


_HELD: weakref.WeakSet[Made] = weakref.WeakSet()
_HOLDING = Lock()


def _made(source: Ahead | None, place: Place, num_tokens: int) -> Made | None:
    """None: there is no room for it, or nobody who waits."""
    if source is None or not _has_room():
        return None
    made = source.make(place, num_tokens)
    with _HOLDING:
        _HELD.add(made)
    return made


def _has_room() -> bool:
    with _HOLDING:
        return sum(made.num_tokens for made in _HELD) < _MOST_TOKENS
