"""What a writer of a tracker is made with, and what it must be able to do. Each tool has a file of its own; this one
owns what they share. Sinks run in a process of their own (`track_writer`), one for each tracker of a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shoal_planner.track_spec import Tool
from shoal_service.track_feed import Batch, flat

Position = dict[str, Any]
# The module that each tool needs, and what to install for it.
MODULES: Mapping[Tool, str] = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


class SinkFailed(Exception):
    """The tracker cannot be written to at present; says why, for the user."""


class Lost(Exception):
    """What was written is not there any more: all of it has to be written anew. Says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to write where. `spec` is the whole JOB; `url` is that of the job's page, where it is known. `position` is
    what this sink said last, {} at first; where `generation` is not that of the position, what stands in the tracker
    does not count any more. `folder` is one that a tool may keep files in."""

    tool: Tool
    job_id: str
    name: str
    spec: dict[str, Any]
    created_at_s: float
    url: str | None
    generation: int
    position: Position
    folder: str

    @property
    def settings(self) -> Mapping[str, Any]:
        """The job's fields of this tool."""
        return self.spec["track"][self.tool]  # type: ignore[no-any-return]

    @property
    def parameters(self) -> dict[str, str | bool | int | float]:
        """The job's fields by their paths; where it is tracked is none of them."""
        return flat({name: value for name, value in self.spec.items() if name != "track"})

    @property
    def fresh(self) -> bool:
        """Whether nothing of this generation was written yet, as far as anybody knows."""
        return bool(self.position.get("generation") != self.generation)

    @property
    def run_id(self) -> str:
        return self.job_id if self.generation == 1 else f"{self.job_id}-{self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """`step`: up to which the tracker has all, where it can tell; else the caller's word counts."""

    position: Position
    url: str | None
    step: int | None = None


class Sink(Protocol):
    """`open` first; then `write`, any number of times, each time with what comes next, or with the same once more and
    maybe more behind it, if the last time was not heard of to its end. It returns once all is safe but for what
    `Opened.step` would say the next time. Both raise SinkFailed, or whatever the tool raises, and Lost."""

    def open(self) -> Opened: ...

    def write(self, batch: Batch) -> Position: ...

    def close(self) -> None: ...
