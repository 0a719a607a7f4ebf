"""Pools of KubeRay, as they are asked for and looked at; and the settings of who gets nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_kubernetes import CLUSTER, FakeKubernetes, account, serving

from shoal_planner.errors import InvalidField
from shoal_workers.pools import PoolsFile, pools_given
from shoal_workers.pools_kuberay import KubeRayPools, KubernetesApi
from shoal_workers.provisioner import Member, PoolOrder, PoolsUnreachable, Provisioner
from shoal_workers.settings import ProvisionerSettings

ENTRY: dict[str, Any] = {"name": "spot", "max": 3, "node": {"device": "cpu-1t", "price_per_hour": 0.3, "spot": True}}


@pytest.fixture
def kubernetes() -> FakeKubernetes:
    return FakeKubernetes({"other": 1, "spot": 2})


@pytest.fixture
def pools(kubernetes: FakeKubernetes, tmp_path: Path) -> Iterator[KubeRayPools]:
    with serving(kubernetes) as url:
        api = KubernetesApi(url, account(tmp_path))
        yield KubeRayPools(api, CLUSTER)
        api.close()


def joined(kubernetes: FakeKubernetes) -> tuple[Member, ...]:
    return tuple(
        Member(node=f"node-of-{pod}", incarnation=pod, pool=group, host=pod)
        for pod, group in kubernetes.running().items()
    )


def order(target: int, *release: str) -> dict[str, PoolOrder]:
    return {"spot": PoolOrder(target=target, release=frozenset(release))}


def test_nodes_are_asked_for_once_and_what_the_scheduler_says_is_heard(
    pools: KubeRayPools, kubernetes: FakeKubernetes
) -> None:
    pools.obey(order(3), ())
    supply = pools.look(["spot"], ())["spot"]
    assert (supply.starting, supply.problem) == (2, None), "pods with a machine, of which no raylet has joined"
    assert supply.said == "0/7 nodes are available: 7 Insufficient nvidia.com/gpu."
    pools.obey(order(3), joined(kubernetes))
    assert pools.look(["spot"], joined(kubernetes))["spot"].starting == 0
    assert len(kubernetes.patches) == 1
    missing = pools.look(["spot", "gone"], ())["gone"]
    assert missing.problem == f"RayCluster {CLUSTER} has no worker group gone"


def test_who_goes_is_named_and_nobody_else_goes(pools: KubeRayPools, kubernetes: FakeKubernetes) -> None:
    pools.obey(order(2), ())
    first, second = joined(kubernetes)
    pools.obey(order(1, second.node), (first, second))
    assert [member.node for member in joined(kubernetes)] == [first.node]
    pools.obey(order(1, second.node), (first,))
    (group,) = [group for group in pools._groups() if group["groupName"] == "spot"]
    assert group["scaleStrategy"] == {"workersToDelete": []}, "who has gone is not named any more"
    # Two more, of which one gets a machine and none joins: the one without goes first, and never the one that works.
    kubernetes.joins = False
    pools.obey(order(3), (first,))
    pools.obey(order(2), (first,))
    pools.obey(order(1), (first,))
    kubernetes.joins = True
    assert [member.node for member in joined(kubernetes)] == [first.node]
    # Fewer than there are at work, and nobody named: nobody goes.
    pools.obey(order(0), (first,))
    assert [member.node for member in joined(kubernetes)] == [first.node]
    assert kubernetes.replicas() == {"other": 0, "spot": 1}


def test_while_one_ends_no_other_goes_in_its_place(pools: KubeRayPools, kubernetes: FakeKubernetes) -> None:
    """Pods end over minutes; the operator would take any of the group for surplus meanwhile."""
    kubernetes.lingers, kubernetes.capacity["spot"] = True, 3
    pools.obey(order(3), ())
    first, second, third = joined(kubernetes)
    pools.obey(order(2, third.node), (first, second, third))
    there = joined(kubernetes)
    for _ in range(3):  # it is still there, and the control plane does not name it any more
        pools.obey(order(2), there)
        assert ending(pools) == {third.host}
    kubernetes.delete(first.host)  # by somebody else: another one is made at once
    pools.obey(order(2), there)
    assert ending(pools) == {first.host, third.host}
    kubernetes.capacity["spot"] = 4
    pools.obey(order(2), joined(kubernetes))
    kubernetes.end_graces()
    pools.obey(order(2), joined(kubernetes))
    assert ending(pools) == set() and len(joined(kubernetes)) == 2
    assert second in joined(kubernetes)
    (group,) = [group for group in pools._groups() if group["groupName"] == "spot"]
    assert group["scaleStrategy"] == {"workersToDelete": []} and group["replicas"] == 2


def ending(pools: KubeRayPools) -> set[str]:
    return {pod["metadata"]["name"] for pod in pools._pods() if "deletionTimestamp" in pod["metadata"]}


def test_who_does_not_answer_is_told_of_and_has_refused_nothing(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.joins = False
    with serving(kubernetes) as url:
        api = KubernetesApi(url, account(tmp_path))
        provisioner = Provisioner(lambda: [ENTRY], KubeRayPools(api, CLUSTER), lambda names: joined(kubernetes))
        assert provisioner.report() is None, "nobody has looked yet"
        provisioner.turn()
        assert not kubernetes.patches, "nobody has said yet what is wanted"
        provisioner.told({**order(2), "unknown": PoolOrder(target=9, release=frozenset())})
        provisioner.turn()
        (good,) = provisioner.report() or ()
        assert (good["pool"], good["starting"], good["problem"], good["unreached"]) == (ENTRY, 2, None, None)
        (tmp_path / "token").write_text("of somebody else")
        provisioner.turn()
        (report,) = provisioner.report() or ()
        assert "status 401 Unauthorized" in report["unreached"]
        assert report == {**good, "unreached": report["unreached"]}, "all else as it was heard"
        kubernetes.joins = True
        (tmp_path / "token").write_text("of somebody else")
        provisioner.turn()
        (report,) = provisioner.report() or ()
        assert "status 401 Unauthorized" in report["unreached"]
        nodes = [member.node for member in joined(kubernetes)]
        assert report == {**good, "nodes": nodes, "starting": 0, "unreached": report["unreached"]} and len(nodes) == 2
        (tmp_path / "token").unlink()
        provisioner.turn()
        (report,) = provisioner.report() or ()
        assert "no account to ask Kubernetes with" in report["unreached"] and report["nodes"]
        account(tmp_path)
        provisioner.turn()
        (report,) = provisioner.report() or ()
        assert (report["starting"], report["unreached"], report["nodes"]) == (0, None, nodes)
    provisioner.turn()
    (report,) = provisioner.report() or ()
    assert "Kubernetes: GET" in report["unreached"] and report["problem"] is None
    account(tmp_path)
    with pytest.raises(PoolsUnreachable, match="Kubernetes: GET"):
        KubeRayPools(api, CLUSTER).look(["spot"], ())
    api.close()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"provisioner": "ray"}, "SHOAL_PROVISIONER_POOLS = None: is required"),
        (
            {"provisioner": "kuberay", "provisioner_pools": "pools.yaml"},
            "SHOAL_PROVISIONER_RAYCLUSTER = None: is required",
        ),
        ({"provisioner": "ray", "provisioner_pools": "wrong.yaml"}, r"wrong.yaml: pools\[0\].max = 0"),
    ],
)
def test_settings_that_do_not_suffice_are_refused_by_name(
    given: dict[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pools.yaml").write_text(yaml.safe_dump([ENTRY]))
    Path("wrong.yaml").write_text(yaml.safe_dump([{**ENTRY, "max": 0}]))
    with pytest.raises(InvalidField, match=problem):
        pools_given(ProvisionerSettings(**given))  # type: ignore[arg-type]
    assert pools_given() is None
    monkeypatch.setenv("SHOAL_PROVISIONER", "terraform")
    with pytest.raises(
        InvalidField, match="SHOAL_PROVISIONER = 'terraform': input should be 'none', 'ray' or 'kuberay'"
    ):
        pools_given()
    monkeypatch.delenv("SHOAL_PROVISIONER")
    whole = pools_given(ProvisionerSettings(provisioner="ray", provisioner_pools=Path("pools.yaml")))
    assert whole == {"by": "ray", "raycluster": None, "path": str(tmp_path / "pools.yaml"), "pools": [ENTRY]}


def test_pools_are_those_that_the_file_has_now(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    """As `helm upgrade` with other pools changes it, below a connector that runs on."""
    path, other = tmp_path / "pools.yaml", {**ENTRY, "name": "other", "max": 1}
    path.write_text(yaml.safe_dump([ENTRY]))
    given = pools_given(ProvisionerSettings(provisioner="ray", provisioner_pools=path))
    assert given is not None
    with serving(kubernetes) as url:
        api = KubernetesApi(url, account(tmp_path))
        file = PoolsFile(Path(given["path"]), given["pools"])
        provisioner = Provisioner(file.entries, KubeRayPools(api, CLUSTER), lambda names: joined(kubernetes))

        def told() -> list[dict[str, Any]]:
            provisioner.turn()
            return [report["pool"] for report in provisioner.report() or ()]

        provisioner.told({name: PoolOrder(target=1, release=frozenset()) for name in ("spot", "other")})
        assert told() == [ENTRY]
        assert kubernetes.replicas() == {"other": 0, "spot": 1}
        path.write_text(yaml.safe_dump([{**ENTRY, "max": 2}, other]))
        assert told() == [{**ENTRY, "max": 2}, other]
        assert kubernetes.replicas() == {"other": 1, "spot": 1}, "the order is obeyed once the pool is known"
        for unusable in ("- {name: spot", yaml.safe_dump([{**ENTRY, "max": 0}])):
            path.write_text(unusable)
            assert told() == [{**ENTRY, "max": 2}, other]
        path.write_text(yaml.safe_dump([other]))
        assert told() == [other]
        path.unlink()  # or it stands on the machine of whoever has connected the cluster, and not on the head
        assert told() == [other]
        api.close()
