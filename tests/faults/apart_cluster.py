"""A local Shoal whose raylets have networks of their own: each in a network namespace, the head on the bridge beside
the control plane. So nodes can be cut off from one another, and no packet passes.

Run as `python -m faults.apart_cluster` it is the local cluster of `shoal_workers.local`, told by its environment where
each node is to stand.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from networks import Network, inside
from ray._private import services
from ray.cluster_utils import Cluster

from shoal.local_shoal import LocalShoal
from shoal_workers import local

_TOLD = "SHOAL_DRILL_NETWORK"
_NODE = "shoal.io/node"


class ApartShoal(LocalShoal):
    _cluster_program = "faults.apart_cluster"


def environment(network: Network, names: Iterable[str], more: Mapping[str, str]) -> Mapping[str, str]:
    """What an ApartShoal must be given for its nodes to stand in this network; `more` is for all its processes."""
    nodes = {name: (network.namespace(name), network.host(name)) for name in names}
    return {_TOLD: json.dumps({"head": network.address, "nodes": nodes, "environment": more})}


class _ApartCluster(Cluster):
    def add_node(self, wait: bool = True, **given: Any) -> Any:
        told = json.loads(os.environ[_TOLD])
        if _NODE not in given.get("labels", {}):
            return super().add_node(wait, node_ip_address=told["head"], **given)
        namespace, host = told["nodes"][given["labels"][_NODE]]
        reached = {"SHOAL_WORKER_BIND_HOST": host, "SHOAL_WORKER_ADVERTISE_HOST": host}
        with _starting_in(namespace):
            return super().add_node(wait, **given | {"node_ip_address": host, "env_vars": given["env_vars"] | reached})


@contextlib.contextmanager
def _starting_in(namespace: str) -> Iterator[None]:
    """Only what Ray starts: this process watches all nodes, and stays where it can."""
    start = services.start_ray_process

    def start_there(*arguments: Any, **options: Any) -> Any:
        with inside(namespace):
            return start(*arguments, **options)

    services.start_ray_process = start_there
    try:
        yield
    finally:
        services.start_ray_process = start


if __name__ == "__main__":
    os.environ.update(json.loads(os.environ[_TOLD])["environment"])
    local.Cluster = _ApartCluster  # type: ignore[misc]
    local.main()
