"""`shoal connect --stay`, as it runs beside Ray's head in a pod: it comes before both, and outlives heads."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from control_plane import ok, start_control_plane
from plain_ray import PlainRay
from servers import free_ports
from waiting import eventually

LIMIT_S = 180.0


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("keeps", [False, True], ids=["a head that forgets", "a head that remembers"])
def test_a_cluster_is_offered_by_whoever_stays_and_again_after_its_head_was_started_anew(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that remembers still knows the connector of the one before it, which was bound to a node that is gone."""
    if keeps:
        monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
        monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path / "head"))
    token, port = secrets.token_urlsafe(32), free_ports(1)[0]
    given = tmp_path / "tokens"
    given.mkdir()
    (given / "connector-east").write_text(token)
    server = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="ray-") as short:
        ray = PlainRay(tmp_path, Path(short) / "a")
        command = [str(Path(sys.executable).parent / "shoal"), "connect", "--stay", "--server", server]
        command += ["--cluster-id", "east", "--address", ray.address]
        environment = {**ray.environment, "SHOAL_TOKEN": token}
        with (tmp_path / "stay.log").open("wb") as log:
            stays = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            ray.add("x")
            eventually(lambda: "no control plane answers" in (tmp_path / "stay.log").read_text(), LIMIT_S)
            plane = start_control_plane(tmp_path / "plane", port, tokens_dir=str(given))
            try:

                def offered() -> list[str]:
                    found = httpx.get(f"{server}/v1/nodes", headers=plane.headers)
                    return [node["id"] for node in ok(found)["items"] if node["connected"]]

                eventually(lambda: offered() == ["x"], LIMIT_S)
                for name in ("x", "head"):
                    ray.kill(name)
                eventually(lambda: not offered(), LIMIT_S)
                ray.start_head()
                ray.add("y")
                eventually(lambda: offered() == ["y"], LIMIT_S)
                assert stays.poll() is None
            finally:
                plane.stop()
        finally:
            stays.terminate()
            stays.wait(60)
            ray.stop()


@pytest.mark.long
@pytest.mark.cluster
def test_pools_are_changed_while_the_connector_runs(tmp_path: Path) -> None:
    """By the file, as a ConfigMap changes; or by whoever connects the cluster once more, with another one."""
    token, port = secrets.token_urlsafe(32), free_ports(1)[0]
    given = tmp_path / "tokens"
    given.mkdir()
    (given / "connector-east").write_text(token)
    files = [tmp_path / "pools.yaml", tmp_path / "others.yaml"]
    plane = start_control_plane(tmp_path / "plane", port, tokens_dir=str(given))
    told = {"SHOAL_SERVER": f"http://127.0.0.1:{port}", "SHOAL_TOKEN": token, "SHOAL_PROVISIONER": "ray"}

    def written(file: Path, *names: str) -> None:
        node = {"device": "cpu-1t", "price_per_hour": 0.1}
        file.write_text(json.dumps([{"name": name, "max": 2, "node": node} for name in names]))

    def pools() -> list[str]:
        return sorted(pool["name"] for pool in ok(httpx.get(f"{plane.url}/v1/pools", headers=plane.headers))["items"])

    with tempfile.TemporaryDirectory(prefix="ray-") as short:
        ray = PlainRay(tmp_path, Path(short) / "a")
        try:
            written(files[0], "first")
            ray.connect("east", {**told, "SHOAL_PROVISIONER_POOLS": str(files[0])})
            eventually(lambda: pools() == ["first"], LIMIT_S)
            written(files[0], "first", "second")
            eventually(lambda: pools() == ["first", "second"], LIMIT_S)
            written(files[1], "third")
            ray.connect("east", {**told, "SHOAL_PROVISIONER_POOLS": str(files[1])})
            eventually(lambda: pools() == ["third"], LIMIT_S)
        finally:
            ray.stop()
            plane.stop()
