"""ClusterSnapshot: which devices there are at one moment. Sorted by node id: equal clusters are equal values."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal_planner.datasheets import DATASHEETS, usual_link_bytes_per_s
from shoal_planner.errors import InvalidField
from shoal_planner.ranges import Range, check_range, check_ranges
from shoal_planner.strict import check_document, check_known, number, read

GIB = 1024**3
MAX_NODES = 16_384
# Host memory of a node whose file does not state it: clouds give GPU nodes a few times what their devices have.
_LEAST_HOST_GIB, _HOST_PER_DEVICE_MEMORY = 64.0, 4.0
_DEVICES: Range = (1, 1024)
_BYTES: Range = (0, 2.0**60)
_BYTES_PER_S: Range = (1e-3, 1e18)
_PRICE: Range = (0, 1e6)
_PREEMPTIONS: Range = (0, 3600)
_SPEED: Range = (1e-4, 1)
NODE_ID = re.compile(r"[a-z0-9A-Z]([a-z0-9A-Z._-]{0,61}[a-z0-9A-Z])?")


NODE_RANGES: dict[str, Range] = {
    "devices": _DEVICES,
    "nics": _DEVICES,
    "device_group": _DEVICES,
    "host_memory_bytes": _BYTES,
    "disk_bytes": _BYTES,
    "intra_bytes_per_s": _BYTES_PER_S,
    "inter_bytes_per_s": _BYTES_PER_S,
    "group_bytes_per_s": _BYTES_PER_S,
    "price_per_hour": _PRICE,
    "preemptions_per_hour": _PREEMPTIONS,
    "speed": _SPEED,
}
# The same in the units of the file, so that a refusal names the field that the user wrote.
_GIB_RANGE: Range = (0, 2.0**30)
ENTRY_RANGES: dict[str, Range] = {
    "count": (1, MAX_NODES),
    "devices": _DEVICES,
    "nics": _DEVICES,
    "device_group": _DEVICES,
    "host_memory_gib": _GIB_RANGE,
    "disk_gib": _GIB_RANGE,
    "intra_gb_per_s": (1e-9, 1e9),
    "group_gb_per_s": (1e-9, 1e9),
    "inter_gbit_per_s": (1e-9, 1e9),
    "price_per_hour": _PRICE,
    "preemptions_per_hour": _PREEMPTIONS,
}
INCAST_RANGES: dict[str, Range] = {"incast": (0, 1e3), "fan_in": (2, 2**20)}
LINK_ENTRY_RANGES: dict[str, Range] = {"gbit_per_s": (1e-9, 1e9), "latency_ms": (0, 3.6e6)}
LINK_RANGES: dict[str, Range] = {"bytes_per_s": _BYTES_PER_S, "latency_s": (0, 3600)} | INCAST_RANGES
# That they are more than zero is checked where they are looked up (catalogue), with the name of the device.
OVERRIDE_RANGES: dict[str, Range] = {
    "memory_bytes": (-math.inf, 2.0**60),
    "tflops_fp32": (-math.inf, 1e6),
    "tflops_bf16": (-math.inf, 1e6),
    "memory_bytes_per_s": (-math.inf, 1e18),
    "efficiency": (-math.inf, 1e6),
    "threads": (-math.inf, 4096),
}
DEVICE_ENTRY_RANGES: dict[str, Range] = {
    "memory_gib": (1 / GIB, 2.0**30),
    "tflops_fp32": (1e-6, 1e6),
    "tflops_bf16": (1e-6, 1e6),
    "memory_gb_per_s": (1e-6, 1e9),
    "efficiency": (1e-6, 1),
    "threads": (1, 4096),
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DeviceRef:
    """One device: `index` counts from 0 within its node. Written `node:index`."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine with `devices` equal devices of type `device` (a name of the catalogue or of `overrides`).

    `device_group` devices share links of `group_bytes_per_s`; devices of one node talk at `intra_bytes_per_s`;
    each of `nics` network interfaces carries `inter_bytes_per_s`. `preemptions_per_hour` is how often one such spot
    node is lost, None if nobody said. Nodes with one `host` are parts of one machine, each with devices of its own
    type: they talk at `intra_bytes_per_s`, and fail together. `speed` is the share of what such devices compute
    elsewhere that those of this node are found to compute: less than 1 on a straggler.
    """

    id: str
    device: str
    devices: int
    host_memory_bytes: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    disk_bytes: int = 0
    device_group: int = 1
    group_bytes_per_s: float | None = None
    nics: int = 1
    zone: str = "default"
    host: str | None = None
    spot: bool = False
    price_per_hour: float = 0.0
    preemptions_per_hour: float | None = None
    reclaim_at_s: float | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        for field, name in (("id", self.id), ("host", self.host)):
            if name is not None and not NODE_ID.fullmatch(name):
                problem = "must be 1 to 63 letters, digits, '.', '_' or '-', with a letter or digit at both ends"
                raise InvalidField(field, name, problem)
        check_ranges(self, NODE_RANGES)
        if self.device_group > self.devices:
            raise InvalidField("device_group", self.device_group, f"must be at most devices ({self.devices})")

    @property
    def device_label(self) -> str:
        """The type of its devices, for people; with the speed of a straggler: "cpu-1t at 48% speed"."""
        return self.device if self.speed == 1 else f"{self.device} at {self.speed:.0%} speed"

    def refs(self) -> tuple[DeviceRef, ...]:
        return tuple(DeviceRef(node=self.id, index=index) for index in range(self.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOverride:
    """Figures that replace or add to the catalogue's entry of the same name; None keeps the catalogue's."""

    name: str
    memory_bytes: int | None = None
    tflops_fp32: float | None = None
    tflops_bf16: float | None = None
    memory_bytes_per_s: float | None = None
    efficiency: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, OVERRIDE_RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects two zones, in either direction; both the same: nodes of that zone with each other. Where more than
    `fan_in` inputs meet at a receiver, its own included, each further one adds `incast` of a byte's time to every byte.
    """

    from_zone: str
    to_zone: str
    bytes_per_s: float
    latency_s: float
    incast: float = 0.0
    fan_in: int = 2

    def __post_init__(self) -> None:
        check_ranges(self, LINK_RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    nodes: tuple[Node, ...]
    overrides: tuple[DeviceOverride, ...] = ()
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if len(self.nodes) > MAX_NODES:
            raise InvalidField("nodes", len(self.nodes), f"must be at most {MAX_NODES} nodes")
        ordered = tuple(sorted(self.nodes, key=lambda node: node.id))
        object.__setattr__(self, "nodes", ordered)
        for before, after in itertools.pairwise(ordered):
            if before.id == after.id:
                raise InvalidField("nodes", after.id, "two nodes have this id")

    def node(self, node_id: str) -> Node:
        """Raises KeyError."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)

    def without(self, node_ids: Iterable[str]) -> ClusterSnapshot:
        gone = frozenset(node_ids)
        return dataclasses.replace(self, nodes=tuple(node for node in self.nodes if node.id not in gone))

    def at_speeds(self, speeds: Mapping[str, float]) -> ClusterSnapshot:
        """With these speeds of stragglers; all others have that of their type."""
        nodes = tuple(dataclasses.replace(node, speed=speeds.get(node.id, 1.0)) for node in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    @property
    def num_devices(self) -> int:
        return sum(node.devices for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """`count` nodes of one shape, as a cluster file has them; documents say what the fields mean (`cluster_schema`)."""

    name: str
    device: str
    devices: int = 1
    count: int = 1
    intra_gb_per_s: float | None = None
    inter_gbit_per_s: float = 10.0
    zone: str = "default"
    host: str | None = None
    spot: bool = False
    price_per_hour: float = 0.0
    preemptions_per_hour: float | None = None
    nics: int = 1
    host_memory_gib: float | None = None
    disk_gib: float = 100.0
    device_group: int = 1
    group_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        check_ranges(self, ENTRY_RANGES)
        if self.preemptions_per_hour and not self.spot:
            raise InvalidField("preemptions_per_hour", self.preemptions_per_hour, "is only for nodes with spot: true")

    def nodes(self, overrides: Iterable[DeviceOverride]) -> tuple[Node, ...]:
        intra = None if self.intra_gb_per_s is None else self.intra_gb_per_s * 1e9
        host_gib = self.host_memory_gib
        if host_gib is None:
            host_gib = _usual_host_gib(self.device, self.devices, overrides)
        return tuple(
            Node(
                id=f"{self.name}-{index}",
                device=self.device,
                devices=self.devices,
                host_memory_bytes=int(host_gib * GIB),
                disk_bytes=int(self.disk_gib * GIB),
                intra_bytes_per_s=usual_link_bytes_per_s(self.device) if intra is None else intra,
                inter_bytes_per_s=self.inter_gbit_per_s * 1e9 / 8,
                device_group=self.device_group,
                group_bytes_per_s=None if self.group_gb_per_s is None else self.group_gb_per_s * 1e9,
                nics=self.nics,
                zone=self.zone,
                host=None if self.host is None else f"{self.host}-{index}",
                spot=self.spot,
                price_per_hour=self.price_per_hour,
                preemptions_per_hour=self.preemptions_per_hour,
            )
            for index in range(self.count)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """Figures of a device type, as a cluster file has them."""

    memory_gib: float | None = None
    tflops_bf16: float | None = None
    tflops_fp32: float | None = None
    memory_gb_per_s: float | None = None
    efficiency: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, DEVICE_ENTRY_RANGES)

    def override(self, name: str) -> DeviceOverride:
        return DeviceOverride(
            name=name,
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * GIB),
            tflops_fp32=self.tflops_fp32,
            tflops_bf16=self.tflops_bf16,
            memory_bytes_per_s=None if self.memory_gb_per_s is None else self.memory_gb_per_s * 1e9,
            efficiency=self.efficiency,
            threads=self.threads,
        )


def parse_cluster(value: object) -> ClusterSnapshot:
    """The cluster in a mapping of the published format (`nodes`, `devices`, `links`). Raises InvalidField.

    Whether the device types are known is not checked here but where their figures are looked up (catalogue).
    """
    value = check_document(value, "cluster")
    check_known(value, ("nodes", "devices", "links"))
    overrides = _overrides({} if value.get("devices") is None else value["devices"])
    if "nodes" not in value:
        raise InvalidField("nodes", None, "is required: a list of at least one node")
    entries = value["nodes"]
    if not isinstance(entries, list | tuple) or not entries:
        raise InvalidField("nodes", entries, "must be a list of at least one node")
    nodes: list[Node] = []
    for index, entry in enumerate(entries):
        read_entry = read(NodeEntry, entry, f"nodes[{index}]")
        try:
            nodes.extend(read_entry.nodes(overrides))
        except InvalidField as error:
            raise InvalidField(f"nodes[{index}].{error.field}", error.value, error.problem) from error
    links = _links(() if value.get("links") is None else value["links"])
    _check_hosts(nodes)
    _check_zones(links, nodes)
    _check_overrides(overrides, nodes)
    return ClusterSnapshot(nodes=tuple(nodes), overrides=overrides, links=links)


def _usual_host_gib(device: str, devices: int, overrides: Iterable[DeviceOverride]) -> float:
    """Host memory of a node whose file says nothing about it, by the memory of its devices, if that is known here."""
    sheet = DATASHEETS.get(device)
    each_gib = 0.0 if sheet is None else sheet.memory_gib
    for override in overrides:
        if override.name == device and override.memory_bytes is not None:
            each_gib = override.memory_bytes / GIB
    return max(_LEAST_HOST_GIB, _HOST_PER_DEVICE_MEMORY * devices * each_gib)


def _overrides(value: object) -> tuple[DeviceOverride, ...]:
    if not isinstance(value, Mapping):
        raise InvalidField("devices", value, "must be a mapping of device names to figures")
    return tuple(
        read(DeviceEntry, value[name], f"devices.{name}").override(str(name)) for name in sorted(value, key=str)
    )


def _links(value: object) -> tuple[Link, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidField("links", value, "must be a list")
    return tuple(_link(entry, f"links[{index}]") for index, entry in enumerate(value))


def _link(entry: object, path: str) -> Link:
    names = ("from", "to", *LINK_ENTRY_RANGES)
    if not isinstance(entry, Mapping) or set(entry) - set(INCAST_RANGES) != set(names):
        raise InvalidField(path, entry, f"must have the fields {', '.join(names)}, and may have incast and fan_in")
    figures = {name: number(entry[name], f"{path}.{name}") for name in LINK_ENTRY_RANGES}
    for name, (least, most) in LINK_ENTRY_RANGES.items():
        check_range(f"{path}.{name}", figures[name], least, most)
    incast, fan_in = (number(entry.get(name, least), f"{path}.{name}") for name, (least, _) in INCAST_RANGES.items())
    check_range(f"{path}.incast", incast, *INCAST_RANGES["incast"])
    check_range(f"{path}.fan_in", fan_in, *INCAST_RANGES["fan_in"])
    if fan_in != int(fan_in):
        raise InvalidField(f"{path}.fan_in", fan_in, "must be a whole number")
    return Link(
        from_zone=str(entry["from"]),
        to_zone=str(entry["to"]),
        bytes_per_s=figures["gbit_per_s"] * 1e9 / 8,
        latency_s=figures["latency_ms"] / 1e3,
        incast=incast,
        fan_in=int(fan_in),
    )


def _check_hosts(nodes: Iterable[Node]) -> None:
    """Parts of a machine are in one place, and come and go together."""
    first: dict[str, Node] = {}
    for node in nodes:
        if node.host is not None:
            other = first.setdefault(node.host, node)
            for field in ("zone", "spot"):
                if getattr(node, field) != getattr(other, field):
                    problem = (
                        f"is {getattr(other, field)!r} of {other.id}, which is a part of the same host {node.host}"
                    )
                    raise InvalidField(f"nodes ({node.id}).{field}", getattr(node, field), problem)


def _check_zones(links: tuple[Link, ...], nodes: Iterable[Node]) -> None:
    """Here, and not in the snapshot, because a running cluster may lose the last node of a zone and keep its links."""
    zones = sorted({node.zone for node in nodes})
    seen: dict[frozenset[str], int] = {}
    for index, link in enumerate(links):
        for field, zone in (("from", link.from_zone), ("to", link.to_zone)):
            if zone not in zones:
                near = difflib.get_close_matches(zone, zones, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the nodes are in {_some(zones)}"
                raise InvalidField(f"links[{index}].{field}", zone, f"is not the zone of any node; {hint}")
        before = seen.setdefault(frozenset((link.from_zone, link.to_zone)), index)
        other = links[before]
        if dataclasses.replace(other, from_zone=link.from_zone, to_zone=link.to_zone) != link:
            pair = f"{link.from_zone} - {link.to_zone}"
            raise InvalidField(f"links[{index}]", pair, f"contradicts links[{before}]: a link is for both directions")


def _check_overrides(overrides: Iterable[DeviceOverride], nodes: Iterable[Node]) -> None:
    """An entry may stand there for a type that no node has; but where it is nearly the name of one that has no entry,
    it is taken for a slip: its figures would be left out of account unseen."""
    named = {override.name for override in overrides}
    used = {node.device for node in nodes}
    for name in sorted(named - used - DATASHEETS.keys()):
        near = difflib.get_close_matches(name, sorted(used - named), n=1, cutoff=0.8)
        if near:
            raise InvalidField(f"devices.{name}", name, f"is not the device of any node; did you mean {near[0]!r}?")


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def snapshot_to_mapping(snapshot: ClusterSnapshot) -> dict[str, object]:
    """Plain JSON values; the inverse of `snapshot_from_mapping`. Versions of before know no `host`, so that it is there
    only where there is one."""
    found = dataclasses.asdict(snapshot)
    for node in found["nodes"]:
        if node["host"] is None:
            del node["host"]
    return found


def snapshot_from_mapping(value: object) -> ClusterSnapshot:
    """Raises InvalidField."""
    return read(ClusterSnapshot, value)
