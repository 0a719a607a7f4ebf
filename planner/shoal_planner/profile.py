"""Profile: what was measured. A measured figure replaces a catalogue figure, and says where it came from.

Owns the measured points and how to read between them, and which nodes count as linked alike. Does not own how to
measure (workers) nor what holds where nothing was measured (`costs`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from shoal_planner.calibration import Calibration
from shoal_planner.cluster import Node
from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.strict import read

Part = Literal["block", "embedding", "head"]
_SHAPE = {
    "block": ("hidden", "heads", "kv_heads", "head_dim", "ffn", "block_options"),
    "embedding": ("hidden", "vocab", "trains"),
    "head": ("hidden", "vocab", "trains"),
}


def _seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidField(name, value, "must be more than zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of one part of the model on `tp` devices: a block, the embedding, or norm + head. They contain what the
    devices exchange, unless `exchanges` is false: then one of them was timed by itself, on its share of the part."""

    device: str
    tp: int
    micro_batch: int
    seq_len: int
    hidden: int
    forward_s: float
    backward_s: float
    source: str
    part: Part = "block"
    precision: Literal["fp32", "bf16"] = "fp32"
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    head_dim: int = 0
    block_options: str = ""
    trains: str = ""
    exchanges: bool = True

    def __post_init__(self) -> None:
        if not self.head_dim and self.heads:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        for name in ("tp", "micro_batch", "seq_len", "hidden"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "must be at least 1")
        _seconds("forward_s", self.forward_s)
        _seconds("backward_s", self.backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigure:
    """What a message between two nodes costs, in either direction; both the same: between devices of one node."""

    from_node: str
    to_node: str
    latency_s: float
    bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        _check_link(self.latency_s, self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLink:
    """What a message costs between a node of one kind (`link_kind`) and one of another or the same, in either
    direction; `within`: between devices of one node of `from_kind`, which is `to_kind` then. A figure of a LinkFigure
    goes first."""

    from_kind: str
    to_kind: str
    latency_s: float
    bytes_per_s: float
    source: str
    within: bool = False

    def __post_init__(self) -> None:
        _check_link(self.latency_s, self.bytes_per_s)
        if self.within and self.from_kind != self.to_kind:
            raise InvalidField("to_kind", self.to_kind, f"must be from_kind ({self.from_kind}) within a node")

    @property
    def between(self) -> tuple[bool, frozenset[str]]:
        """The same for figures of the same links."""
        return self.within, frozenset((self.from_kind, self.to_kind))


def link_kind(node: Node) -> str:
    """Nodes of one kind are taken to be linked alike: devices, zone, network interfaces and their rate are the same."""
    return f"{node.zone}/{node.device}/{node.devices}/{node.nics}x{node.inter_bytes_per_s:.4g}"


def _check_link(latency_s: float, bytes_per_s: float) -> None:
    _seconds("bytes_per_s", bytes_per_s)
    if not latency_s >= 0:
        raise InvalidField("latency_s", latency_s, "must be zero or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRate:
    """Elements of optimizer state that a device of this type updates in a second."""

    device: str
    elements_per_s: float
    source: str

    def __post_init__(self) -> None:
        _seconds("elements_per_s", self.elements_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All that was measured; empty means that the catalogue holds everywhere. Later entries replace earlier ones.

    `kinds` says of which kind each node is; `on` fills it in. For a node that is not in it `kind_links` say nothing.
    `calibration` is how far whole steps differed from what all else says.
    """

    layers: tuple[LayerTime, ...] = ()
    links: tuple[LinkFigure, ...] = ()
    updates: tuple[UpdateRate, ...] = ()
    kind_links: tuple[KindLink, ...] = ()
    kinds: dict[str, str] = field(default_factory=dict, hash=False)
    calibration: Calibration | None = None

    def on(self, nodes: Iterable[Node]) -> Profile:
        """The same for a cluster of these nodes; figures between others are left out."""
        kinds = {node.id: link_kind(node) for node in nodes}
        links = tuple(figure for figure in self.links if figure.from_node in kinds and figure.to_node in kinds)
        return dataclasses.replace(self, links=links, kinds=kinds)

    def link(self, from_node: str, to_node: str) -> LinkFigure | KindLink | None:
        for figure in reversed(self.links):
            if {figure.from_node, figure.to_node} == {from_node, to_node}:
                return figure
        here, there = self.kinds.get(from_node), self.kinds.get(to_node)
        return None if here is None or there is None else self.kind_link(here, there, within=from_node == to_node)

    def kind_link(self, from_kind: str, to_kind: str, *, within: bool) -> KindLink | None:
        wanted = within, frozenset((from_kind, to_kind))
        return next((figure for figure in reversed(self.kind_links) if figure.between == wanted), None)

    def update_rate(self, device: str) -> float | None:
        for figure in reversed(self.updates):
            if figure.device == device:
                return figure.elements_per_s
        return None

    def points(self, part: Part, device: str, precision: str, model: ModelSpec, seq_len: int) -> tuple[LayerTime, ...]:
        """Measured points of exactly this part of exactly this model, by tp and then micro-batch."""
        if not self.layers:
            return ()
        shape = tuple(getattr(model, name) for name in _SHAPE[part])
        found = {
            (point.tp, point.micro_batch): point
            for point in self.layers
            if (point.part, point.device, point.precision, point.seq_len) == (part, device, precision, seq_len)
            and tuple(getattr(point, name) for name in _SHAPE[part]) == shape
        }
        return tuple(found[key] for key in sorted(found))


def joined(older: Profile, newer: Profile) -> Profile:
    """All figures of both, of each thing only the newest, as if measured one after the other."""
    layers = {_layer_key(figure): figure for figure in (*older.layers, *newer.layers)}
    links = {frozenset((figure.from_node, figure.to_node)): figure for figure in (*older.links, *newer.links)}
    return Profile(
        layers=tuple(layers.values()),
        links=tuple(links.values()),
        updates=tuple({figure.device: figure for figure in (*older.updates, *newer.updates)}.values()),
        kind_links=tuple({figure.between: figure for figure in (*older.kind_links, *newer.kind_links)}.values()),
        kinds={**older.kinds, **newer.kinds},
        calibration=newer.calibration or older.calibration,
    )


def _layer_key(figure: LayerTime) -> LayerTime:
    return dataclasses.replace(figure, forward_s=1.0, backward_s=1.0, source="")


def measured(
    points: tuple[LayerTime, ...], tp: int, samples: int, analytic: Callable[[int, int], tuple[float, float]]
) -> tuple[float, float] | None:
    """Forward and backward seconds at this tp and number of samples, read from measured points; None without any.

    Between and beyond samples of the same tp: linear (a*b + c). From a single sample, or from another tp: the analytic
    seconds of (tp, samples) times the measured share of them, as only the device's speed can be carried over.
    """
    if not points:
        return None
    same = [point for point in points if point.tp == tp]
    if len(same) >= 2:
        return (
            _linear([(point.micro_batch, point.forward_s) for point in same], samples),
            _linear([(point.micro_batch, point.backward_s) for point in same], samples),
        )
    candidates = same or list(points)
    near = min(candidates, key=lambda point: (abs(point.tp - tp), abs(point.micro_batch - samples)))
    forward_s, backward_s = analytic(tp, samples)
    base_forward_s, base_backward_s = analytic(near.tp, near.micro_batch)
    return forward_s * near.forward_s / base_forward_s, backward_s * near.backward_s / base_backward_s


def _linear(samples: list[tuple[int, float]], at: int) -> float:
    """Through the two measured points next to `at`; noise must not make more work cheaper, nor small work free."""
    right = next((i for i, (count, _) in enumerate(samples) if count >= at and i > 0), len(samples) - 1)
    (x0, y0), (x1, y1) = samples[right - 1], samples[right]
    slope = max(0.0, (y1 - y0) / (x1 - x0))
    value = y0 + slope * (at - x0)
    return max(value, y0 * at / x0) if at < x0 else value


def profile_to_mapping(profile: Profile) -> dict[str, object]:
    """Plain JSON values; the inverse of `profile_from_mapping`. Versions of before know no `exchanges`, so that it is
    there only where it is false."""
    found = dataclasses.asdict(profile)
    for layer in found["layers"]:
        if layer["exchanges"]:
            del layer["exchanges"]
    return found


def profile_from_mapping(value: object) -> Profile:
    """Raises InvalidField."""
    return read(Profile, value)
