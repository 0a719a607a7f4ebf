"""From the death of a node to the next step that counts, of a job that runs on a local cluster of real raylets.

Usage: python -m benchmarks.recovery [--json] [--kills N] [--without-peers] [--only-rejoin]

A kill is SIGKILL to all processes of a node at once, its folders deleted; then the node comes back, and the next one
dies. `shoal` recovers as it does; `cloud_only` is the same engine, format and client without what survivors remember:
their processes are killed, too, their disks emptied, and what starts anew has only the object store, a real S3 server
behind a link of 400 Mbit/s. `torchft` (replica groups of one, a heartbeat limit of 0.5 s) and `ray_train` (fixed and
elastic, a checkpoint every ten steps to the local disk, killed halfway between two) train the same model in an
environment of their own, and tell of their steps themselves (`benchmarks.recovery_peers`). All take turns; nothing else
runs meanwhile.

`part` and `part_cloud_only` are the same on six nodes, with one sample a step, of which two die at once, the second of
them being where the copies of the first were: what the first had, two of twelve layers, is in the store alone
(`missing_bytes`).

`speedup` is how many times as long the other takes, from the kill to the next done step. Part of that is the start of
processes, as a restart from the cloud has it: `speedup_beside_starts` leaves out, on both sides, what passes until all
are there and have a plan.

`kill_to_commit_s` ends with the next done step, `kill_to_ready_s` where that step begins, `rejoin_s` is how long the
others stand still when a node comes back: of Shoal for a job (`rejoined`) whose steps wait instead of computing, as on
one machine's cores three nodes are no faster than two, and a node is taken in only where that pays. `step_s` is a step
of all nodes, and by way of recovery one of survivors. Steps, phases and bytes are those of the job's own records.
`vanish_to_commit_s` is that of `benchmarks.vanishing`: hosts that leave the network without a packet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import vanishing
from benchmarks.recovery_job import JOB, PART_JOB, Blow, TrainingJob, waiting_job, with_models_of_peers
from benchmarks.recovery_peers import PeerBlow, peers
from benchmarks.reporting import answer

NUM_KILLS = 5
_SAMPLE_S = 0.2
_FIGURES = (
    "kill_to_commit_s",
    "kill_to_ready_s",
    "lost_steps",
    "redone_steps",
    "store_bytes",
    "missing_bytes",
    "rejoin_s",
    "step_s",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=NUM_KILLS, help="of each side")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--only-rejoin", action="store_true", help="nothing but nodes that come back to Shoal")
    arguments = parser.parse_args()
    struck: defaultdict[str, list[Blow | PeerBlow]] = defaultdict(list)
    problems: dict[str, str] = {}
    steps_s = []
    for number in range(arguments.kills):
        _strike_and_rejoin(struck, number)
        if arguments.only_rejoin:
            continue
        with tempfile.TemporaryDirectory(prefix="shoal-recovery-") as folder, TrainingJob(Path(folder)) as job:
            _note(struck, "shoal", job.strike(number, everyone=False, comes_back=True))
            _note(struck, "cloud_only", job.strike(number, everyone=True))
            steps_s.append(job.median_step_s())
        _strike_parts(struck, number)
        if not arguments.without_peers:
            _strike_peers(struck, problems)
    found = ((f"{figure}.{side}", _median(blows, figure)) for side, blows in struck.items() for figure in _FIGURES)
    results: dict[str, float | None] = {name: value for name, value in found if value is not None}
    results |= {f"kill_to_commit_s.{side}": None for side in problems}
    results["rejoin_s.shoal"] = results.pop("rejoin_s.rejoined", None)
    runs: dict[str, Any] = {side: list(map(asdict, blows)) for side, blows in struck.items()}
    if not arguments.only_rejoin:
        results["speedup.replica_survives"] = _speedup(struck["shoal"], struck["cloud_only"])
        results["speedup.part_survives"] = _speedup(struck["part"], struck["part_cloud_only"])
        results["speedup_beside_starts.replica_survives"] = _beside_starts(struck["shoal"], struck["cloud_only"])
        results["speedup_beside_starts.part_survives"] = _beside_starts(struck["part"], struck["part_cloud_only"])
        vanished, why = vanishing.measure(arguments.kills)
        results |= {"step_s": statistics.median(steps_s), vanishing.RESULT: vanishing.median(vanished)}
        runs["vanished"] = why or list(map(asdict, vanished))
    answer("recovery", results, {**runs, **problems})


def _note(struck: defaultdict[str, list[Blow | PeerBlow]], side: str, blow: Blow | PeerBlow) -> None:
    """All of it takes the better part of an hour: each blow is told as it falls."""
    struck[side].append(blow)
    print(side, json.dumps(asdict(blow)), file=sys.stderr, flush=True)


def _strike_and_rejoin(struck: defaultdict[str, list[Blow | PeerBlow]], number: int) -> None:
    with_models_of_peers()
    with (
        tempfile.TemporaryDirectory(prefix="shoal-rejoin-") as folder,
        TrainingJob(Path(folder), job=waiting_job(_SAMPLE_S), copies="auto", stored=False) as job,
    ):
        _note(struck, "rejoined", job.strike(number, everyone=False, comes_back=True))


def _strike_parts(struck: defaultdict[str, list[Blow | PeerBlow]], number: int) -> None:
    """Each on a cluster of its own: nodes that come back after the first blow may not be worth their state."""
    for side, everyone in (("part", False), ("part_cloud_only", True)):
        with (
            tempfile.TemporaryDirectory(prefix="shoal-part-") as folder,
            TrainingJob(Path(folder), 6, job=PART_JOB) as job,
        ):
            _note(struck, side, job.strike(number, everyone=everyone, num_gone=2))


def _strike_peers(struck: defaultdict[str, list[Blow | PeerBlow]], problems: dict[str, str]) -> None:
    """One kill of each; a peer that did not come so far once is left out from then on."""
    with tempfile.TemporaryDirectory(prefix="shoal-peers-") as folder:
        for side, peer in peers(Path(folder), JOB).items():
            if side not in problems:
                try:
                    with peer:
                        _note(struck, side, peer.strike())
                except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                    problems[side] = str(error)
                    struck.pop(side, None)


def _speedup(ours: list[Blow | PeerBlow], clouds: list[Blow | PeerBlow]) -> float:
    return statistics.median(
        cloud.kill_to_commit_s / our.kill_to_commit_s for our, cloud in zip(ours, clouds, strict=True)
    )


def _beside_starts(ours: list[Blow | PeerBlow], clouds: list[Blow | PeerBlow]) -> float:
    """Without the time until all processes of either were there again and had a plan."""
    seconds = [[blow.kill_to_commit_s - _decide_s(blow) for blow in blows] for blows in (ours, clouds)]
    return float(statistics.median(cloud_s / our_s for our_s, cloud_s in zip(*seconds, strict=True)))


def _decide_s(blow: Blow | PeerBlow) -> float:
    assert isinstance(blow, Blow)
    return float(blow.phases_s["decide_s"])


def _median(blows: list[Blow | PeerBlow], figure: str) -> float | None:
    """None where the side has no such figure."""
    values = [value for blow in blows if (value := getattr(blow, figure, None)) is not None]
    return statistics.median(values) if values else None


if __name__ == "__main__":
    main()
