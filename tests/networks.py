"""A network of its own for each node: namespaces joined by a bridge, whose links can be cut without a packet.

This process stands on the bridge, as the head of a cluster does. Needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

_CLONE_NEWNET = 0x40000000
_MOST = 4
_NOBODY = "lladdr 02:00:00:00:00:01 nud permanent"
_turns: set[int] = set()  # of networks of this process, which are there at the same time


class Network:
    """A context. Names are those of nodes."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._turn = min(set(range(_MOST)) - _turns)
        _turns.add(self._turn)
        self._mark = f"{os.getpid()}{'abcd'[self._turn]}"
        self._subnet = f"10.{190 - 50 * self._turn + os.getpid() // 250 % 50}.{os.getpid() % 250}"
        self._bridge = f"shb{self._mark}"
        self._aside = f"sha{self._mark}"
        self.address = f"{self._subnet}.254"
        """Of this process, for nodes."""

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            _ip("link", "add", self._aside, "type", "bridge")
            _ip("link", "set", self._aside, "up")
            for name in self._names:
                self._join(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "link", "delete", self._port(name)], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "delete", self.namespace(name)], check=False, capture_output=True)
        for bridge in (self._bridge, self._aside):
            subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True)
        _turns.discard(self._turn)

    def host(self, name: str) -> str:
        return f"{self._subnet}.{self._names.index(name) + 1}"

    def namespace(self, name: str) -> str:
        return f"shoal-{self._mark}-{name}"

    def cut(self, *names: str) -> None:
        """Nothing comes to these nodes or from them any more; nobody is told."""
        for name in names:
            _ip("link", "set", self._port(name), "down")

    def part(self, *names: str) -> None:
        """These nodes hear each other, and nobody else; nobody is told."""
        for name in names:
            _ip("link", "set", self._port(name), "master", self._aside)

    def sever(self, one: str, other: str) -> None:
        """Nothing of either reaches the other any more, and everybody else hears both; nobody is told."""
        for name, lost in ((one, other), (other, one)):
            self._deafen(name, [self.host(lost)])

    def part_beside(self, beside: str, *names: str) -> None:
        """These nodes hear each other and `beside`, whom everybody hears, and nobody else; nobody is told."""
        others = [name for name in self._names if name not in (beside, *names)]
        for name in names:
            self._deafen(name, [self.address, *map(self.host, others)])
        for other in (None, *others):
            self._deafen(other, [self.host(name) for name in names])

    def mend(self, *names: str) -> None:
        """Whoever is severed from these nodes hears them again, too."""
        for name in names:
            _ip("link", "set", self._port(name), "master", self._bridge, "up")
            _ip("-n", self.namespace(name), "neighbour", "flush", "dev", "eth0", "nud", "permanent")
            for other in set(self._names).difference(names):
                space = ("-n", self.namespace(other))
                _ip(*space, "neighbour", "flush", "to", self.host(name), "dev", "eth0", "nud", "permanent")
            _ip("neighbour", "flush", "to", self.host(name), "dev", self._bridge, "nud", "permanent")

    def cut_head(self) -> None:
        """This process hears nobody and is heard by nobody; the nodes hear each other."""
        _ip("address", "delete", f"{self._subnet}.254/24", "dev", self._bridge)

    def mend_head(self) -> None:
        _ip("address", "add", f"{self._subnet}.254/24", "dev", self._bridge)

    def _deafen(self, name: str | None, hosts: Iterable[str]) -> None:
        """What this node, or this process, sends to these hosts goes to nobody; all at once."""
        space, device = ((), self._bridge) if name is None else (("-n", self.namespace(name)), "eth0")
        lines = (f"neighbour replace {host} {_NOBODY} dev {device}" for host in hosts)
        _ip(*space, "-batch", "-", said="\n".join(lines))

    def _join(self, name: str) -> None:
        space = self.namespace(name)
        _ip("netns", "add", space)
        _ip("link", "add", self._port(name), "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", self._port(name), "master", self._bridge, "up")
        _ip("-n", space, "address", "add", f"{self.host(name)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def _port(self, name: str) -> str:
        return f"shv{self._names.index(name)}p{self._mark}"


def enter(namespace: str) -> None:
    """This thread, and those that it starts from now on, have the network of that name."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        _enter(file.fileno(), namespace)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Processes that this thread starts have the network of that name."""
    with open("/proc/thread-self/ns/net", "rb") as own:
        enter(namespace)
        try:
            yield
        finally:
            _enter(own.fileno(), "its own network again")


def _enter(file: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def missing() -> str:
    """Why there can be no such networks here; empty where there can."""
    if os.geteuid():
        return "only root makes network namespaces"
    if shutil.which("ip") is None:
        return "ip is not installed"
    with contextlib.suppress(RuntimeError):
        with Network(("probe",)):
            return ""
    return "network namespaces are not permitted"


def _ip(*arguments: str, said: str = "") -> None:
    done = subprocess.run(["ip", *arguments], input=said, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
