"""How fast a rank gets its state, by source, beside what the source could carry at best; both alternate in one run.

`ratio.own` is own memory beside a copy of as many bytes, `ratio.peer` another process's agent beside a plain loopback
socket that carries as many bytes, `ratio.store` an S3 server (SeaweedFS) beside boto3 alone, reading the same object.
Every restore verifies what it gets, but for own memory. Speeds are bytes per second, medians of `ROUNDS`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import boto3
import torch

from benchmarks.reporting import answer
from shoal_planner.job import ModelSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.crc import checksum
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Inventory, Kind, Live, Manifest, Piece, ShardKey, Snapshot, StoredPiece
from shoal_recovery.store import Store, open_store
from shoal_workers.agent import Agent
from shoal_workers.fetching import Fetcher, Sources
from shoal_workers.greeting import epoch_pass
from shoal_workers.lifeline import Lifeline
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.rooms import Rooms
from shoal_workers.shards import ShardStore

ROUNDS = 7
STEP = 2
NAME = "000001-0"
MODEL = ModelSpec(layers=4, hidden=512, heads=8, ffn=1408, vocab=4096, tie_embeddings=True)
_REPLICA = Replica(node="here", devices=(0,), samples=1)
PLAN = Plan(
    pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(Stage(layers=((0, 4),), replicas=(_REPLICA,)),)),)
)
SHARDS = shard_map(PLAN, MODEL)


def _live() -> LiveState:
    live = LiveState.build(MODEL, SHARDS.ranks[0], "fp32", DeviceMemory("here:0", None))
    for key in (*live.vouched_keys(), *live.kept_keys()):
        live.view(key).normal_()
    return live


def _pieces(keys: tuple[ShardKey, ...], content: memoryview) -> tuple[Piece, ...]:
    found, offset = [], 0
    for key in keys:
        data = content[offset : offset + key.numel * 4]
        found.append(Piece(key=key, offset=offset, num_bytes=len(data), checksum=checksum(data)))
        offset += len(data)
    return tuple(found)


def _serve(pipe: Pipe, folder: Path, content: bytes, keys: tuple[ShardKey, ...]) -> None:
    """In a process of its own: an agent that holds a snapshot, and a plain socket that sends as many bytes."""
    shards = ShardStore(Rooms(folder / "memory"), "there")
    shards.open("job", NAME, keys)
    shards.begin("job", NAME, STEP)
    shards.slot("job", NAME, STEP)[:] = content
    shards.seal("job", NAME, STEP)
    agent = Agent(
        node="there",
        memory_dir=folder / "memory",
        disk_dir=folder / "disk",
        disk_limit_bytes=0,
        host="127.0.0.1",
        heartbeat_s=1.0,
        open_store=open_store,
        lifeline=Lifeline(cut_off_s=10.0, ends_itself_s=60.0),
    )
    agent.start()
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((agent.port, listener.getsockname()[1]))
    slot = shards.slot("job", NAME, STEP)
    while True:
        caller, _ = listener.accept()
        with caller:
            caller.sendall(slot)


def _fetch(live: LiveState, inventory: Inventory, manifests: tuple[Manifest, ...], sources: Sources) -> float:
    """Bytes per second of one restore."""
    plan = plan_restore(SHARDS, inventory, manifests, MODEL, "fp32")
    wanted = tuple(transfer for transfer in plan.transfers if not transfer.is_derived)
    fetcher = Fetcher(sources)
    began_s = time.perf_counter()
    brought = fetcher.bring(live, wanted)
    took_s = time.perf_counter() - began_s
    fetcher.abandon()
    assert not brought.failed, brought.failed
    return sum(brought.num_bytes.values()) / took_s


def _socket(port: int, num_bytes: int) -> float:
    buffer = memoryview(bytearray(num_bytes))
    began_s = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as caller:
        position = 0
        while position < num_bytes:
            position += caller.recv_into(buffer[position:])
    return num_bytes / (time.perf_counter() - began_s)


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    began_s = time.perf_counter()
    target.copy_(source)
    return target.nbytes / (time.perf_counter() - began_s)


def _boto(uri: str, name: str, num_bytes: int) -> float:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    began_s = time.perf_counter()
    body = client.get_object(Bucket=bucket, Key=f"{prefix}/{name}" if prefix else name)["Body"].read()
    assert len(body) == num_bytes
    return num_bytes / (time.perf_counter() - began_s)


def _alternate(ours: Callable[[], float], peer: Callable[[], float]) -> tuple[list[float], list[float]]:
    ours(), peer()  # memory that is touched for the first time
    pairs = [(ours(), peer()) for _ in range(ROUNDS)]
    return [one for one, _ in pairs], [other for _, other in pairs]


@contextlib.contextmanager
def _s3(folder: Path) -> Iterator[str]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from servers import new_place, start_seaweedfs

    server = start_seaweedfs(folder)
    os.environ.update(server.environment())
    try:
        yield new_place()
    finally:
        server.stop()


def main() -> None:
    torch.set_num_threads(1)
    live, old = _live(), _live()
    keys = old.vouched_keys()
    content = b"".join(old.view(key).numpy().tobytes() for key in keys)
    pieces = _pieces(keys, memoryview(content))
    runs: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, Path(scratch) / "agent", content, keys), daemon=True
        )
        process.start()
        port, plain = ours.recv()
        no_store: Callable[[], Store] = lambda: open_store("file:///nowhere")  # noqa: E731

        def sources(open_: Callable[[], Store] = no_store) -> Sources:
            return Sources(
                job="job",
                step=STEP,
                old=old,
                agents={"there": ("127.0.0.1", port)},
                open_store=open_,
                shown=epoch_pass("job", 2),
            )

        own = Inventory(
            live=(
                Live(
                    device=SHARDS.ranks[0].device,
                    step=STEP,
                    keys=(*keys, *(span.key(Kind.WEIGHT) for span in SHARDS.ranks[0].keeps)),
                ),
            )
        )
        whole = sum(old.view(key).nbytes for key in own.live[0].keys)
        from_, to = torch.randn(whole // 4), torch.randn(whole // 4)
        measured = {
            "own": _alternate(lambda: _fetch(live, own, (), sources()), lambda: _copy(from_, to)),
        }
        held = Inventory(snapshots=(Snapshot(node="there", name=NAME, step=STEP, pieces=pieces),))
        measured["peer"] = _alternate(lambda: _fetch(live, held, (), sources()), lambda: _socket(plain, len(content)))
        process.terminate()
        with _s3(Path(scratch) / "s3") as uri:
            store = open_store(uri)
            store.put("object", content)
            stored = tuple(
                StoredPiece(key=p.key, object="object", offset=p.offset, num_bytes=p.num_bytes, checksum=p.checksum)
                for p in pieces
            )
            manifest = Manifest(version=1, job="job", step=STEP, epoch=1, next_sample=0, pieces=stored)
            measured["store"] = _alternate(
                lambda: _fetch(live, Inventory(), (manifest,), sources(lambda: open_store(uri))),
                lambda: _boto(uri, "object", len(content)),
            )
    results: dict[str, float | None] = {"state_bytes": float(len(content))}
    for name, (fetched, peer) in measured.items():
        runs[name] = {"ours_bytes_per_s": fetched, "peer_bytes_per_s": peer}
        results[f"bytes_per_s.{name}"] = statistics.median(fetched)
        results[f"ratio.{name}"] = statistics.median(a / b for a, b in zip(fetched, peer, strict=True))
    answer("restore", results, runs)


if __name__ == "__main__":
    main()
