"""On which other nodes the snapshots of a node are copied: the rule itself is the planner's, which has to know whether
the hosts have room for them."""

from __future__ import annotations

from shoal_planner.placement import backups

__all__ = ["backups"]
