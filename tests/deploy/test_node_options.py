"""What a machine is labelled with when it becomes a node, and what the start scripts say where they cannot start it."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal_planner.errors import InvalidField
from shoal_workers.cloud_places import Place, find_place
from shoal_workers.clouds import Metadata
from shoal_workers.cluster_ray import node_of
from shoal_workers.node_options import labels_for, options_for, shown_devices
from shoal_workers.settings import NodeSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = Path(sys.executable).parent
AWS = {
    "PUT /latest/api/token": "token",
    "GET /latest/meta-data/placement/availability-zone": "us-east-1b",
    "GET /latest/meta-data/instance-life-cycle": "spot",
}
GCP = {
    "GET /computeMetadata/v1/instance/zone": "projects/17/zones/us-central1-a",
    "GET /computeMetadata/v1/instance/scheduling/preemptible": "FALSE",
}
AZURE = {
    "GET /metadata/instance/compute?api-version=2021-02-01": json.dumps(
        {"location": "eastus", "zone": "2", "priority": "Spot", "name": "vm"}
    )
}


@pytest.fixture
def metadata() -> Iterator[tuple[dict[str, str], Metadata]]:
    """A service that answers what is put into the dict, and 404 to all else."""
    answers: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answers.get(f"{self.command} {self.path}")
            self.send_response(404 if text is None else 200)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write((text or "").encode())

        do_PUT = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield answers, Metadata(f"http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("cloud", "place"),
    [
        (AWS, Place(zone="us-east-1b", spot=True)),
        (GCP, Place(zone="us-central1-a", spot=False)),
        (AZURE, Place(zone="eastus-2", spot=True)),
        ({}, None),
    ],
    ids=["aws", "gcp", "azure", "none"],
)
def test_clouds_say_where_a_machine_stands(
    metadata: tuple[dict[str, str], Metadata], cloud: Mapping[str, str], place: Place | None
) -> None:
    answers, service = metadata
    answers.update(cloud)
    assert find_place(service) == place


T4_OF_A_POOL = json.dumps({"shoal.io/device": "T4", "shoal.io/devices": "1", "shoal.io/pool": "t4-spot"})


def settings(**given: Any) -> NodeSettings:
    return NodeSettings.model_validate(given)


def nowhere() -> Place | None:
    raise AssertionError("nobody had to be asked")


def test_what_is_said_goes_before_what_is_asked() -> None:
    asked = labels_for(settings(device="A10G", pool="a"), "host-7.example.org", 4, lambda: Place(zone="z", spot=True))
    assert asked == {"node": "host-7", "pool": "a", "device": "A10G", "devices": "4", "zone": "z", "spot": "true"}
    said = settings(device="T4", devices=2, name="n", zone="rack", spot=False, labels="price-per-hour=0.4, nics=2")
    labels = labels_for(said, "host", 8, nowhere)
    node = node_of({"NodeID": "0" * 56}, {f"shoal.io/{name}": value for name, value in labels.items()})
    assert (node.id, node.devices, node.zone, node.spot, node.price_per_hour, node.nics) == (
        "n",
        2,
        "rack",
        False,
        0.4,
        2,
    )
    assert node.intra_bytes_per_s == 10e9, "what a bus leaves"
    nvlink = node_of({"NodeID": "0" * 56}, {"shoal.io/device": "H100-80G"})
    assert nvlink.intra_bytes_per_s == 450e9, "of the datasheet"
    assert labels_for(settings(), "host", 8, nowhere) == {}, "a head that computes nothing is no node of ours"
    half = labels_for(settings(device="T4", zone="rack"), "host", 1, lambda: Place(zone="z", spot=True))
    assert (half["zone"], half["spot"]) == ("rack", "true")


def test_options_of_ray() -> None:
    labels = {"node": "n", "device": "T4", "pool": "t4-spot"}
    assert options_for(labels, address="10.0.0.7", object_store_bytes=5) == [
        "--disable-usage-stats",
        "--object-store-memory=5",
        "--node-ip-address=10.0.0.7",
        "--labels=shoal.io/device=T4,shoal.io/node=n,shoal.io/pool=t4-spot",
        '--resources={"shoal-pool-t4-spot":1}',
    ]
    assert options_for({}, address=None, object_store_bytes=5) == ["--disable-usage-stats", "--object-store-memory=5"]


@pytest.mark.parametrize(
    ("given", "gpus", "said"),
    [
        ({"device": "A10"}, 0, "SHOAL_NODE_DEVICES = None: is not given, and this machine shows no NVIDIA devices"),
        ({"device": "B52"}, 1, "shoal.io/device = 'B52': must be one of"),
        ({"device": "B52"}, 0, "shoal.io/device = 'B52': must be one of"),
        ({"device": "T4", "labels": "price"}, 1, "SHOAL_NODE_LABELS = 'price': must be FIELD=VALUE"),
        ({"device": "T4", "labels": "colour=red"}, 1, "shoal.io/colour = 'red': is no field of a node"),
        ({"device": "T4", "labels": "price-per-hour=cheap"}, 1, "shoal.io/price-per-hour = 'cheap': must be a number"),
        ({"device": "T4", "devices": 0}, 1, "devices = 0"),
        ({"device": "T4", "devices": 4}, 0, "shoal.io/devices = 4: this machine shows 0 NVIDIA devices"),
        ({"device": "T4", "devices": 4}, 3, "shoal.io/devices = 4: this machine shows 3 NVIDIA devices"),
        ({"RAY_OVERRIDE_LABELS": T4_OF_A_POOL}, 0, "shoal.io/devices = 1: this machine shows 0 NVIDIA devices"),
        ({"RAY_OVERRIDE_LABELS": "{"}, 1, "RAY_OVERRIDE_LABELS = '{': must be a JSON object"),
    ],
)
def test_what_cannot_be_used_is_named(given: dict[str, Any], gpus: int, said: str) -> None:
    with pytest.raises(InvalidField) as error:
        labels_for(settings(**given), "host", gpus, lambda: None)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"device": "T4", "devices": 2}, 4),
        ({"device": "MI300X", "devices": 8}, None),
        ({"device": "cpu-2t", "devices": 1}, 0),
    ],
    ids=["a part of a machine", "devices that cannot be counted", "a CPU"],
)
def test_what_is_said_of_devices_is_believed_where_they_may_be_there(given: dict[str, Any], gpus: int | None) -> None:
    assert labels_for(settings(**given), "host", gpus, lambda: None)["devices"] == str(given["devices"])


@pytest.mark.parametrize(
    ("files", "gpus"),
    [
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], 2),
        (["nvidiactl", "null"], 0),
        (["kfd", "dri"], None),
        (["dxg"], None),
    ],
)
def test_devices_are_counted_by_their_files(tmp_path: Path, files: list[str], gpus: int | None) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert shown_devices(tmp_path) == gpus


def start(script: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{PROGRAMS}:/usr/bin:/bin"
    return subprocess.run(
        [DEPLOY / script, "--block"],
        env={
            "PATH": path,
            "HOME": str(home),
            "SHOAL_WORKER_METADATA_URL": "http://127.0.0.1:9",
            **python(),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def python() -> dict[str, str]:
    """Where the packages are found where they are not installed."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


