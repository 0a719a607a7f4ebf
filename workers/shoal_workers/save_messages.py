"""What agents are told of steps that go to the object store beside those that are due; part of `messages`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlsoUpload:
    """To an agent, from whoever watches it: this step of the job goes to its object store, too. Not answered: that it
    came is told as of any other step."""

    job: str
    step: int
