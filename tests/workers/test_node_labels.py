"""A node's labels in Ray say all that a plan wants to know of it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.errors import InvalidField
from shoal_workers.cluster_ray import distinct, labels_of, node_of
from shoal_workers.nodes import NodeSeen

RAY_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
NODE = Node(
    id="a100-3",
    device="A100-80G",
    devices=8,
    host_memory_bytes=2**40,
    disk_bytes=3 * 2**40,
    intra_bytes_per_s=3e11,
    inter_bytes_per_s=1.25e10,
    device_group=2,
    group_bytes_per_s=6e11,
    nics=4,
    zone="us-east-1a",
    spot=True,
    price_per_hour=14.7,
)


def test_a_node_comes_back_from_its_labels() -> None:
    labels = labels_of(NODE)
    assert all(RAY_VALUE.fullmatch(value) for value in labels.values()), labels
    assert node_of({"NodeID": "f" * 56}, labels) == NODE


def test_a_node_needs_no_more_than_a_device() -> None:
    node = node_of({"NodeID": "f" * 56, "Resources": {"memory": 7.0}}, {"shoal.io/device": "T4"})
    assert (node.id, node.device, node.devices, node.host_memory_bytes, node.spot) == ("f" * 12, "T4", 1, 7, False)


def test_a_node_of_a_pool_is_called_as_its_pod() -> None:
    labels = {"shoal.io/device": "T4", "shoal.io/pool": "t4-spot"}
    entry = {"NodeID": "f" * 56, "NodeManagerHostname": "shoal-ray-t4-spot-worker-x7k2p"}
    assert node_of(entry, labels).id == "shoal-ray-t4-spot-worker-x7k2p"


def test_a_label_that_is_no_number_is_named() -> None:
    with pytest.raises(InvalidField, match=r"shoal\.io/devices = 'two'"):
        node_of({"NodeID": "f" * 56}, {"shoal.io/device": "T4", "shoal.io/devices": "two"})


def test_machines_of_one_name_do_not_hide_the_cluster() -> None:
    """A snapshot of nodes with one id is refused, and the cluster with it."""
    other = dataclasses.replace(NODE, id="a100-4")
    seen = [
        NodeSeen(node=NODE, incarnation="b"),
        NodeSeen(node=other, incarnation="c"),
        NodeSeen(node=NODE, incarnation="a"),
    ]
    with pytest.raises(InvalidField, match="two nodes have this id"):
        ClusterSnapshot(nodes=tuple(each.node for each in seen))
    found = distinct(seen)
    assert [(each.node.id, each.incarnation) for each in found] == [("a100-3", "a"), ("a100-4", "c")]
    assert found == distinct(seen[::-1]), "always the same one"
    assert ClusterSnapshot(nodes=tuple(each.node for each in found)).num_devices == 16


def test_zone_and_market_are_rays_own_where_ours_are_absent() -> None:
    ray = {"ray.io/availability-zone": "us-east-1b", "ray.io/market-type": "spot", "shoal.io/device": "T4"}
    node = node_of({"NodeID": "f" * 56}, ray)
    assert (node.zone, node.spot) == ("us-east-1b", True)
    node = node_of({"NodeID": "f" * 56}, {**ray, "shoal.io/zone": "rack-7", "shoal.io/spot": "false"})
    assert (node.zone, node.spot) == ("rack-7", False)
    assert not node_of({"NodeID": "f" * 56}, {"shoal.io/device": "T4", "ray.io/market-type": "on-demand"}).spot
