"""What was measured of nodes, as REST and pages show it. Owns the form alone; the figures are the Profile's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shoal_planner.cluster import Node, snapshot_from_mapping
from shoal_planner.errors import InvalidField
from shoal_planner.profile import KindLink, LinkFigure, profile_from_mapping
from shoal_service.timeline import duration, num_bytes


class MeasuredNodes:
    """For one cluster, as its connector tells of it. Nodes of one kind share what was found of their kind."""

    def __init__(self, snapshot: Mapping[str, Any], profile: Mapping[str, Any]) -> None:
        self._nodes = {node.id: node for node in snapshot_from_mapping(snapshot).nodes}
        self._profile = profile_from_mapping(profile)
        self._of_kind: dict[tuple[str, str], dict[str, Any]] = {}

    def of(self, node_id: str) -> dict[str, Any]:
        """`layers`: how many figures there are for its device type; `update`: elements of optimizer state in a second;
        `links`: to nodes of each kind, within the node, and to single nodes that differ from their kind."""
        node = self._nodes[node_id]
        kind = self._profile.kinds.get(node_id, "")
        if (node.device, kind) not in self._of_kind:
            self._of_kind[node.device, kind] = self._figures(node, kind)
        own = [figure for figure in self._profile.links if node_id in (figure.from_node, figure.to_node)]
        figures = self._of_kind[node.device, kind]
        return {**figures, "links": [*figures["links"], *map(dataclasses.asdict, own)]}

    def _figures(self, node: Node, kind: str) -> dict[str, Any]:
        update = next((figure for figure in reversed(self._profile.updates) if figure.device == node.device), None)
        links = [figure for figure in self._profile.kind_links if kind in (figure.from_kind, figure.to_kind)]
        return {
            "layers": sum(figure.device == node.device for figure in self._profile.layers),
            "update": None if update is None else dataclasses.asdict(update),
            "links": [dataclasses.asdict(figure) for figure in links],
        }


def in_short(found: Mapping[str, Any]) -> str:
    """What `MeasuredNodes.of` found, in a few words; of links the slowest."""
    parts = ["layers"] if found["layers"] else []
    if found["update"]:
        parts.append("update")
    if found["links"]:
        slowest = min(found["links"], key=lambda link: float(link["bytes_per_s"]))
        parts.append(f"links {num_bytes(slowest['bytes_per_s'])}/s, {duration(slowest['latency_s'])}")
    return ", ".join(parts)


def measured_lines(value: Mapping[str, Any]) -> list[str]:
    """What a profile adds, in a few words for each kind of figure."""
    try:
        profile = profile_from_mapping(value)
    except InvalidField as error:  # of a connector of another version: a page must not fail for it
        return [f"figures that cannot be read here: {error}"]
    lines = []
    if profile.layers:
        devices = sorted({figure.device for figure in profile.layers})
        lines.append(f"{len(profile.layers)} times of parts of the model on {', '.join(devices)}")
    lines += [
        f"{rate.device} updates {rate.elements_per_s / 1e6:.0f} million elements per second" for rate in profile.updates
    ]
    lines += [
        f"{_ends(link)}: {num_bytes(link.bytes_per_s)} per second, {duration(link.latency_s)}"
        for link in profile.kind_links
    ]
    lines += [f"{_ends(link)} apart from its kind: {num_bytes(link.bytes_per_s)} per second" for link in profile.links]
    return lines


def _ends(link: KindLink | LinkFigure) -> str:
    if isinstance(link, LinkFigure):
        return f"{link.from_node} - {link.to_node}"
    return f"within {link.from_kind}" if link.within else f"{link.from_kind} - {link.to_kind}"
