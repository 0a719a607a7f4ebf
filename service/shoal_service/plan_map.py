"""Where the cells of the plan map stand: one row per pipeline, its stages in order, a box per replica.

Pure geometry and words; templates/plan_map.html draws it. Lengths are in the drawing's own units (about pixels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_planner.cluster import ClusterSnapshot, snapshot_from_mapping
from shoal_planner.kinds import layers_text
from shoal_planner.plan import Pipeline, Plan, Replica, parse_plan

LABEL_WIDTH = 118.0
WIDTH = 1000.0
NUM_COLOURS = 8
MAX_ROWS = 48  # a larger plan is drawn in part; the table below it has all of it
_LEAST_CELL = 128.0
_MOST_LEAST_CELL = 210.0  # longer names are cut
_GAP = 6.0
_HEAD = 24.0
_BOX = 44.0
_CHARACTER = 7.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One replica of a stage. `colour` numbers its device type; `title` is what a pointer over it shows."""

    y: float
    height: float
    colour: int
    spot: bool
    lines: tuple[str, ...]
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    x: float
    width: float
    head: str
    title: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    y: float
    height: float
    name: str
    share: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A row of the table twin."""

    pipeline: int
    stage: int
    replica: int
    layers: str
    device_type: str
    devices: str
    tp: int
    samples: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMap:
    width: float
    height: float
    rows: tuple[Row, ...]
    hidden_rows: int
    types: tuple[tuple[str, int, int], ...]
    unused: tuple[str, ...]
    places: tuple[Place, ...]


def plan_map(plan_mapping: dict[str, Any], snapshot_mapping: dict[str, Any]) -> PlanMap:
    """Raises InvalidField for a plan or snapshot of a form that this version does not know."""
    plan, snapshot = parse_plan(plan_mapping), snapshot_from_mapping(snapshot_mapping)
    colours = _colours(snapshot, plan)
    shown = plan.pipelines[:MAX_ROWS]
    least = _least_cell(plan)
    width = max(WIDTH, *(LABEL_WIDTH + len(pipeline.stages) * (least + _GAP) for pipeline in shown))
    rows: list[Row] = []
    y = 0.0
    for index, pipeline in enumerate(shown):
        rows.append(_row(index, pipeline, y, _widths(pipeline, width, least), snapshot, colours))
        y += rows[-1].height + 2 * _GAP
    return PlanMap(
        width=width,
        height=max(0.0, y - 2 * _GAP),
        rows=tuple(rows),
        hidden_rows=len(plan.pipelines) - len(shown),
        types=tuple((name, colour, _count(name, plan, snapshot)) for name, colour in colours.items()),
        unused=plan.unused,
        places=_places(plan, snapshot),
    )


def _device_type(node_id: str, snapshot: ClusterSnapshot) -> str:
    try:
        return snapshot.node(node_id).device_label
    except KeyError:
        return "unknown"


def _colours(snapshot: ClusterSnapshot, plan: Plan) -> dict[str, int]:
    names = {node.device_label for node in snapshot.nodes} | {
        _device_type(place.device.node, snapshot) for place in plan.places()
    }
    return {name: index % NUM_COLOURS for index, name in enumerate(sorted(names))}


def _count(name: str, plan: Plan, snapshot: ClusterSnapshot) -> int:
    return sum(_device_type(place.device.node, snapshot) == name for place in plan.places())


def _row(
    index: int,
    pipeline: Pipeline,
    y: float,
    widths: tuple[float, ...],
    snapshot: ClusterSnapshot,
    colours: dict[str, int],
) -> Row:
    replicas = max(len(stage.replicas) for stage in pipeline.stages)
    height = _HEAD + replicas * (_BOX + 2)
    cells: list[Cell] = []
    x = LABEL_WIDTH
    for number, (stage, cell_width) in enumerate(zip(pipeline.stages, widths, strict=True)):
        words = _words(pipeline, number)
        each = (height - _HEAD) / len(stage.replicas)
        boxes = tuple(
            _box(replica, y + _HEAD + at * each, each - 2, cell_width, snapshot, colours)
            for at, replica in enumerate(stage.replicas)
        )
        title = f"pipeline {index}, stage {number}: {words}"
        cells.append(Cell(x=x, width=cell_width, head=_fit(words, cell_width), title=title, boxes=boxes))
        x += cell_width + _GAP
    share = f"{pipeline.micro_batches} x {pipeline.micro_batch} samples"
    return Row(y=y, height=height, name=f"pipeline {index}", share=share, cells=tuple(cells))


def _least_cell(plan: Plan) -> float:
    """Wide enough for the longest name of devices."""
    names = [
        _devices(replica) for pipeline in plan.pipelines for stage in pipeline.stages for replica in stage.replicas
    ]
    return min(max(_LEAST_CELL, max(map(len, names)) * _CHARACTER + 20), _MOST_LEAST_CELL)


def _devices(replica: Replica) -> str:
    """As in big-0:0,1 or big-0:0-7."""
    first, last = replica.devices[0], replica.devices[-1]
    if len(replica.devices) > 2 and replica.devices == tuple(range(first, last + 1)):
        return f"{replica.node}:{first}-{last}"
    return f"{replica.node}:{','.join(map(str, replica.devices))}"


def _widths(pipeline: Pipeline, width: float, least: float) -> tuple[float, ...]:
    """Proportional to layers, above a least width at which the words can still be read."""
    room = width - LABEL_WIDTH - len(pipeline.stages) * (least + _GAP) + _GAP
    counts = [stage.num_layers for stage in pipeline.stages]
    natural = sum(counts) or 1
    return tuple(least + room * count / natural for count in counts)


def _words(pipeline: Pipeline, number: int) -> str:
    stage = pipeline.stages[number]
    parts = []
    if number == 0:
        parts.append("embedding")
    if stage.num_layers:
        parts.append(layers_text(stage))
    if number == len(pipeline.stages) - 1:
        parts.append("head")
    return " + ".join(parts)


def _box(
    replica: Replica, y: float, height: float, width: float, snapshot: ClusterSnapshot, colours: dict[str, int]
) -> Box:
    device_type = _device_type(replica.node, snapshot)
    devices = _devices(replica)
    samples = f"{replica.samples} sample{'s' if replica.samples != 1 else ''}"
    spot = any(node.spot for node in snapshot.nodes if node.id == replica.node)
    detail = f"tp {replica.tp}, {samples}"
    return Box(
        y=y,
        height=height,
        colour=colours[device_type],
        spot=spot,
        lines=(_fit(devices, width), _fit(detail, width)),
        title=f"{devices} ({device_type}{', spot' if spot else ''}): tp {replica.tp}, {samples} of each micro-batch",
    )


def _fit(text: str, width: float) -> str:
    room = int((width - 12) / _CHARACTER)
    return text if len(text) <= room else text[: max(room - 3, 1)] + "..."


def _places(plan: Plan, snapshot: ClusterSnapshot) -> tuple[Place, ...]:
    return tuple(
        Place(
            pipeline=p,
            stage=s,
            replica=r,
            layers=_words(pipeline, s),
            device_type=_device_type(replica.node, snapshot),
            devices=_devices(replica),
            tp=replica.tp,
            samples=f"{replica.samples} of {pipeline.micro_batch} in each of {pipeline.micro_batches} micro-batches",
        )
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for r, replica in enumerate(stage.replicas)
    )
