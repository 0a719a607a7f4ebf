"""`shoal clusters`: what has connected, and what was measured there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from shoal.cli_show import show_json, table
from shoal.client import Client

app = typer.Typer()


@app.command()
def clusters(
    cluster_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only this one, with its nodes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the clusters that have connected, or show one with its nodes and what was measured there."""
    with Client() as client:
        found = client.clusters() if cluster_id is None else [client.cluster(cluster_id)]
        nodes = [] if cluster_id is None else client.nodes(cluster_id)
    if as_json:
        show_json({"items": found} if cluster_id is None else {**found[0], "nodes": nodes})
        return
    columns = ("CLUSTER", "STATE", "NODES", "DEVICES", "LEASE UNTIL", "IF ITS HEAD DIES")
    table(
        columns,
        (
            (
                each["id"],
                "connected" if each["connected"] else "not connected",
                each["num_nodes"],
                each["num_devices"],
                each["lease_until"],
                each["if_head_dies"],
            )
            for each in found
        ),
    )
    for each in found if cluster_id is not None else ():
        _show_nodes(each, nodes)


def _show_nodes(cluster: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> None:
    print()
    columns = ("NODE", "DEVICES", "ZONE", "MARKET", "$/H")
    table(
        columns,
        (
            (
                node["id"],
                f"{node['devices']} x {node['device']}",
                node.get("zone"),
                "spot" if node.get("spot") else "on demand",
                node.get("price_per_hour") or None,
            )
            for node in nodes
        ),
    )
    counts = {name: len(each) for name, each in cluster["profile"].items() if isinstance(each, list) and each}
    print("measured:", ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing yet")
