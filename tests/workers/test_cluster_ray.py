"""What a Ray cluster is offered as, where Ray itself is a fake."""

from __future__ import annotations

import time

import pytest

from shoal_workers.cluster_ray import RayCluster


def entry(name: str) -> dict[str, object]:
    labels = {"shoal.io/node": name, "shoal.io/device": "cpu-1t"}
    return {"NodeID": f"of-{name}", "Alive": True, "Labels": labels, "Resources": {}, "NodeManagerAddress": "10.0.0.1"}


def test_a_node_that_is_drained_is_offered_as_one_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `systemctl stop shoal-worker`; and always in the same words."""
    in_a_minute_ms = int((time.time() + 60) * 1e3)
    told = {"of-drained": in_a_minute_ms, "of-some-time": 0, "of-gone": in_a_minute_ms}
    monkeypatch.setattr("ray.nodes", lambda: [entry("drained"), entry("some-time"), entry("stays")])
    monkeypatch.setattr("ray._private.state.state.get_draining_nodes", lambda: told, raising=False)
    monkeypatch.setattr("shoal_workers.cluster_ray._left", frozenset)
    cluster = RayCluster("c", {})
    offered = cluster.snapshot()
    nodes = {node.id: node.reclaim_at_s for node in offered.nodes}
    assert nodes.keys() == {"drained", "some-time", "stays"} and nodes["stays"] is None
    assert nodes["drained"] == pytest.approx(in_a_minute_ms / 1e3, abs=1)
    assert nodes["some-time"] == pytest.approx(time.time() + 30, abs=5)
    assert cluster.snapshot() == offered
