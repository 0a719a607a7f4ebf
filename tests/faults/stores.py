"""The object stores of drills: folders, and one real S3 server behind a wire that can be cut."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from breakable_wire import BreakableWire
from faults.drills import Drill
from networks import Network, inside
from servers import new_place, start_seaweedfs

from shoal_recovery.checkpoints import list_manifests, load_manifest, manifest_name
from shoal_recovery.store import open_store

STORE = "store"  # in networks, beside the nodes
_SLOW_BYTES_PER_S = 3e4


class Stores:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = start_seaweedfs(folder / "seaweedfs")
        os.environ.update(self._server.environment())
        new_place()  # the bucket is made while the wire is whole
        self._spoilt: set[tuple[str, int]] = set()
        self._wire = BreakableWire(self._server.endpoint, "0.0.0.0")
        os.environ.update(self.environment())

    def environment(self, host: str = "127.0.0.1") -> Mapping[str, str]:
        """What processes that use the server must be given, where this one has that address.

        One attempt each: a store that fails is tried again by Shoal itself, and a drill is soon over."""
        url = f"http://{host}:{self._wire.port}"
        return self._server.environment() | {"AWS_ENDPOINT_URL_S3": url, "AWS_MAX_ATTEMPTS": "1"}

    def stand_in(self, network: Network) -> Mapping[str, str]:
        """What processes that use the server in this network must be given, where it stands apart from all others."""
        with inside(network.namespace(STORE)):
            listener = socket.create_server((network.host(STORE), self._wire.port))
        self._wire.listen(listener)  # not inside, as threads have the network of who starts them
        return self.environment(network.host(STORE))

    def place(self, drill: Drill) -> str | None:
        match drill.store:
            case "none":
                return None
            case "file":
                return (self._folder / f"store-{drill.seed}").as_uri()
            case "s3":
                return new_place()

    def cut(self) -> None:
        self._wire.cut()

    def slow(self) -> None:
        """A shard takes seconds."""
        self._wire.slow(_SLOW_BYTES_PER_S)

    def mend(self) -> None:
        self._wire.mend()

    def hang(self) -> None:
        """Its connections stay open, and it says nothing."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def spoil_newest(self, uri: str, job: str) -> None:
        """Bits of every shard of the newest checkpoint whose manifest is whole, if there is one."""
        store, spoilt = open_store(uri), self.spoilt(job)
        whole = [step for step in list_manifests(store, job) if step not in spoilt]
        if not whole:
            return
        newest = load_manifest(store, job, whole[0])
        self._spoilt.add((job, newest.step))
        for name in sorted({piece.object for piece in newest.pieces}):
            content = bytearray(store.read(name))
            content[len(content) // 2] ^= 0x40
            store.put(name, content)

    def spoil_manifest(self, uri: str, job: str) -> None:
        """Of the newest checkpoint: half of it is there."""
        store = open_store(uri)
        newest = list_manifests(store, job)[0]
        self._spoilt.add((job, newest))
        name = manifest_name(job, newest)
        content = bytes(store.read(name))
        store.put(name, content[: len(content) // 2])

    def spoilt(self, job: str) -> frozenset[int]:
        """Steps of which the checkpoints were."""
        return frozenset(step for other, step in self._spoilt if other == job)

    def close(self) -> None:
        self.wake()
        self._wire.close()
        self._server.stop()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._server.process.pid, number)
