"""What a supervisor asks of the cluster that it runs on: an interface, so that nothing but its Ray form knows Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_recovery.tenure import Life


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """A node as the cluster shows it now. `incarnation` differs when a node of the same id comes back."""

    node: Node
    incarnation: str


class Cluster(Protocol):
    def life(self) -> Life:
        """Of this cluster, as long as its head knows what it knew before."""

    def nodes(self) -> tuple[NodeSeen, ...]:
        """The nodes that the cluster believes alive; it may be late by seconds."""

    def snapshot(self) -> ClusterSnapshot: ...

    def agent(self, seen: NodeSeen) -> tuple[str, int]:
        """The address of this node's agent, started if it does not run. Blocks for seconds; raises NodeUnreachable."""

    def rank(self, seen: NodeSeen, job: str, index: int) -> tuple[str, int]:
        """The address of the rank process of this job on this device, started if it does not run. As `agent`."""

    def end_ranks(self, job: str, nodes: frozenset[str] | None = None) -> None:
        """Ends every rank process of the job, or those on these nodes."""

    def claim_epoch(self, job: str, at_least: int) -> int:
        """An epoch number that nobody had before, at least `at_least`."""

    def first_meant(self, notice: str, incarnation: str) -> str:
        """The incarnation that a notice of this name was meant for: this one, if nobody has asked before."""


class NodeUnreachable(Exception):
    """`node` did not start or answer what was asked of it."""

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(node, problem)
        self.node = node
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.node}: {self.problem}"
