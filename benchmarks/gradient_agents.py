"""Agents of nodes that keep copies in both ways, and tell what they spend on each, by part.

Owns which part of which way a thread is at, and when what came is applied. Agents of Shoal need no torch; these do, as
they stand for an agent and the process beside it that would apply updates.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch

from benchmarks.gradient_copies import GradientCopy, Spoilt, gradient_keys
from benchmarks.protection_agents import PARTS, Watch, serve_agent, watch_agents
from shoal_planner.job import JobSpec
from shoal_workers import messages as m
from shoal_workers.agent import Agent
from shoal_workers.shards import NUM_SLOTS, ShardStore

SNAPSHOTS, GRADIENTS, PLAIN = "snapshots", "gradients", "plain"
WAYS = (SNAPSHOTS, GRADIENTS)
UPDATE_PARTS = ("update", "state_sums")
CYCLE = 8
# The last snapshot is what gradients are applied to, so they follow it at once. Of a run of gradients the first is not
# applied within its own step, and with the last both of the last two are, to be compared: both are not timed.
_CYCLE = (SNAPSHOTS, SNAPSHOTS, GRADIENTS, GRADIENTS, GRADIENTS, GRADIENTS, PLAIN, PLAIN)
_FIRST, _LAST = 2, 5

_WARMING_UP = "warming up"  # the first turn: pages are touched, and torch looks up what it needs
_SETTLE_S = 60.0
Final = dict[tuple[str, int], list[str]]  # by snapshot and step: the sums of the copy that gradients have made


def way_of(step: int) -> str:
    """How the state of this step is brought to safety."""
    return _CYCLE[step % CYCLE]


def is_timed(step: int) -> bool:
    return step % CYCLE not in (_FIRST, _LAST)


def is_last(step: int) -> bool:
    """Whether it is the last of a run of gradients."""
    return step % CYCLE == _LAST


class WatchOfWays(Watch):
    """Parts have the way that their thread is at behind their names."""

    def __init__(self) -> None:
        super().__init__()
        self._at = threading.local()

    def add(self, what: str, amount: float) -> None:
        super().add(f"{what}.{getattr(self._at, 'way', 'other')}", amount)

    def answering(self, answer: Callable[[Agent, Any, Any, int], None]) -> Callable[[Agent, Any, Any, int], None]:
        def watched(agent: Agent, connection: Any, request: Any, payload_bytes: int) -> None:
            self.enter(getattr(request, "job", "other"), getattr(request, "step", 0))
            began_s = time.thread_time()
            try:
                answer(agent, connection, request, payload_bytes)
            finally:
                self.add("all", time.thread_time() - began_s)
                self.add("copies", isinstance(request, m.PutSnapshot))
                self._at.way = "other"

        return watched

    def enter(self, way: str, step: int) -> None:
        """From now on this thread is at it."""
        self._at.way = way if step >= CYCLE else _WARMING_UP

    def spent(self) -> dict[str, float]:
        """Of both ways; `rest` is what conversations took beside their parts."""
        found = {what: amount for what, amount in self.found().items() if "." in what}
        for way in WAYS:
            parts_s = sum(found.get(f"{part}.{way}", 0.0) for part in (*PARTS, "making slots"))
            found[f"rest.{way}"] = found.get(f"all.{way}", 0.0) - parts_s
        return found


class Applying:
    """The copies of one node, and the thread that applies what came for them."""

    def __init__(self, job: JobSpec, watch: WatchOfWays) -> None:
        self._job = job
        self._watch = watch
        self._came: queue.SimpleQueue[tuple[ShardStore, str, int, list[str]]] = queue.SimpleQueue()
        self._copies: dict[str, GradientCopy] = {}
        self._waiting: dict[str, tuple[int, list[str]]] = {}
        self._settled = threading.Condition()
        self._num_came = self._num_taken = 0
        self.final: Final = {}
        self.problem: str | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="apply", daemon=True).start()

    def sealing(self, seal: Callable[..., list[str]]) -> Callable[..., list[str]]:
        """What has come whole from another node is told to the thread."""

        def told(store: ShardStore, job: str, name: str, step: int, expected: list[str] | None = None) -> list[str]:
            found = seal(store, job, name, step, expected)
            if job == GRADIENTS and expected is not None:
                with self._settled:
                    self._num_came += 1
                self._came.put((store, name, step, found))
            return found

        return told

    def taking(self, take: Callable[[Agent, Any, Any, int], m.Done]) -> Callable[[Agent, Any, Any, int], m.Done]:
        """Gradients come into a slot when those that lay there before are applied."""

        def settled(agent: Agent, connection: Any, request: Any, payload_bytes: int) -> m.Done:
            if request.job == GRADIENTS:
                self.settle()
            return take(agent, connection, request, payload_bytes)

        return settled

    def settle(self) -> None:
        """Returns when all that came is applied, as far as it can be yet. Raises TimeoutError."""
        with self._settled:
            if not self._settled.wait_for(lambda: self._num_taken == self._num_came, _SETTLE_S):
                raise TimeoutError(f"gradients were not applied within {_SETTLE_S} s")

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            store, name, step, found = self._came.get()
            self._watch.enter(GRADIENTS, step)
            try:
                self._take(store, name, step, found)
            except (Spoilt, AssertionError, KeyError, OSError) as error:  # the benchmark tells, and goes on
                self.problem = self.problem or f"{name} at step {step}: {error!r}"
            with self._settled:
                self._num_taken += 1
                self._settled.notify_all()

    def _take(self, store: ShardStore, name: str, step: int, found: list[str]) -> None:
        """The gradients of the step before are applied now: that these were sent proves that its vote is over."""
        if step % CYCLE == _FIRST:
            self._begin(store, name, step - 1)
        else:
            self._copies[name].apply(*self._waiting[name])
        self._waiting[name] = step, found
        if is_last(step):
            self._copies[name].apply(*self._waiting.pop(name))
            self.final[name, step] = self._copies[name].sums

    def _begin(self, store: ShardStore, name: str, step: int) -> None:
        """The copy lies where the snapshot of this step does, which is none any more."""
        pieces = store.sealed(SNAPSHOTS, name, step).pieces
        store.begin(SNAPSHOTS, name, step)
        if name not in self._copies:
            keys = store.layout(SNAPSHOTS, name)
            assert store.layout(GRADIENTS, name) == gradient_keys(keys), name
            slots = [store.slot(GRADIENTS, name, parity) for parity in range(NUM_SLOTS)]
            self._copies[name] = GradientCopy(self._job, keys, store.slot(SNAPSHOTS, name, step), slots)
        self._copies[name].begin(step, [piece.checksum for piece in pieces])


def serve(job: JobSpec, pipe: Pipe, node: str, folder: Path) -> None:
    """The life of an agent's process."""
    watch = WatchOfWays()
    watch_agents(watch)
    applying = Applying(job, watch)
    changed: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (Agent, "_answer", watch.answering(Agent._answer)),
        (Agent, "_take_copy", applying.taking(Agent._take_copy)),
        (ShardStore, "seal", applying.sealing(ShardStore.seal)),
        (GradientCopy, "update", watch.timed("update", GradientCopy.update)),
        (GradientCopy, "taken", watch.timed("state_sums", GradientCopy.taken)),
        (GradientCopy, "verify", watch.timed("state_sums", GradientCopy.verify)),
    )
    for owner, name, call in changed:
        setattr(owner, name, call)
    applying.start()

    def found() -> tuple[dict[str, float], Final, str | None]:
        applying.settle()
        return watch.spent(), applying.final, applying.problem

    serve_agent(pipe, node, folder, found)
