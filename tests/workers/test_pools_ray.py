"""What is read of the second kind of Ray's autoscaler: replies of its own form, read by Ray's own parser."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import ray
from ray.core.generated.autoscaler_pb2 import (
    AutoscalingState,
    FailedInstanceRequest,
    GetClusterStatusReply,
    PendingInstance,
    PendingInstanceRequest,
)

from shoal_workers.pools_ray import RayPools
from shoal_workers.provisioner import PoolOrder, PoolsUnreachable, Supply

ADDRESS = "10.0.0.1:6379"


class Gcs:
    """Of a head on which the second autoscaler runs; `away`: it does not answer."""

    def __init__(self) -> None:
        self.state = AutoscalingState()
        self.away = False

    def __call__(self, address: str) -> Gcs:
        assert address == ADDRESS
        return self

    def get_cluster_status(self, timeout_s: float) -> bytes:
        if self.away:
            raise ray.exceptions.RpcError("deadline exceeded", rpc_code=4)
        reply: bytes = GetClusterStatusReply(autoscaling_state=self.state).SerializeToString()
        return reply


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Gcs:
    head = Gcs()
    monkeypatch.setattr("ray.autoscaler.v2.utils.cached_is_autoscaler_v2", True)
    monkeypatch.setattr("ray.autoscaler.v2.sdk.GcsClient", head)
    connected = SimpleNamespace(gcs_client=SimpleNamespace(address=ADDRESS))
    monkeypatch.setattr("ray._private.worker.global_worker", connected)
    monkeypatch.setattr("shoal_workers.pools_ray.request_resources", lambda bundles: None)
    return head


def nothing(*_: object) -> None:
    raise AssertionError("there are no nodes")


def asked(pools: RayPools, **targets: int) -> None:
    pools.obey({name: PoolOrder(target=target, release=frozenset()) for name, target in targets.items()}, ())


@pytest.fixture
def pools() -> RayPools:
    return RayPools(nothing, nothing, nothing)


def failed(kind: str, at_s: float, reason: str, *, started_s: float = 0.0) -> FailedInstanceRequest:
    return FailedInstanceRequest(
        ray_node_type_name=kind, count=1, start_ts=int(started_s), failed_ts=int(at_s), reason=reason
    )


def test_machines_that_boot_are_told_from_those_that_are_asked_for(gcs: Gcs, pools: RayPools) -> None:
    gcs.state.pending_instances.extend(
        [
            PendingInstance(ray_node_type_name="spot-a", instance_id="i-1", details="ALLOCATED"),
            PendingInstance(ray_node_type_name="spot-a", instance_id="i-2", details="RAY_INSTALLING"),
            PendingInstance(ray_node_type_name="spot-b", instance_id="i-3"),
        ]
    )
    gcs.state.pending_instance_requests.append(PendingInstanceRequest(ray_node_type_name="spot-b", count=5))
    assert pools.look(["spot-a", "spot-b", "spot-c"], ()) == {
        "spot-a": Supply(starting=2),
        "spot-b": Supply(starting=1),
        "spot-c": Supply(),
    }


def test_the_newest_failure_since_more_was_asked_for_is_why_there_is_no_more(gcs: Gcs, pools: RayPools) -> None:
    now_s = time.time()
    gcs.state.failed_instance_requests.extend(
        [
            failed("spot-a", now_s - 60, "of another request"),
            failed("spot-b", now_s + 20, "InsufficientInstanceCapacity"),
            failed("spot-b", now_s + 10, "before that"),
            failed("spot-c", 0, "", started_s=now_s + 5),
        ]
    )
    asked(pools, **{"spot-a": 1, "spot-b": 2, "spot-c": 1})
    found = pools.look(["spot-a", "spot-b", "spot-c"], ())
    assert [found[name].problem for name in sorted(found)] == [
        None,
        "InsufficientInstanceCapacity",
        "it could not be made",
    ]
    # What is asked for anew has not been refused yet.
    del gcs.state.failed_instance_requests[1:]
    gcs.state.failed_instance_requests.append(failed("spot-b", now_s - 1, "before it was asked"))
    asked(pools, **{"spot-a": 1, "spot-b": 3, "spot-c": 1})
    assert pools.look(["spot-b"], ())["spot-b"].problem is None


def test_a_head_that_does_not_answer_has_refused_nothing(gcs: Gcs, pools: RayPools) -> None:
    gcs.away = True
    with pytest.raises(PoolsUnreachable, match="Ray's autoscaler: deadline exceeded"):
        pools.look(["spot-a"], ())
