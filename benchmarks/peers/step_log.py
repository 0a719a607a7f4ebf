"""What a peer writes down of each step that it has done, as it does it: one JSON object a line, a file per process.

Imported on both sides: by peers, in their own environment, and by who reads what they wrote. Times are of the wall
clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneStep:
    """`size` processes took part, with `samples` between them. `ready_s` is when its forward began."""

    worker: str
    size: int
    samples: int
    step: int
    ready_s: float
    done_s: float


class StepLog:
    def __init__(self, folder: Path, worker: str) -> None:
        self._worker = worker
        self._file = (folder / f"{worker}.jsonl").open("a", buffering=1)

    def write(self, *, size: int, samples: int, step: int, ready_s: float, done_s: float) -> None:
        done = DoneStep(worker=self._worker, size=size, samples=samples, step=step, ready_s=ready_s, done_s=done_s)
        self._file.write(json.dumps(asdict(done)) + "\n")


def read_steps(folder: Path) -> tuple[DoneStep, ...]:
    """Of all processes, in the order in which they were done. A line that is being written is left out."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return tuple(sorted((DoneStep(**json.loads(line)) for line in lines), key=lambda done: done.done_s))
