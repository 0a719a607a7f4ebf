"""What a supervisor asks of the cluster about its job's script: an interface, so that only its Ray form knows Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shoal_planner.script_spec import ProgramSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Lines that a script printed, up to number `last`, with `left_out` lost before them; and, once all are told, how
    its process ended (`exit`), and what it wrote down of why (`code`, `problem`, `traceback`)."""

    lines: tuple[str, ...]
    left_out: int
    last: int
    exit: int | None
    failed: dict[str, str] | None


class ScriptGone(Exception):
    """Nobody will ever know how the script ended, or it was never begun."""

    def __init__(self, code: str, problem: str, node_lost: bool) -> None:
        super().__init__(code, problem, node_lost)
        self.code, self.problem, self.node_lost = code, problem, node_lost

    def __str__(self) -> str:
        return self.problem


class ScriptUnanswered(Exception):
    """It did not answer now."""


class Scripts(Protocol):
    """Of one job. Nodes are named by their incarnations."""

    def resources(self) -> dict[str, dict[str, float]]:
        """What each living node offers, as Ray names it."""

    def head(self) -> str | None: ...

    def start(self, attempt: int, raylet: str, program: ProgramSpec, order: dict[str, Any]) -> None:
        """Begins to; whether it comes about `look` tells. Raises ScriptGone."""

    def look(self, attempt: int, after: int) -> Looked:
        """Raises ScriptGone or ScriptUnanswered."""

    def end(self, gently: bool) -> None:
        """Ends whatever runs of it, wherever; `gently`, after a word to it."""
