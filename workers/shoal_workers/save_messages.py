"""What agents are told of steps in the object store, and of those that go there beside the ones that are due; part of
`messages`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlsoUpload:
    """To an agent, from whoever watches it: this step of the job goes to its object store, too. Not answered: that it
    came is told as of any other step."""

    job: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHolds:
    """To an agent, from whoever watches it: the checkpoint of this step of the job is whole in its object store. Not
    answered."""

    job: str
    step: int
