"""A job on a cluster that has no node for it: Ray's own autoscaler rents them from an EC2 that has few, of another type
where there is none, and gives them back. A real control plane, a real connector, real raylets."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
import yaml
from control_plane import ControlPlane, control_plane, ok
from limited_ec2 import REGION, instances
from plain_ray import PlainRay
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG
from servers import RunningServer, ec2_environment, free_ports, start_moto
from waiting import eventually

from shoal_planner.rented_pools import pool_resource

POOLS = {"spot-a": "g5.xlarge", "spot-b": "g6.xlarge"}
NODE = {"device": "cpu-1t", "spot": True, "host_memory_gib": 2}
PRICES = {"spot-a": 0.3, "spot-b": 0.4}
QUICK = {"pool_wait_s": "60", "pool_start_s": "120", "pool_back_off_s": "300", "pool_idle_s": "25"}
JOB: dict[str, Any] = {
    "name": "rents",
    "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 172, "vocab": 256},
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 4, "seq_len": 32, "steps": 30},
    "limits": {"rent": True, "max_price_per_hour": 0.85, "min_devices": 2, "max_devices": 2},
}


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    server = start_moto(tmp_path / "moto")
    for name, value in ec2_environment(server).items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.fixture
def plane(aws: RunningServer, tmp_path: Path) -> Iterator[ControlPlane]:
    with control_plane(tmp_path / "plane", **QUICK) as running:
        yield running


def autoscaling(address: str, capacity_file: Path) -> dict[str, Any]:
    """As in a file for `ray up`, but for the provider."""
    kinds = {
        name: {
            "resources": {"CPU": 1, pool_resource(name): 1, "object_store_memory": 80_000_000},
            "labels": {
                "shoal.io/device": "cpu-1t",
                "shoal.io/price-per-hour": str(PRICES[name]),
                "shoal.io/spot": "true",
            },
            "node_config": {"InstanceType": kind},
            "min_workers": 0,
            "max_workers": 3,
        }
        for name, kind in POOLS.items()
    }
    provider = {
        "type": "external",
        "module": "limited_ec2.LimitedEc2",
        "gcs_address": address,
        "capacity_file": str(capacity_file),
        "launch_multiple": True,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    return {
        **BASE_READONLY_CONFIG,
        "cluster_name": "rented",
        "max_workers": 6,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 100,
        "provider": provider,
        "available_node_types": {**kinds, "ray.head.default": head},
        "head_node_type": "ray.head.default",
    }


@pytest.fixture
def cluster(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Connected, and with no nodes; the file that says how many instances of each type there are."""
    capacity_file, pools_file, config = (tmp_path / name for name in ("capacity.json", "pools.yaml", "ray.json"))
    capacity_file.write_text(json.dumps({"g5.xlarge": 0, "g6.xlarge": 2}))
    entries = [
        {"name": name, "max": 3, "instance_type": kind, "node": {**NODE, "price_per_hour": PRICES[name]}}
        for name, kind in POOLS.items()
    ]
    pools_file.write_text(yaml.safe_dump(entries))
    (port,) = free_ports(1)
    config.write_text(json.dumps(autoscaling(f"127.0.0.1:{port}", capacity_file)))
    tests = str(Path(__file__).parent.parent)
    environment = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": "f" * 51 + "00000",
        "PYTHONPATH": os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    monkeypatch.setenv("SHOAL_PROVISIONER", "ray")
    monkeypatch.setenv("SHOAL_PROVISIONER_POOLS", str(pools_file))
    with tempfile.TemporaryDirectory(prefix="ray-") as short:
        options = (f"--autoscaling-config={config}", "--node-ip-address=127.0.0.1")
        ray = PlainRay(tmp_path, Path(short) / "r", head_options=options, environment=environment, port=port)
        try:
            settings = {name: os.environ[name] for name in ("SHOAL_PROVISIONER", "SHOAL_PROVISIONER_POOLS")}
            ray.connect("cloud", {**plane.environment(), **settings})
            yield capacity_file
        finally:
            ray.stop()


@pytest.mark.long
def test_a_job_is_trained_on_nodes_that_are_rented_for_it(plane: ControlPlane, cluster: Path) -> None:
    ec2 = boto3.session.Session().client("ec2", region_name=REGION)
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as http:
        check_story(http, ec2)
    ec2.close()


def check_story(http: httpx.Client, ec2: Any) -> None:
    def told() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = ok(http.get("/v1/pool-events"))["items"]
        return items

    def kinds() -> set[tuple[str, str]]:
        return {(each["kind"], each["pool"]) for each in told()}

    def state() -> str:
        return str(ok(http.get(f"/v1/jobs/{job}"))["status"]["state"])

    eventually(lambda: ok(http.get("/v1/pools"))["items"], 120)
    job = ok(http.post("/v1/jobs", json=JOB))["id"]
    eventually(lambda: state() == "succeeded", 300)
    seen = kinds()
    assert {
        ("pool_asked", "spot-a"),
        ("pool_short", "spot-a"),
        ("pool_asked", "spot-b"),
        ("nodes_came", "spot-b"),
    } <= seen
    short = next(each for each in told() if each["kind"] == "pool_short")
    assert "sufficient g5.xlarge capacity" in short["reason"]
    eventually(lambda: not instances(ec2, "pending", "running"), 120)
    gone = sorted(instances(ec2, "terminated").values())
    assert gone == ["g6.xlarge", "g6.xlarge"]
    assert ("node_released", "spot-b") in kinds()
    eventually(lambda: not ok(http.get("/v1/nodes"))["items"], 60)
