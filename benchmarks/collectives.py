"""How well GenModel predicts collectives that really run, beside the older model of latency, bandwidth and reduction.

Four to eight processes on this machine carry out the planner's message plans for vectors of 64 KiB to 16 MiB, as ranks
of one node do: a sender says over a socket that its blocks are ready, and the receiver adds or copies them from memory
that both share. Both models are fitted to every other point and predict the rest. Each number of processes has a fabric
of its own, because they share the same cores: with more of them, a byte takes longer. `error.all.*` is one fabric for
all of them.

On a machine with fewer cores than processes, a run takes what all of them work, divided by the cores. That work is
judged, because other load hardly changes it; `wall.*` is the same for the time on the clock, which says little unless
the machine is idle, and is what counts where every process has a core. Either way a point is the least of several runs,
as load only ever adds to it; `noise` says how far the median of a point's runs lies above the least.
"""

from __future__ import annotations

import dataclasses
import mmap
import multiprocessing
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.collective_vectors import elements
from benchmarks.fabric_fit import Measured, fit_fabric, fit_three_terms, mean_error
from benchmarks.reporting import answer
from shoal_planner.algorithms import Algorithm
from shoal_planner.collective_messages import MessagePlan, all_reduce

KIB = 1024
SIZES = tuple(64 * KIB << power for power in range(9))
MOST_BYTES = SIZES[-1]
ITEM_BYTES = 4
RUNS = 11
# So many elements of all inputs stay in the cache while they are added: each is read from memory once.
CACHED = 8 * KIB
# Up to so many vectors, one after the other in fresh memory, are timed as one: what it takes to start all processes
# would else drown the rounds of small ones.
REPEATS = 16
READY = b"r"
TIMEOUT_S = 60
# Written before each run, so that vectors come from beyond the core's own cache, as gradients do.
EVICTING_BYTES = 4 * KIB * KIB

Vector = NDArray[np.float32]