def test_nothing_starts_without_a_token(tmp_path: Path) -> None:
    for script in ("start-head.sh", "start-worker.sh"):
        done = start(script, tmp_path, SHOAL_HEAD_ADDRESS="127.0.0.1:1")
        assert done.returncode == 1 and f"no Ray token in {tmp_path}/.ray/auth_token" in done.stderr


def test_a_worker_says_what_it_lacks(tmp_path: Path) -> None:
    done = start("start-worker.sh", tmp_path, RAY_AUTH_TOKEN="token")
    assert done.returncode == 2 and "SHOAL_HEAD_ADDRESS is not set" in done.stderr
    done = start("start-worker.sh", tmp_path, RAY_AUTH_TOKEN="token", SHOAL_HEAD_ADDRESS="127.0.0.1:1")
    assert done.returncode != 0 and "SHOAL_NODE_DEVICE = None: is needed: one of" in done.stderr
    told = {"RAY_AUTH_TOKEN": "token", "SHOAL_HEAD_ADDRESS": "127.0.0.1:1", "SHOAL_NODE_DEVICE": "T4"}
    done = start("start-worker.sh", tmp_path, **told, SHOAL_NODE_DEVICES="64")
    assert done.returncode != 0 and "shoal.io/devices = 64: this machine shows" in done.stderr
    for head in ("127.0.0.1", "head:", "127.0.0.1:70000", "no-such-host.invalid:6379"):
        done = start(
            "start-worker.sh", tmp_path, **(told | {"SHOAL_HEAD_ADDRESS": head, "SHOAL_NODE_DEVICE": "cpu-1t"})
        )
        assert done.returncode == 1 and done.stderr.startswith(f"SHOAL_HEAD_ADDRESS = '{head}': must be HOST:PORT")
    done = start("start-connector.sh", tmp_path)
    assert done.returncode == 2 and "SHOAL_SERVER is not set" in done.stderr
