"""Upgrades and rollbacks of the chart in a real API server, while the connector asks for nodes and gives them back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helm_ground import CPU, MAJORS
from kube_ground import VALUES, Installed, namespace, order, told_well
from kube_server import KubeServer

from shoal_workers.provisioner import PoolOrder, Provisioner

# The server is built once, which takes some minutes.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("major", MAJORS)
def test_an_upgrade_undoes_nothing_that_the_connector_does(
    major: int, server: KubeServer, connector: Callable[[Installed], Provisioner], tmp_path: Path
) -> None:
    """In an API server that applies, with owners of fields: neither numbers of nodes nor who is to go."""
    server.create(namespace(f"upgraded-{major}"))
    release = Installed(server, tmp_path / "release", major, f"upgraded-{major}", capacity={"l4": 4})
    release.folder.mkdir()
    release.helm("install", values=VALUES)
    provisioner = connector(release)
    provisioner.told(order(l4=3))
    told_well(provisioner)
    release.reconcile()
    leaving, *staying = (member.host for member in release.members(["l4"]))
    provisioner.told({"l4": PoolOrder(target=2, release=frozenset({f"node-of-{leaving}"}))})
    told_well(provisioner)
    release.reconcile()
    # Nothing changes, then something does; the operator looks before the connector does.
    more = {"pools": [*VALUES["pools"][:2], {**CPU, "max": 7}]}
    if major == 4:  # it asks before it writes a list that the connector has written, too
        with pytest.raises(AssertionError, match=r'conflict with "shoal-connector".*: \.spec\.workerGroupSpecs'):
            release.helm("upgrade", values=more)
    for values, options in ((VALUES, ()), (more, ("--force-conflicts",) if major == 4 else ())):
        release.helm("upgrade", *options, values=values)
        release.reconcile()
        assert (release.replicas()["l4"], release.named("l4")) == (2, [leaving])
        alive = {name for name, pod in release.pods().items() if "deletionTimestamp" not in pod["metadata"]}
        assert set(staying) <= alive, "they are at work"
    assert release.groups()["cpu"]["maxReplicas"] == 7
    told_well(provisioner)


@pytest.mark.parametrize("major", MAJORS)
def test_what_helm_rolls_back_is_also_what_the_connector_has_set(
    major: int, server: KubeServer, connector: Callable[[Installed], Provisioner], tmp_path: Path
) -> None:
    """So the guide upgrades to the chart of before instead, which is rendered for what stands there."""
    server.create(namespace(f"rolled-back-{major}"))
    release = Installed(server, tmp_path / "release", major, f"rolled-back-{major}")
    release.folder.mkdir()
    release.helm("install", values=VALUES)
    provisioner = connector(release)
    provisioner.told(order(l4=4))
    told_well(provisioner)
    release.helm("upgrade", values=VALUES)
    assert release.replicas()["l4"] == 4
    if major == 4:
        with pytest.raises(AssertionError, match=r'conflict with "shoal-connector".*: \.spec\.workerGroupSpecs'):
            release.roll_back(1)
    else:
        release.roll_back(1)
        assert release.replicas()["l4"] == 2, "two nodes at work would end"