class Case(NamedTuple):
    algorithm: Algorithm
    num_bytes: int

    @property
    def repeats(self) -> int:
        return min(REPEATS, MOST_BYTES // self.num_bytes)


def algorithms() -> tuple[Algorithm, ...]:
    factors = ((4,), (2, 2), (6,), (3, 2), (2, 3), (8,), (4, 2), (2, 4))
    rings = tuple(Algorithm(kind="ring", holders=holders) for holders in (4, 6, 8))
    return rings + tuple(
        Algorithm(kind="parameter_server", holders=int(np.prod(found)), factors=found) for found in factors
    )


def main() -> None:
    cases: list[Case] = []
    seen: list[list[Seen]] = []
    for holders in (4, 6, 8):
        mine = [found for found in algorithms() if found.holders == holders]
        of_holders = [Case(algorithm=found, num_bytes=num_bytes) for found in mine for num_bytes in SIZES]
        seen += measure(holders, of_holders)
        cases += of_holders
    fabrics: dict[str, object] = {}
    figures, fabrics["work"] = judge(cases, seen, "work_s")
    wall, fabrics["wall"] = judge(cases, seen, "wall_s")
    figures |= {f"wall.{name}": value for name, value in wall.items()}
    names = [f"{case.algorithm.name} of {case.algorithm.holders}, {case.num_bytes // KIB} KiB" for case in cases]
    answer("collectives", figures, {"seconds": dict(zip(names, seen, strict=True)), "fabrics": fabrics})


def judge(
    cases: Sequence[Case], seen: Sequence[Sequence[Seen]], clock: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Mean relative errors on the points that were not fitted, and the fabrics."""
    taken = [[getattr(run, clock) for run in runs] for runs in seen]
    points = [
        Measured(algorithm=case.algorithm, num_bytes=case.num_bytes, seconds=min(seconds))
        for case, seconds in zip(cases, taken, strict=True)
    ]
    given, kept = points[::2], points[1::2]
    errors: defaultdict[str, list[float]] = defaultdict(list)
    figures: dict[str, float] = {}
    fabrics: dict[str, dict[str, float]] = {}
    for holders in (4, 6, 8):
        fitted = [point for point in given if point.algorithm.holders == holders]
        judged = [point for point in kept if point.algorithm.holders == holders]
        for name, fabric in (("genmodel", fit_fabric(fitted)), ("three_terms", fit_three_terms(fitted))):
            fabrics[f"{name}.{holders}"] = dataclasses.asdict(fabric)
            figures[f"error.{holders}.{name}"] = mean_error(judged, fabric)
            errors[name] += [mean_error([point], fabric) for point in judged]
    return {
        "error.genmodel": statistics.fmean(errors["genmodel"]),
        "error.three_terms": statistics.fmean(errors["three_terms"]),
        "error.all.genmodel": mean_error(kept, fit_fabric(given)),
        "error.all.three_terms": mean_error(kept, fit_three_terms(given)),
        "noise": statistics.median(statistics.median(seconds) / min(seconds) - 1 for seconds in taken),
        **figures,
    }, fabrics


def measure(holders: int, cases: Sequence[Case]) -> list[list[Seen]]:
    """By case and run."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(holders)
    links = _links(holders)
    shared = np.frombuffer(mmap.mmap(-1, holders * MOST_BYTES), dtype=np.float32).reshape(holders, -1)
    pipes, processes = [], []
    for holder in range(holders):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (holder, shared, links[holder], cases, barrier, theirs)
        process = context.Process(target=_hold, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for mine in links:
        for link in mine.values():
            link.close()
    spans: list[list[list[Span]]] = [pipe.recv() for pipe in pipes]  # by holder, case and run
    for process in processes:
        process.join()
    return [
        [_seen(run, case.repeats) for run in zip(*(of_holder[at] for of_holder in spans), strict=True)]
        for at, case in enumerate(cases)
    ]


def _seen(spans: Sequence[Span], repeats: int) -> Seen:
    wall_s = max(span.ended_s for span in spans) - min(span.began_s for span in spans)
    cores = min(len(spans), len(os.sched_getaffinity(0)))
    return Seen(wall_s=wall_s / repeats, work_s=sum(span.worked_s for span in spans) / cores / repeats)


def _links(holders: int) -> list[dict[int, socket.socket]]:
    links: list[dict[int, socket.socket]] = [{} for _ in range(holders)]
    for left in range(holders):
        for right in range(left + 1, holders):
            links[left][right], links[right][left] = socket.socketpair()
    for mine in links:
        for link in mine.values():
            link.settimeout(TIMEOUT_S)
    return links


def _hold(
    number: int,
    shared: Vector,
    links: dict[int, socket.socket],
    cases: Sequence[Case],
    barrier: Barrier,
    result: Connection,
) -> None:
    """One process. All cases in turn, RUNS times over, so that a busy spell of the machine does not fall on one case
    alone."""
    scripts = [script(all_reduce(case.algorithm), number, case.num_bytes // ITEM_BYTES, links) for case in cases]
    cold = np.ones(EVICTING_BYTES // ITEM_BYTES, dtype=np.float32)
    spans: list[list[Span]] = [[] for _ in cases]
    for run in range(RUNS + 1):
        for at, case in enumerate(cases):
            shared[number] = number + 1
            cold += 1
            parts = np.split(shared, MOST_BYTES // case.num_bytes, axis=1)[: case.repeats]
            barrier.wait(TIMEOUT_S)
            began_s, worked_s = time.monotonic(), time.process_time()
            for part in parts:
                carry_out(scripts[at], number, part)
            span = Span(began_s=began_s, ended_s=time.monotonic(), worked_s=time.process_time() - worked_s)
            barrier.wait(TIMEOUT_S)  # others may still read what comes next to be overwritten
            if run:  # the first of each is for pages that nobody has touched yet
                spans[at].append(span)
            total = len(shared) * (len(shared) + 1) / 2
            assert all((part[number] == total).all() for part in parts), f"{case} gave a wrong sum"
    result.send(spans)


class Span(NamedTuple):
    """What one process saw of one run: its beginning and end, on the one clock of this machine, and its CPU seconds."""

    began_s: float
    ended_s: float
    worked_s: float


class Seen(NamedTuple):
    """One run over all processes: seconds from the first start to the last end; and the CPU seconds of all by cores,
    which is what the run would take if the cores had nothing else to do, as long as there are more processes."""

    wall_s: float
    work_s: float


class Take(NamedTuple):
    """Elements to be had from the rows of these senders: to be added, or copied from the one that there is."""

    first: int
    last: int
    senders: tuple[int, ...]
    reduce: bool


class Turn(NamedTuple):
    """One process's part of a round: whom to tell that its blocks are ready, whom to wait for, what to take then."""

    tell: tuple[socket.socket, ...]
    await_: tuple[socket.socket, ...]
    takes: tuple[Take, ...]


def script(plan: MessagePlan, number: int, size: int, links: dict[int, socket.socket]) -> tuple[Turn, ...]:
    turns = []
    for messages in plan.rounds:
        takes: defaultdict[tuple[int, int, bool], list[int]] = defaultdict(list)
        for message in messages:
            if message.receiver == number:
                place = elements(plan, message, size)
                takes[place.start, place.stop, message.reduce].append(message.sender)
        turns.append(
            Turn(
                tell=tuple(links[message.receiver] for message in messages if message.sender == number),
                await_=tuple(links[sender] for senders in takes.values() for sender in senders),
                takes=tuple(
                    Take(first=first, last=last, senders=tuple(senders), reduce=reduce)
                    for (first, last, reduce), senders in takes.items()
                ),
            )
        )
    return tuple(turns)


def carry_out(turns: Sequence[Turn], number: int, shared: Vector) -> None:
    """One process's part of a plan; its row ends as the sum.

    A block that was read from a row is written there only when its reader has sent the sum of it back, so that a reader
    needs no more than the word that what it reads is ready.
    """
    for turn in turns:
        for link in turn.tell:
            link.sendall(READY)
        for link in turn.await_:
            assert link.recv(len(READY)) == READY, "a holder is gone"
        for take in turn.takes:
            for first in range(take.first, take.last, CACHED):
                last = min(first + CACHED, take.last)
                mine = shared[number, first:last]
                for sender in take.senders:
                    if take.reduce:
                        mine += shared[sender, first:last]
                    else:
                        mine[:] = shared[sender, first:last]


if __name__ == "__main__":
    main()
