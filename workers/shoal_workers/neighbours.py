"""The ranks of one epoch on one node, as one of them sees them: a socket to each, and the memory that each lends.

Owns the sockets, what has come over them and was not asked for yet, and every wait: all of them end at once when
`wake()` is called, and a wait for a neighbour that is gone ends with PeerLost. Sockets have names of the abstract kind,
which no file system knows and which vanish with the process. Letters are small: either the bytes themselves, or where
in the sender's arena they are.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from torch._C._distributed_c10d import Store  # torch.distributed has it too, but untyped

from shoal_workers.arena import Arena, NeighbourArena
from shoal_workers.errors import PeerLost
from shoal_workers.fence import Fence

INLINE_BYTES = 4096
_HEADER = struct.Struct("<Bxxxxxxxqqq")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_POLL_S = 0.002
_KEY = "neighbours"


class Kind(IntEnum):
    HELLO = 0  # `tag` is the sender's rank; its arena comes along
    INLINE = 1  # the bytes follow
    KEPT = 2  # in the sender's arena, until TAKEN comes back
    LENT = 3  # in the sender's arena, as long as both have agreed
    TAKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    kind: Kind
    tag: int
    offset: int = 0
    num_bytes: int = 0
    content: bytes = b""

    def packed(self) -> bytes:
        return _HEADER.pack(self.kind, self.tag, self.offset, self.num_bytes) + self.content

    @classmethod
    def unpacked(cls, packet: bytes) -> Letter:
        kind, tag, offset, num_bytes = _HEADER.unpack_from(packet)
        return cls(kind=Kind(kind), tag=tag, offset=offset, num_bytes=num_bytes, content=packet[_HEADER.size :])


class Neighbours:
    """`ranks` are all of this node, this one among them. One thread at a time uses it; any may `wake()`."""

    def __init__(self, rank: int, ranks: tuple[int, ...], store: Store, timeout_s: float, fence: Fence) -> None:
        assert rank in ranks, (rank, ranks)
        self.arena = Arena()
        self._rank = rank
        self._others = tuple(other for other in ranks if other != rank)
        self._store = store
        self._timeout_s = timeout_s
        self._fence = fence
        self._lock = threading.Lock()  # around the list of sockets alone
        self._sockets: list[socket.socket] = []
        self._by_rank: dict[int, socket.socket] = {}
        self._ranks: dict[int, int] = {}  # by descriptor
        self._lent: dict[int, NeighbourArena] = {}
        self._letters: defaultdict[tuple[int, int], deque[Letter]] = defaultdict(deque)
        self._gone: set[int] = set()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    def connect(self) -> None:
        """Meets all others. Raises EpochAbandoned or PeerLost."""
        name = secrets.token_hex(16)
        deadline_s = time.monotonic() + self._timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0shoal-{name}")
            listener.listen(len(self._others) or 1)
            listener.setblocking(False)
            self._store.set(f"{_KEY}/{self._rank}", name)
            for other in self._others:
                if other < self._rank:
                    self._call(other, deadline_s)
            self._poll.register(listener, select.POLLIN)
            while len(self._lent) < len(self._others):
                if self._turn(deadline_s, "connecting", listener.fileno()):
                    self._answer(listener)
                if self._gone:
                    raise PeerLost(self._fence.epoch, "connecting", f"of ranks {self._others} one is gone again")
            self._poll.unregister(listener)

    def lent(self, rank: int) -> NeighbourArena:
        return self._lent[rank]

    def send(self, rank: int, letter: Letter, during: str) -> None:
        """Never waits for the neighbour to do anything, unless it has left hundreds of letters unread."""
        packet, deadline_s = letter.packed(), time.monotonic() + self._timeout_s
        while True:
            self._fence.check()
            try:
                self._by_rank[rank].send(packet)
                return
            except BlockingIOError:
                self._turn(deadline_s, during, writing=self._by_rank[rank])
            except (BrokenPipeError, ConnectionResetError) as error:
                self._fence.check()
                raise PeerLost(self._fence.epoch, during, f"rank {rank} is gone") from error

    def take(self, rank: int, tag: int, during: str) -> Letter:
        """The next letter of this neighbour under this tag. Raises EpochAbandoned or PeerLost."""
        self._fence.check()
        letters, deadline_s = self._letters[rank, tag], time.monotonic() + self._timeout_s
        while not letters:
            if rank in self._gone:
                raise PeerLost(self._fence.epoch, during, f"rank {rank} is gone")
            self._turn(deadline_s, during)
        return letters.popleft()

    def has(self, rank: int, tag: int) -> bool:
        """Whether `take` would return or raise at once."""
        self._file_all(self._poll.poll(0))
        self._fence.check()
        return bool(self._letters[rank, tag]) or rank in self._gone

    def wake(self) -> None:
        """Once the fence has fallen: this process and its neighbours wait no longer."""
        os.eventfd_write(self._bell, 1)
        with self._lock:
            for sock in self._sockets:
                with suppress(OSError):  # not connected, or gone
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When nobody waits any more."""
        with self._lock:
            for sock in self._sockets:
                sock.close()
            self._sockets.clear()
        os.close(self._bell)
        os.close(self.arena.fd)

    def _call(self, other: int, deadline_s: float) -> None:
        while not self._store.check([f"{_KEY}/{other}"]):
            if time.monotonic() > deadline_s:
                raise PeerLost(self._fence.epoch, "connecting", f"rank {other} did not come in {self._timeout_s} s")
            self._fence.pause(_POLL_S)
        sock = self._add(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            sock.connect(f"\0shoal-{self._store.get(f'{_KEY}/{other}').decode()}")
        except OSError as error:
            self._fence.check()
            raise PeerLost(self._fence.epoch, "connecting", f"rank {other}: {error}") from error
        self._greet(sock)

    def _answer(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):  # whoever called has gone again
            sock, _ = listener.accept()
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                sock.close()  # abstract names are open to every user of the machine
            else:
                self._greet(self._add(sock))

    def _add(self, sock: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.append(sock)
        return sock

    def _greet(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with suppress(OSError):  # gone again: the wait for its letter says so
            socket.send_fds(sock, [Letter(kind=Kind.HELLO, tag=self._rank).packed()], [self.arena.fd])
        self._poll.register(sock, select.POLLIN)

    def _turn(
        self, deadline_s: float, during: str, listener: int | None = None, writing: socket.socket | None = None
    ) -> bool:
        """Waits until something comes, and files it. Whether somebody called the listener."""
        if writing is not None:
            self._poll.modify(writing, select.POLLIN | select.POLLOUT)
        ready = self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
        if writing is not None:
            self._poll.modify(writing, select.POLLIN)
        self._fence.check()
        if not ready:
            raise PeerLost(self._fence.epoch, during, f"no word from this node's ranks in {self._timeout_s} s")
        self._file_all(ready)
        return any(fd == listener for fd, _ in ready)

    def _file_all(self, ready: list[tuple[int, int]]) -> None:
        for fd, _ in ready:
            for sock in self._with(fd):
                self._read(sock)

    def _with(self, fd: int) -> Iterator[socket.socket]:
        yield from [sock for sock in self._sockets if sock.fileno() == fd]

    def _read(self, sock: socket.socket) -> None:
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(sock, _HEADER.size + INLINE_BYTES, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it left without reading all of ours; what it wrote before is still there
                continue
            if not packet:
                self._poll.unregister(sock)
                self._gone.add(self._ranks.get(sock.fileno(), -1))
                return
            self._file(sock, Letter.unpacked(packet), descriptors)

    def _file(self, sock: socket.socket, letter: Letter, descriptors: list[int]) -> None:
        match letter.kind:
            case Kind.HELLO:
                self._ranks[sock.fileno()] = letter.tag
                self._by_rank[letter.tag] = sock
                self._lent[letter.tag] = NeighbourArena(descriptors[0])
            case Kind.TAKEN:
                self.arena.free(letter.offset)
            case _:
                self._letters[self._ranks[sock.fileno()], letter.tag].append(letter)
