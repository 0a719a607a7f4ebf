"""With which options `ray start` makes this machine a node that Shoal knows: address, labels, and the resource by which
an autoscaler is asked for one more node of its pool.

Run as `python -m shoal_workers.node_options [HEAD]` by deploy/start-head.sh and deploy/start-worker.sh: HEAD, as
HOST:PORT, is the head that the node shall join. Prints one option a line. What nobody says is asked of the machine and
of its cloud; what `RAY_OVERRIDE_LABELS` says, as Ray's cluster launcher sets it, goes before everything else.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from shoal_planner.catalogue import CATALOGUE
from shoal_planner.cluster import Node
from shoal_planner.errors import InvalidField
from shoal_workers.cloud_places import Place, find_place
from shoal_workers.clouds import Metadata
from shoal_workers.cluster_ray import node_of
from shoal_workers.settings import NodeSettings, WorkerSettings

_PREFIX = "shoal.io/"
_FIELDS = tuple(field.name.replace("_", "-") for field in dataclasses.fields(Node) if field.name != "id")
_NAMES = ("node", "pool", *_FIELDS)
_GPU_FILE = re.compile(r"nvidia\d+")
# Of drivers that do not show their devices one by one: AMD's, and that of Windows beneath Linux.
_UNCOUNTED = ("kfd", "dxg")


def labels_for(
    settings: NodeSettings, host: str, gpus: int | None, place: Callable[[], Place | None]
) -> dict[str, str]:
    """What this node is labelled with, without the prefix; empty for a head that computes nothing. `host` is the name
    of the machine, `gpus` how many it shows (`shown_devices`); `place` is asked only for what nobody said. Raises
    InvalidField, also for devices that are said to be here and are not."""
    labels = dict(_listed(settings.labels))
    overridden = _overridden(settings.override_labels)
    said = {"node": settings.name, "pool": settings.pool, "device": settings.device, "zone": settings.zone}
    labels |= {name: value for name, value in said.items() if value is not None}
    if settings.spot is not None:
        labels["spot"] = str(settings.spot).lower()
    if settings.devices is not None:
        labels["devices"] = str(settings.devices)
    known = labels | overridden
    if "device" not in known:
        return {}
    if known["device"] not in CATALOGUE:
        raise InvalidField(f"{_PREFIX}device", known["device"], f"must be one of {', '.join(CATALOGUE)}")
    labels.setdefault("node", host.partition(".")[0])
    if "devices" not in known:
        labels["devices"] = str(_counted(known["device"], gpus))
    if not {"zone", "spot"} <= known.keys() and (found := place()) is not None:
        labels = {"zone": found.zone, "spot": str(found.spot).lower(), **labels}
    labels |= overridden
    _check_shown(_checked(labels), gpus)
    return labels


def shown_devices(folder: Path) -> int | None:
    """How many NVIDIA devices there are below /dev; None: there is a driver whose devices cannot be counted."""
    names = {entry.name for entry in folder.iterdir()}
    found = sum(1 for name in names if _GPU_FILE.fullmatch(name))
    return None if not found and not names.isdisjoint(_UNCOUNTED) else found


def options_for(labels: Mapping[str, str], *, address: str | None, object_store_bytes: int) -> list[str]:
    """Of `ray start`."""
    options = ["--disable-usage-stats", f"--object-store-memory={object_store_bytes}"]
    if address is not None:
        options.append(f"--node-ip-address={address}")
    if labels:
        options.append("--labels=" + ",".join(f"{_PREFIX}{name}={value}" for name, value in sorted(labels.items())))
    if "pool" in labels:
        options.append("--resources=" + json.dumps({f"shoal-pool-{labels['pool']}": 1}, separators=(",", ":")))
    return options


def _listed(text: str) -> dict[str, str]:
    found = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise InvalidField("SHOAL_NODE_LABELS", item, "must be FIELD=VALUE, several by commas")
        found[name.removeprefix(_PREFIX)] = value
    return found


def _overridden(text: str | None) -> dict[str, str]:
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise InvalidField("RAY_OVERRIDE_LABELS", text, "must be a JSON object") from error
    return {name.removeprefix(_PREFIX): str(given[name]) for name in given if name.startswith(_PREFIX)}


def _counted(device: str, gpus: int | None) -> int:
    if device.startswith("cpu-"):
        return 1
    if not gpus:
        raise InvalidField(
            "SHOAL_NODE_DEVICES", None, f"is not given, and this machine shows no NVIDIA devices to count as {device}"
        )
    return gpus


def _checked(labels: Mapping[str, str]) -> Node:
    for name in labels:
        if name not in _NAMES:
            raise InvalidField(f"{_PREFIX}{name}", labels[name], f"is no field of a node: {', '.join(_NAMES)}")
    return node_of({"NodeID": "unknown"}, {f"{_PREFIX}{name}": value for name, value in labels.items()})


def _check_shown(node: Node, gpus: int | None) -> None:
    """A machine that is paid for its GPUs and has no driver for them fails every job that is given it."""
    if gpus is not None and node.devices > gpus and not node.device.startswith("cpu-"):
        problem = f"this machine shows {gpus} NVIDIA devices, and no other driver"
        raise InvalidField(f"{_PREFIX}devices", node.devices, problem)


def _place_of(head: str) -> tuple[str, int]:
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidField("SHOAL_HEAD_ADDRESS", head, "must be HOST:PORT, as 10.0.0.5:6379")
    return host, int(port)


def _address_towards(host: str, port: int) -> str:
    """Ray would look which address of ours reaches the internet, which a closed network does not have."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, OverflowError) as error:  # no such name, no way to it, no such port
        problem = f"must be HOST:PORT of a head that can be reached: {error}"
        raise InvalidField("SHOAL_HEAD_ADDRESS", f"{host}:{port}", problem) from error


def main(arguments: list[str]) -> None:
    try:
        head = _place_of(arguments[0]) if arguments else None
        settings = NodeSettings()
        gpus = shown_devices(Path("/dev"))
        metadata = Metadata(WorkerSettings().metadata_url)
        labels = labels_for(settings, socket.gethostname(), gpus, lambda: find_place(metadata))
        if head is not None and not labels:
            raise InvalidField("SHOAL_NODE_DEVICE", None, f"is needed: one of {', '.join(CATALOGUE)}")
        address = settings.address or (None if head is None else _address_towards(*head))
    except ValidationError as error:
        told = error.errors()[0]
        sys.exit(f"SHOAL_NODE_{str(told['loc'][0]).upper()} = {told['input']!r}: {told['msg']}")
    except InvalidField as error:
        sys.exit(str(error))
    lines = options_for(labels, address=address, object_store_bytes=settings.object_store_bytes)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
