"""Seconds of the parts of a step: blocks, ends of the model, exchanges, the optimizer.

Owns the analytic formulas and their constants; what was measured (`profile`) goes first everywhere. Does not own how
parts join into a step (`simulate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal_planner.catalogue import DeviceType, device_type
from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.job import JobSpec, ModelSpec
from shoal_planner.memory import ELEMENT_BYTES, part_elements
from shoal_planner.placement import backups
from shoal_planner.profile import Part, Profile, measured

# Operations per backward for one per forward: the gradient of the input and of the weight.
BACKWARD_FACTOR = 2.0
# Elements read and written per token of a block, in widths of the residual stream, by everything that is no matmul.
MEMORY_WIDTHS = 40
# Kernels in a block's forward, and what the start of one costs a GPU and a CPU.
BLOCK_KERNELS = 25
EDGE_KERNELS = 8
GPU_KERNEL_S = 8e-6
CPU_KERNEL_S = 12e-6
# A matmul reaches half of the device's efficiency at this inner width times share of the peak: wide devices need more.
HALF_WIDTH_PER_TFLOP = 1.0
# Bytes that the optimizer moves per element: gradient, three states in and out, the weight out.
UPDATE_BYTES = 32
# What a message costs before its first byte, where nothing was measured.
GPU_INTRA_LATENCY_S = 15e-6
CPU_INTRA_LATENCY_S = 100e-6
GPU_INTER_LATENCY_S = 60e-6
CPU_INTER_LATENCY_S = 300e-6
# What each further peer of a reduction adds: its own messages, one after the other at the receiver.
PER_PEER_S = 40e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """Seconds on each rank of a replica; `tensor_s` is the exchange within it, and counts beside the others."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    tensor_forward_s: float = 0.0
    tensor_backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.tensor_forward_s + self.tensor_backward_s

    def plus(self, other: PartTime, times: int = 1) -> PartTime:
        return PartTime(
            forward_s=self.forward_s + times * other.forward_s,
            backward_s=self.backward_s + times * other.backward_s,
            tensor_forward_s=self.tensor_forward_s + times * other.tensor_forward_s,
            tensor_backward_s=self.tensor_backward_s + times * other.tensor_backward_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class Holder(NamedTuple):
    """A replica that holds a unit: its node, its tp, and its part of the unit's state as a ratio to the others'."""

    node: str
    tp: int
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Seconds of an exchange within the slowest node, and of the network interfaces of each node that takes part."""

    latency_s: float
    inside_s: float
    network_s: tuple[tuple[str, float], ...]


def matmul_flops(model: ModelSpec, part: Part, seq_len: int) -> float:
    """Operations of one sample's forward: two per weight and token, and the quadratic part of attention."""
    match part:
        case "block":
            keys = model.num_kv_heads * model.head_dim
            weights = model.hidden * (2 * model.hidden + 2 * keys + 3 * model.ffn)
            return 2.0 * seq_len * weights + 4.0 * seq_len * seq_len * model.hidden
        case "embedding":
            return 0.0
        case "head":
            return 2.0 * seq_len * model.hidden * model.vocab


def model_flops(model: ModelSpec, seq_len: int) -> float:
    """Operations that training on one sample needs: a forward and a backward, without any recomputation."""
    forward = model.layers * matmul_flops(model, "block", seq_len) + matmul_flops(model, "head", seq_len)
    return forward * (1 + BACKWARD_FACTOR)


def forward_seconds(
    device: DeviceType, model: ModelSpec, part: Part, precision: str, seq_len: int, tp: int, samples: int
) -> float:
    """Analytic: matmuls at a share of the peak, less for narrow matrices; the rest by memory and kernel starts."""
    peak = device.flops_per_s("bf16" if precision == "bf16" else "fp32")
    flops = matmul_flops(model, part, seq_len) * samples / tp
    width = min(model.hidden, model.ffn / tp)
    half = HALF_WIDTH_PER_TFLOP * peak / 1e12
    rate = peak * device.efficiency * width / (width + half)
    tokens, size = seq_len * samples, ELEMENT_BYTES[precision]
    if part == "block":
        cut = (3 * model.hidden + 4 * model.ffn) / tp
        touched = tokens * size * (MEMORY_WIDTHS / 2 * model.hidden + cut)
    elif part == "embedding":
        touched = tokens * size * 2 * model.hidden
    else:
        touched = tokens * 4 * 4 * model.vocab / tp
    touched += part_elements(model, part, tp) * size
    kernel_s = GPU_KERNEL_S if device.threads is None else CPU_KERNEL_S
    kernels = BLOCK_KERNELS if part == "block" else EDGE_KERNELS
    return flops / rate + touched / device.memory_bytes_per_s + kernels * kernel_s


class CostModel:
    """Costs on one cluster for one job. Pure: the same question has the same answer, and is computed once."""

    def __init__(self, job: JobSpec, snapshot: ClusterSnapshot, profile: Profile) -> None:
        self.job = job
        self.snapshot = snapshot
        self.profile = profile
        self._nodes = {node.id: node for node in snapshot.nodes}
        self._devices: dict[str, DeviceType] = {}
        self._parts: dict[tuple[Part, str, int, int], PartTime] = {}
        self._links: dict[tuple[str, str], LinkCost] = {}
        self._backups: dict[int, dict[str, tuple[str, ...]]] = {}

    def node(self, node_id: str) -> Node:
        """Raises KeyError."""
        return self._nodes[node_id]

    def device(self, node_id: str) -> DeviceType:
        """Raises InvalidField for a type that is not known."""
        name = self._nodes[node_id].device
        if name not in self._devices:
            self._devices[name] = device_type(name, self.snapshot.overrides)
        return self._devices[name]

    def backups(self, copies: int) -> dict[str, tuple[str, ...]]:
        """By node, those that keep its snapshots too."""
        if copies not in self._backups:
            self._backups[copies] = backups(self.snapshot.nodes, copies)
        return self._backups[copies]

    def part(self, part: Part, node_id: str, tp: int, samples: int) -> PartTime:
        """One part of the model on `tp` devices of a node, for one micro-batch of `samples`."""
        key = (part, node_id, tp, samples)
        if key not in self._parts:
            self._parts[key] = self._part(*key)
        return self._parts[key]

    def stage(self, node_id: str, tp: int, samples: int, layers: int, *, embedding: bool, head: bool) -> PartTime:
        """All that a replica does for one micro-batch."""
        found = PartTime().plus(self.part("block", node_id, tp, samples), layers)
        for part, present in (("embedding", embedding), ("head", head)):
            if present:
                found = found.plus(self.part(part, node_id, tp, samples))  # type: ignore[arg-type]
        return found

    def _part(self, part: Part, node_id: str, tp: int, samples: int) -> PartTime:
        train, model = self.job.train, self.job.model
        device = self.device(node_id)
        tensor = self._tensor(part, node_id, tp, samples)

        def analytic(other_tp: int, other_samples: int) -> tuple[float, float]:
            exchange = self._tensor(part, node_id, other_tp, other_samples)
            forward_s = forward_seconds(device, model, part, train.precision, train.seq_len, other_tp, other_samples)
            return (
                forward_s + exchange.tensor_forward_s,
                forward_s * BACKWARD_FACTOR + exchange.tensor_backward_s,
            )

        points = self.profile.points(part, device.name, train.precision, model, train.seq_len)
        forward_s, backward_s = measured(points, tp, samples, analytic) or analytic(tp, samples)
        # A measurement contains the exchange, so the exchange is its part of it, as far as it fits.
        tensor_forward_s = min(tensor.tensor_forward_s, forward_s / 2)
        tensor_backward_s = min(tensor.tensor_backward_s, backward_s / 2)
        if not points:
            tensor_forward_s, tensor_backward_s = tensor.tensor_forward_s, tensor.tensor_backward_s
        return PartTime(
            forward_s=forward_s - tensor_forward_s,
            backward_s=backward_s - tensor_backward_s,
            tensor_forward_s=tensor_forward_s,
            tensor_backward_s=tensor_backward_s,
        )

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

    def link(self, from_node: str, to_node: str) -> LinkCost:
        """What connects devices of these nodes, one flow at a time."""
        key = (from_node, to_node)
        if key not in self._links:
            self._links[key] = self._link(*key)
        return self._links[key]

    def _link(self, from_node: str, to_node: str) -> LinkCost:
        figure = self.profile.link(from_node, to_node)
        if figure is not None:
            return LinkCost(latency_s=figure.latency_s, bytes_per_s=figure.bytes_per_s)
        here, there = self._nodes[from_node], self._nodes[to_node]
        gpu = self.device(from_node).threads is None and self.device(to_node).threads is None
        if from_node == to_node:
            latency_s = GPU_INTRA_LATENCY_S if gpu else CPU_INTRA_LATENCY_S
            return LinkCost(latency_s=latency_s, bytes_per_s=here.intra_bytes_per_s)
        rate = min(here.inter_bytes_per_s, there.inter_bytes_per_s)
        latency_s = GPU_INTER_LATENCY_S if gpu else CPU_INTER_LATENCY_S
        for link in self.snapshot.links:  # one from a zone to itself is about nodes of that zone
            if {link.from_zone, link.to_zone} == {here.zone, there.zone}:
                rate, latency_s = min(rate, link.bytes_per_s), link.latency_s
        return LinkCost(latency_s=latency_s, bytes_per_s=rate)

    def send_s(self, from_node: str, to_node: str, samples: int) -> float:
        """One way between stages: the activations of these samples."""
        train = self.job.train
        num_bytes = samples * train.seq_len * self.job.model.hidden * ELEMENT_BYTES[train.precision]
        return self.link(from_node, to_node).seconds(num_bytes)

    def update_s(self, node_id: str, owned: float) -> float:
        device = self.device(node_id)
        rate = self.profile.update_rate(device.name) or device.memory_bytes_per_s / UPDATE_BYTES
        return owned / rate

    def exchange(self, holders: tuple[Holder, ...], num_bytes: float) -> Exchange:
        """What the reduction or the gather of a unit of `num_bytes` takes.

        Each replica owns its share of the unit: it sends the rest of its gradients to the others and gets all of
        theirs of its own part, and the other way round with weights. Replicas of a node share its network interfaces.
        """
        n, total = len(holders), sum(holder.share for holder in holders)
        if n == 1:
            return Exchange(latency_s=0.0, inside_s=0.0, network_s=())
        latency_s = inside_s = 0.0
        network_s = []
        for node_id in sorted({holder.node for holder in holders}):
            local = [holder for holder in holders if holder.node == node_id]
            here = sum(holder.share for holder in local)
            near, far = len(local) - 1, n - len(local)
            if near:
                intra = self.link(node_id, node_id)
                busiest = max(max(here - holder.share, near * holder.share) for holder in local) / total
                tp = min(holder.tp for holder in local)
                inside_s = max(inside_s, num_bytes * busiest / tp / intra.bytes_per_s)
                latency_s = max(latency_s, intra.latency_s)
            if far:
                links = [self.link(node_id, holder.node) for holder in holders if holder.node != node_id]
                rate = min(link.bytes_per_s for link in links) * self._nodes[node_id].nics
                busiest = max(len(local) * (total - here), far * here) / total
                network_s.append((node_id, num_bytes * busiest / rate))
                latency_s = max(latency_s, *(link.latency_s for link in links))
        return Exchange(latency_s=latency_s + (n - 1) * PER_PEER_S, inside_s=inside_s, network_s=tuple(network_s))
