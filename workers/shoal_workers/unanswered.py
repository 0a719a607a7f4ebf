"""Actors of ours whose process is stopped, or hangs: Ray starts anew who died, and waits for ever for who does not.

Owns when an actor is given up. One that Ray is starting is not: to end it would begin that from the beginning. Nor does
time count in which whoever waits had no turn itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

import ray
import structlog

log = structlog.get_logger()

PATIENCE_S = 15.0  # ranks that nobody answers end themselves after 60 s, and who is started anew takes a while
_LONGEST_S = 240.0
_SLICE_S = 1.0


class Unanswered(Exception):
    """The actor did not answer in time."""


class Patience:
    """With one actor: the longer the more often it was in vain."""

    def __init__(self) -> None:
        self._patience_s = PATIENCE_S

    def wait(self, answer: ray.ObjectRef) -> Any:
        """The answer. Raises Unanswered, and what ray.get raises."""
        for _ in range(round(self._patience_s / _SLICE_S)):
            done, _ = ray.wait([answer], timeout=_SLICE_S)
            if done:
                self._patience_s = PATIENCE_S
                return ray.get(done[0])
        raise Unanswered(f"no answer in {self._patience_s:.0f} s")

    def give_up(self, actor: Any) -> bool:
        """Ends its process, so that Ray starts another one; whether it did. Never raises: with the head away nothing
        is known, and nothing is done."""
        with contextlib.suppress(Exception):
            if ray._private.state.actors(actor._actor_id.hex()).get("State") == "ALIVE":
                self._patience_s = min(2 * self._patience_s, _LONGEST_S)
                ray.kill(actor, no_restart=False)
                return True
        return False
