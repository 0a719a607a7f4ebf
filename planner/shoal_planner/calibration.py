"""Calibration: by how much a cluster differs from the catalogue and its file, as six factors.

Owns the value and how it changes a device type and a cluster. Does not own how it is fitted (`calibrate`), nor the
costs that follow (`costs`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from shoal_planner.catalogue import DeviceType
from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.errors import InvalidField

FACTORS = ("compute", "passes", "kernel", "inside", "network", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors on the catalogue's efficiency (`compute`), on how often a block's activations cross memory (`passes`; a
    framework without fused attention needs several times as many) and on the seconds of a kernel's start (`kernel`),
    and on the cluster file's rates of links within a node (`inside`) and between nodes (`network`). Where parts of a
    model were timed by themselves, `parts` is on these seconds, in place of the first three: within a step, caches are
    cold and memory is shared. 1 changes nothing.

    An efficiency that the cluster file states stays as it is, and so does a link that was measured by itself
    (`Profile.links`). `source` says what it was fitted on, `error` the mean error of those runs, as a share.
    """

    compute: float = 1.0
    passes: float = 1.0
    kernel: float = 1.0
    inside: float = 1.0
    network: float = 1.0
    parts: float = 1.0
    source: str = ""
    error: float = 0.0

    def __post_init__(self) -> None:
        for name in FACTORS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidField(name, value, "must be more than zero")

    def device(self, device: DeviceType) -> DeviceType:
        if device.efficiency_stated:
            return device
        return dataclasses.replace(
            device,
            efficiency=min(1.0, device.efficiency * self.compute),
            passes=device.passes * self.passes,
            kernel_s=device.kernel_s * self.kernel,
        )

    def cluster(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        links = tuple(dataclasses.replace(link, bytes_per_s=link.bytes_per_s * self.network) for link in snapshot.links)
        return dataclasses.replace(snapshot, nodes=tuple(map(self._node, snapshot.nodes)), links=links)

    def _node(self, node: Node) -> Node:
        group = node.group_bytes_per_s
        return dataclasses.replace(
            node,
            intra_bytes_per_s=node.intra_bytes_per_s * self.inside,
            group_bytes_per_s=None if group is None else group * self.inside,
            inter_bytes_per_s=node.inter_bytes_per_s * self.network,
        )
