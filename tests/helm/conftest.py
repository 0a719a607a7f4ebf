"""Fixtures of tests that ask a real API server of Kubernetes (tests/kube_server.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from helm_ground import NAMESPACE, ROOT
from kube_ground import HEAD, RAY, VALUES, Installed, namespace
from kube_server import KubeServer, define, kube_server
from servers import ProgramMissing

from shoal_workers.cluster_ray import RayCluster
from shoal_workers.pools import provisioner_of
from shoal_workers.provisioner import Provisioner

CRDS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "kuberay-crds"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeServer]:
    """A real API server, for the whole session; the first one is built, which takes minutes."""
    definition = CRDS / "ray.io_rayclusters.yaml"
    if not definition.exists():
        pytest.skip(f"no definition of RayCluster at {definition}: KUBERAY_CRDS says where it is")
    try:
        with kube_server(tmp_path_factory.mktemp("kube")) as started:
            define(started, definition)
            for name in (NAMESPACE, "elsewhere"):
                started.create(namespace(name))
            # Of the values that a combination gives.
            about = {"metadata": {"name": "first-services"}, "value": 1000}
            started.create({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", **about})
            about = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
            started.create({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", **about})
            yield started
    except ProgramMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def installed(server: KubeServer, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The chart in a namespace that several tests share."""
    release = Installed(server, tmp_path_factory.mktemp("release"), 4, NAMESPACE, capacity={"l4": 3, "cpu": 1})
    release.helm("install", values=VALUES)
    return release


@pytest.fixture
def connector(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Provisioner]]:
    """What gets nodes, as the container of the connector starts it: with the variables and the ConfigMap of the
    release, and with the account of the head's pod."""

    made: list[Any] = []

    def started(release: Installed = installed) -> Provisioner:
        for name, value in release.environment("head").items():
            monkeypatch.setenv(name, value)
        given = release.server.ask("GET", f"/api/v1/namespaces/{release.namespace}/configmaps/{RAY}-pools")["data"]
        (tmp_path / "pools.yaml").write_text(given["pools.yaml"])
        monkeypatch.setenv("SHOAL_PROVISIONER_POOLS", str(tmp_path / "pools.yaml"))
        monkeypatch.setenv("SHOAL_WORKER_KUBERNETES_URL", release.server.url)
        account = release.server.account_folder(tmp_path / "account", release.namespace, HEAD)
        monkeypatch.setenv("SHOAL_WORKER_KUBERNETES_ACCOUNT_DIR", str(account))
        # Of the Ray cluster it asks who has joined, and nothing else.
        found = provisioner_of(None, cast(RayCluster, release), lambda member, lead_s: None)
        assert found is not None
        made.append(found)
        return found

    yield started
    for each in made:  # it lives as long as its process
        each._maker._api.close()
