"""Nodes as the command line shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from shoal.cli_show import table


def show_nodes(nodes: Iterable[Mapping[str, Any]]) -> None:
    table(
        ("NODE", "CLUSTER", "DEVICES", "MARKET", "ZONE", "STATE", "HEARD", "MEASURED", "JOBS"),
        (
            (
                node["id"],
                node["cluster_id"],
                f"{node['devices']} x {node['device']}",
                "spot" if node["spot"] else "on demand",
                node["zone"],
                f"{'' if node['connected'] else 'not '}connected{', going away' if node['reclaim_at_s'] else ''}",
                _heard(node["heard_at"], node["heard_by"]),
                _measured(node["measured"]),
                ", ".join(node["jobs"]),
            )
            for node in nodes
        ),
    )


def _heard(at: str | None, by: str | None) -> str:
    """How long ago there was a sign of life, by this machine's clock."""
    if at is None:
        return "-"
    age_s = max(0.0, time.time() - datetime.fromisoformat(at).timestamp())
    return f"{age_s:.1f} s ago" if by == "processes" else f"{age_s:.1f} s ago (Ray)"


def _measured(found: Mapping[str, Any]) -> str:
    """What of a node is measured; the rest is as the catalogue and labels say. Of links, the slowest."""
    parts = [name for name, known in (("layers", found["layers"]), ("update", found["update"])) if known]
    if found["links"]:
        slowest = min(found["links"], key=lambda link: link["bytes_per_s"])
        parts.append(f"links {slowest['bytes_per_s'] / 1e9:.3g} GB/s, {slowest['latency_s'] * 1e6:.0f} us")
    return ", ".join(parts)
