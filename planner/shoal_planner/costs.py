"""Seconds of the parts of a step: blocks, ends of the model, exchanges, the optimizer.

Owns what joins the analytic seconds of `compute`, what was measured (`profile`, which goes first everywhere) and the
links of the cluster. Does not own how parts join into a step (`predict`, `simulate`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal_planner.catalogue import DeviceType, device_type
from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.compute import BACKWARD_FACTOR as BACKWARD_FACTOR
from shoal_planner.compute import backward_factor, weight_share
from shoal_planner.compute import forward_seconds as forward_seconds
from shoal_planner.compute import matmul_flops as matmul_flops
from shoal_planner.compute import model_flops as model_flops
from shoal_planner.job import JobSpec
from shoal_planner.memory import ELEMENT_BYTES, GRADIENT_BYTES
from shoal_planner.node_kinds import node_kinds, parts_of_machines
from shoal_planner.placement import backups
from shoal_planner.plan import Recompute
from shoal_planner.profile import KindLink, LayerTime, Part, Profile, measured

T = TypeVar("T")
# Bytes that the optimizer moves per element: gradient, three states in and out, the weight out.
UPDATE_BYTES = 32
# What each further peer of a direct exchange adds: its own messages, one after the other at the receiver.
PER_PEER_S = 40e-6
# How often the recomputed values of a block are read or written when they are made again.
SELECTIVE_TOUCHED = 3
# Between a device and its host's memory, and what a device's part of the host does there.
HOST_LINK_BYTES_PER_S = 12e9
HOST_BYTES_PER_S = 20e9
# What a message costs before its first byte, where nothing was measured.
GPU_INTRA_LATENCY_S = 15e-6
CPU_INTRA_LATENCY_S = 100e-6
GPU_INTER_LATENCY_S = 60e-6
CPU_INTER_LATENCY_S = 300e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """Seconds on each rank of a replica; `tensor_s` is the exchange within it, and counts beside the others. `weight_s`
    of the backward could be put off: they go into gradients of blocks' weights."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    tensor_forward_s: float = 0.0
    tensor_backward_s: float = 0.0
    weight_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.tensor_forward_s + self.tensor_backward_s

    def plus(self, other: PartTime, times: int = 1) -> PartTime:
        return PartTime(
            forward_s=self.forward_s + times * other.forward_s,
            backward_s=self.backward_s + times * other.backward_s,
            tensor_forward_s=self.tensor_forward_s + times * other.tensor_forward_s,
            tensor_backward_s=self.tensor_backward_s + times * other.tensor_backward_s,
            weight_s=self.weight_s + times * other.weight_s,
        )

    def at_speed(self, speed: float) -> PartTime:
        """On a device that computes at this share of the usual speed; exchanges take as long as ever."""
        if speed == 1:
            return self
        return dataclasses.replace(
            self, forward_s=self.forward_s / speed, backward_s=self.backward_s / speed, weight_s=self.weight_s / speed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """`incast` and `fan_in`: of `cluster.Link`."""

    latency_s: float
    bytes_per_s: float
    incast: float = 0.0
    fan_in: int = 2

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def crowding(self, inputs: int) -> float:
        """How much longer each byte takes where so many inputs meet: 0.5 is half as long again."""
        return self.incast * max(0, inputs - self.fan_in)


class CostModel:
    """Costs on one cluster for one job. Pure: the same question has the same answer, and is computed once."""

    def __init__(self, job: JobSpec, snapshot: ClusterSnapshot, profile: Profile) -> None:
        self.job = job
        self.snapshot = snapshot
        self.profile = profile
        calibrated = snapshot if profile.calibration is None else profile.calibration.cluster(snapshot)
        self._zone_links = calibrated.links
        self._nodes = {node.id: node for node in calibrated.nodes}
        self._kinds = node_kinds(snapshot, profile)
        self._machines = parts_of_machines(snapshot.nodes)
        self._devices: dict[str, DeviceType] = {}
        self._parts: dict[tuple[Part, int, int, int, Recompute, int], PartTime] = {}
        self._plain: dict[tuple[Part, int, int, int], PartTime] = {}  # in one piece, and nothing of it computed again
        self._links: dict[tuple[int, int, bool], LinkCost] = {}
        self._backups: dict[int, Mapping[str, tuple[str, ...]]] = {}
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What others make of these costs, made when it is first asked for."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def node(self, node_id: str) -> Node:
        """Raises KeyError."""
        return self._nodes[node_id]

    def node_rate(self, node_id: str) -> float:
        """Bytes per second of all network interfaces of a node."""
        node = self._nodes[node_id]
        return node.inter_bytes_per_s * node.nics

    def kind(self, node_id: str) -> int:
        """Nodes of one kind cost the same. Raises KeyError."""
        return self._kinds[node_id]

    def device(self, node_id: str) -> DeviceType:
        """Raises InvalidField for a type that is not known."""
        name = self._nodes[node_id].device
        if name not in self._devices:
            found = device_type(name, self.snapshot.overrides)
            calibration = self.profile.calibration
            self._devices[name] = found if calibration is None else calibration.device(found)
        return self._devices[name]

    def on_gpu(self, node_id: str) -> bool:
        """Whether the node computes on GPUs, not on its CPU."""
        return self.device(node_id).threads is None

    def backups(self, copies: int) -> Mapping[str, tuple[str, ...]]:
        """By node, those that keep its snapshots too where hosts have no room for a better choice."""
        if copies not in self._backups:
            self._backups[copies] = backups(self.snapshot.nodes, copies, apart=False)
        return self._backups[copies]

    def part(
        self, part: Part, node_id: str, tp: int, samples: int, recompute: Recompute = "none", slices: int = 1
    ) -> PartTime:
        """One part of the model on `tp` devices of a node, for one micro-batch of `samples`, in so many slices."""
        key = (part, self._kinds[node_id], tp, samples, recompute, slices)
        if key not in self._parts:
            alone = (part, self._kinds[node_id], tp, samples)
            if alone not in self._plain:
                self._plain[alone] = self._part(part, node_id, tp, samples)
            plain = self._plain[alone]
            if slices > 1:
                plain = self._sliced(plain, part, node_id, tp, samples, slices)
            whole = self._recomputed(plain, node_id, tp, samples, recompute)
            self._parts[key] = whole.at_speed(self._nodes[node_id].speed)
        return self._parts[key]

    def _sliced(self, plain: PartTime, part: Part, node_id: str, tp: int, samples: int, slices: int) -> PartTime:
        """With what slices add to matmuls of whole matrices, measured or not."""
        train, device = self.job.train, self.device(node_id)
        whole_s, sliced_s = (
            forward_seconds(device, self.job.model, part, train.precision, train.seq_len, tp, samples, count)
            for count in (1, slices)
        )
        more_s = sliced_s - whole_s
        return plain.plus(
            PartTime(forward_s=more_s, backward_s=more_s * backward_factor(self.job.model, part, train.seq_len))
        )

    def _recomputed(self, plain: PartTime, node_id: str, tp: int, samples: int, recompute: Recompute) -> PartTime:
        """With what the backward computes again: all of the forward, or what norms and activation functions made."""
        match recompute:
            case "none":
                return plain
            case "full":
                again = plain
            case "selective":
                train, model = self.job.train, self.job.model
                widths = SELECTIVE_TOUCHED * (2 * model.hidden + 2 * model.ffn / tp)
                touched = widths * train.seq_len * samples * ELEMENT_BYTES[train.precision]
                again = PartTime(forward_s=touched / self.device(node_id).memory_bytes_per_s)
        return dataclasses.replace(
            plain,
            backward_s=plain.backward_s + again.forward_s,
            tensor_backward_s=plain.tensor_backward_s + again.tensor_forward_s,
        )

    def stage(
        self,
        node_id: str,
        tp: int,
        samples: int,
        layers: Mapping[Recompute, int],
        *,
        embedding: bool,
        head: bool,
        slices: int = 1,
    ) -> PartTime:
        """All that a replica does for one micro-batch; `layers` by their kind of recomputation."""
        found = PartTime()
        for recompute, count in layers.items():
            if count:
                found = found.plus(self.part("block", node_id, tp, samples, recompute, slices), count)
        ends: tuple[tuple[Part, bool], ...] = (("embedding", embedding), ("head", head))
        for part, present in ends:
            if present:
                found = found.plus(self.part(part, node_id, tp, samples, slices=slices))
        return found

    def _part(self, part: Part, node_id: str, tp: int, samples: int) -> PartTime:
        train, model = self.job.train, self.job.model
        device = self.device(node_id)
        tensor = self._tensor(part, node_id, tp, samples)

        points = self.profile.points(part, device.name, train.precision, model, train.seq_len)
        apart = all(point.tp == 1 or not point.exchanges for point in points)
        if not apart:
            points = tuple(self._with_exchange(point, node_id) for point in points)

        def analytic(other_tp: int, other_samples: int) -> tuple[float, float]:
            exchange = PartTime() if apart else self._tensor(part, node_id, other_tp, other_samples)
            forward_s = forward_seconds(device, model, part, train.precision, train.seq_len, other_tp, other_samples)
            return (
                forward_s + exchange.tensor_forward_s,
                forward_s * backward_factor(model, part, train.seq_len) + exchange.tensor_backward_s,
            )

        forward_s, backward_s = measured(points, tp, samples, analytic) or analytic(tp, samples)
        if points and self.profile.calibration is not None:
            forward_s *= self.profile.calibration.parts
            backward_s *= self.profile.calibration.parts
        tensor_forward_s, tensor_backward_s = tensor.tensor_forward_s, tensor.tensor_backward_s
        if not apart:  # a measurement contains the exchange, so the exchange is its part of it, as far as it fits
            tensor_forward_s, tensor_backward_s = (
                min(tensor_forward_s, forward_s / 2),
                min(tensor_backward_s, backward_s / 2),
            )
            forward_s, backward_s = forward_s - tensor_forward_s, backward_s - tensor_backward_s
        return PartTime(
            forward_s=forward_s,
            backward_s=backward_s,
            tensor_forward_s=tensor_forward_s,
            tensor_backward_s=tensor_backward_s,
            weight_s=backward_s * weight_share(model, part, train.seq_len),
        )

    def _with_exchange(self, point: LayerTime, node_id: str) -> LayerTime:
        if point.exchanges:
            return point
        exchange = self._tensor(point.part, node_id, point.tp, point.micro_batch)
        forward_s, backward_s = (
            point.forward_s + exchange.tensor_forward_s,
            point.backward_s + exchange.tensor_backward_s,
        )
        return dataclasses.replace(point, forward_s=forward_s, backward_s=backward_s, exchanges=True)

    def _tensor(self, part: Part, node_id: str, tp: int, samples: int) -> PartTime:
        """All-reduces of a block: two forward, two backward. The ends: one forward, and the head one backward."""
        if tp == 1:
            return PartTime()
        train = self.job.train
        num_bytes = samples * train.seq_len * self.job.model.hidden * ELEMENT_BYTES[train.precision]
        once = self.all_reduce_s(node_id, tp, num_bytes)
        forward, backward = {"block": (2, 2), "embedding": (1, 0), "head": (1, 1)}[part]
        return PartTime(tensor_forward_s=forward * once, tensor_backward_s=backward * once)

    def all_reduce_s(self, node_id: str, tp: int, num_bytes: float) -> float:
        """A ring: 2(t-1)/t of the bytes over the slowest link, in 2(t-1) messages."""
        node = self._nodes[node_id]
        link = self.link(node_id, node_id)
        rate = link.bytes_per_s
        if node.group_bytes_per_s is not None and tp <= node.device_group:
            rate = max(rate, node.group_bytes_per_s)
        return 2 * (tp - 1) * (link.latency_s + num_bytes / tp / rate)

    @property
    def has_machines(self) -> bool:
        """Whether there are nodes that are parts of one machine, and looked at as such."""
        return bool(self._machines)

    def are_one_machine(self, here: str, there: str) -> bool:
        """Whether these are one node, or parts of one machine: what passes between them goes over no network."""
        return here == there or (here in self._machines and self._machines[here] == self._machines.get(there))

    def are_apart(self, nodes: Collection[str]) -> bool:
        """Whether any of these are on different machines: then what they exchange goes over their interfaces."""
        first = next(iter(nodes), None)
        return first is not None and any(not self.are_one_machine(first, other) for other in nodes)

    def link(self, from_node: str, to_node: str) -> LinkCost:
        """What connects devices of these nodes, one flow at a time."""
        key = (self._kinds[from_node], self._kinds[to_node], from_node == to_node)
        if key not in self._links:
            self._links[key] = self._link(from_node, to_node)
        return self._links[key]

    def _link(self, from_node: str, to_node: str) -> LinkCost:
        here, there = self._nodes[from_node], self._nodes[to_node]
        between = [link for link in self._zone_links if {link.from_zone, link.to_zone} == {here.zone, there.zone}]
        inside = self.are_one_machine(from_node, to_node)
        crowded = max((link for link in between if not inside), key=lambda link: link.incast, default=None)
        incast, fan_in = (0.0, 2) if crowded is None else (crowded.incast, crowded.fan_in)
        figure = self.profile.link(from_node, to_node)
        if inside and from_node != to_node and isinstance(figure, KindLink):
            figure = None  # that is about nodes on different machines
        if figure is not None:
            return LinkCost(latency_s=figure.latency_s, bytes_per_s=figure.bytes_per_s, incast=incast, fan_in=fan_in)
        gpu = self.device(from_node).threads is None and self.device(to_node).threads is None
        if inside:
            # Nobody takes the slower way.
            rate = min(here.intra_bytes_per_s, there.intra_bytes_per_s)
            if from_node != to_node:
                rate = max(rate, min(here.inter_bytes_per_s, there.inter_bytes_per_s))
            latency_s = GPU_INTRA_LATENCY_S if gpu else CPU_INTRA_LATENCY_S
        else:
            rate = min(here.inter_bytes_per_s, there.inter_bytes_per_s)
            latency_s = GPU_INTER_LATENCY_S if gpu else CPU_INTER_LATENCY_S
        for link in between:  # one from a zone to itself is about nodes of that zone
            if inside:  # there a message is no slower to start than between nodes
                latency_s = min(latency_s, link.latency_s)
            else:
                rate, latency_s = min(rate, link.bytes_per_s), link.latency_s
        return LinkCost(latency_s=latency_s, bytes_per_s=rate, incast=incast, fan_in=fan_in)

    def send_s(self, from_node: str, to_node: str, samples: int) -> float:
        """One way between stages: the activations of these samples."""
        return self.link(from_node, to_node).seconds(self.activation_bytes(samples))

    def activation_bytes(self, samples: int) -> float:
        """What passes between stages for these samples."""
        train = self.job.train
        return float(samples * train.seq_len * self.job.model.hidden * ELEMENT_BYTES[train.precision])

    def update_s(self, node_id: str, owned: float, offloaded: float = 0.0) -> float:
        """The optimizer's step on a device that owns this many elements, `offloaded` of them on the host: these come
        and go over the host's link, and the host's memory limits their update. A device without memory of its own
        updates them itself, and copies what else would go over a link."""
        device = self.device(node_id)
        rate = self.profile.update_rate(device.name) or device.memory_bytes_per_s / UPDATE_BYTES
        moved = GRADIENT_BYTES + ELEMENT_BYTES[self.job.train.precision]
        if device.threads is not None:
            hosted_s = 1 / rate + 2 * moved / device.memory_bytes_per_s
        else:
            hosted_s = moved / HOST_LINK_BYTES_PER_S + UPDATE_BYTES / HOST_BYTES_PER_S
        return ((owned - offloaded) / rate + offloaded * hosted_s) / self._nodes[node_id].speed

    def half_exchange_s(self, members: frozenset[tuple[str, int]], count: int, num_bytes: float) -> float:
        """Reduce-scatter or gather of `num_bytes` among `count` replicas, `members` being their (node, tp), of equal
        nodes one. Each sends and receives (n-1)/n of the bytes whatever the algorithm (PAPERS 3.2), over the slowest
        link among them, where all inputs of a sum meet; a replica's ranks use as many network interfaces as they are,
        if the node has so many.
        """
        worst = self.once(("worst link", members, count), lambda: self._worst_link(members, count))
        rate, latency_s, crowding = worst
        rounds = min(count - 1, 2 * math.ceil(math.log2(count)) - 1)
        direct_s = latency_s + (count - 2) * min(latency_s, PER_PEER_S)
        return num_bytes * (1 - 1 / count) / rate * (1 + crowding) + min(rounds * latency_s, direct_s)

    def _worst_link(self, members: frozenset[tuple[str, int]], count: int) -> tuple[float, float, float]:
        """The least bytes per second, the longest latency, and the worst crowding of any link among them."""
        rate, latency_s, crowding = float("inf"), 0.0, 0.0
        for here, tp in members:
            for there, _ in members:
                if here == there and len(members) > 1:
                    continue
                link = self.link(here, there)
                lanes = tp if self.are_one_machine(here, there) else min(tp, self._nodes[here].nics)
                rate, latency_s = min(rate, link.bytes_per_s * lanes), max(latency_s, link.latency_s)
                crowding = max(crowding, link.crowding(count))
        return rate, latency_s, crowding
