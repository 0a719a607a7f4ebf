"""Where the cells of the plan map stand: one row per pipeline, its stages in order, a box per replica. Of a large plan,
pipelines that are alike share a row, and replicas that are alike a box.

Pure geometry and words; templates/panels/plan.html draws it. Lengths are in the drawing's own units (about pixels).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_planner.answers import plan_of_answer
from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot, snapshot_from_mapping
from shoal_planner.errors import InvalidField
from shoal_planner.kinds import Kind, Nodes, kinds, nodes_by_id, numbers_text, replica_groups, stage_text, type_of
from shoal_planner.memory import usable_bytes
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_service.timeline import duration, num_bytes

LABEL_WIDTH = 118.0
WIDTH = 1000.0
NUM_COLOURS = 8
MAX_ROWS = 24  # kinds of pipelines; what is left out is counted
FEW_PIPELINES = 8  # up to so many, each has a row of its own
FEW_REPLICAS = 4  # up to so many in a stage, each has a box of its own
MAX_PLACES = 200  # rows of the table
_LEAST_CELL = 128.0
_MOST_LEAST_CELL = 210.0  # longer names are cut
_GAP = 6.0
_HEAD = 40.0
_BOX = 60.0
_CHARACTER = 7.8
_LISTED = 12  # names in a tooltip

StageSeconds = Sequence[Sequence[float]]
NOBODY: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One replica of a stage, or several that are alike. `colour` numbers its device type; `title` is what a pointer
    over it shows; `memory_share` is how full the fullest of its devices is predicted to be, None where nobody says."""

    y: float
    height: float
    colour: int
    spot: bool
    lines: tuple[str, ...]
    title: str
    memory: str
    memory_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`time` is what a micro-batch takes there, `pace` its share of what it takes in the slowest stage of the plan."""

    x: float
    width: float
    head: str
    title: str
    time: str
    pace: float | None
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
    """A row of the table twin: a replica, or several that are alike."""

    pipelines: str
    stage: int
    layers: str
    time: str
    devices: str
    device_type: str
    market: str
    num_replicas: int
    tp: int
    samples: str
    memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMap:
    width: float
    height: float
    rows: tuple[Row, ...]
    hidden_rows: int
    types: tuple[tuple[str, int, int], ...]
    unused: str
    places: tuple[Place, ...]
    hidden_places: int


def plan_map(
    plan_mapping: dict[str, Any],
    snapshot_mapping: dict[str, Any],
    stage_s: StageSeconds | None = None,
    held_s: Mapping[str, float] = NOBODY,
) -> PlanMap:
    """`stage_s`: by pipeline and stage, the seconds of a micro-batch; `held_s`: by node, for how long the job has had
    it. Raises InvalidField for a plan or snapshot of a
    form that this version does not know."""
    plan, snapshot = plan_of_answer(plan_mapping), snapshot_from_mapping(snapshot_mapping)
    return _Drawing(plan, snapshot, stage_s, held_s).drawn()


class _Drawing:
    """What every part of the map looks up."""

    def __init__(
        self, plan: Plan, snapshot: ClusterSnapshot, stage_s: StageSeconds | None, held_s: Mapping[str, float]
    ) -> None:
        self._plan, self._stage_s, self._held_s = plan, stage_s, held_s
        self._nodes: Nodes = nodes_by_id(snapshot)
        self._colours = _colours(snapshot, plan, self._nodes)
        self._used = dict(plan.prediction.memory_bytes) if plan.prediction else {}
        self._usable = _usable(snapshot)
        self._slowest_s = max((seconds for found in stage_s or () for seconds in found), default=0.0)
        self._kinds = kinds(plan, self._nodes) if len(plan.pipelines) > FEW_PIPELINES else _each(plan)

    def drawn(self) -> PlanMap:
        shown = self._kinds[:MAX_ROWS]
        least = self._least_cell(shown)
        widest = max(len(kind.first.stages) for kind in shown)
        width = max(WIDTH, LABEL_WIDTH + widest * (least + _GAP))
        rows: list[Row] = []
        y = 0.0
        for kind in shown:
            rows.append(self._row(kind, y, _widths(kind.first, width, least)))
            y += rows[-1].height + 2 * _GAP
        places = tuple(place for kind in self._kinds for place in self._places(kind))
        return PlanMap(
            width=width,
            height=max(0.0, y - 2 * _GAP),
            rows=tuple(rows),
            hidden_rows=sum(len(kind.pipelines) for kind in self._kinds[MAX_ROWS:]),
            types=tuple((name, colour, self._count(name)) for name, colour in self._colours.items()),
            unused=_some(self._plan.unused),
            places=places[:MAX_PLACES],
            hidden_places=max(0, len(places) - MAX_PLACES),
        )

    def _count(self, name: str) -> int:
        return sum(type_of(place.device.node, self._nodes) == name for place in self._plan.places())

    def _row(self, kind: Kind, y: float, widths: tuple[float, ...]) -> Row:
        pipeline = kind.first
        groups = [self._groups(stage) for stage in pipeline.stages]
        height = _HEAD + max(map(len, groups)) * (_BOX + 2)
        cells: list[Cell] = []
        x = LABEL_WIDTH
        for number, (stage, cell_width) in enumerate(zip(pipeline.stages, widths, strict=True)):
            words, seconds = stage_text(pipeline, number), self._seconds(kind, number)
            each = (height - _HEAD) / len(groups[number])
            boxes = tuple(
                self._box([stage.replicas[r] for r in group], y + _HEAD + at * each, each - 2, cell_width)
                for at, group in enumerate(groups[number])
            )
            pace = seconds / self._slowest_s if seconds is not None and self._slowest_s else None
            time = "" if seconds is None else f"{duration(seconds)} a micro-batch" + (", slowest" if pace == 1 else "")
            waits = "" if pace is None or pace == 1 else f"; waits {1 - pace:.0%} of its time for the slowest stage"
            title = f"{_name(kind)}, stage {number}: {words}" + (f"; {time}{waits}" if time else "")
            cells.append(
                Cell(
                    x=x,
                    width=cell_width,
                    head=_fit(words, cell_width),
                    title=title,
                    time=_fit(time, cell_width),
                    pace=pace,
                    boxes=boxes,
                )
            )
            x += cell_width + _GAP
        share = f"{'each ' if len(kind.pipelines) > 1 else ''}{pipeline.micro_batches} x {pipeline.micro_batch} samples"
        return Row(y=y, height=height, name=_label(kind), share=share, cells=tuple(cells))

    def _groups(self, stage: Stage) -> tuple[tuple[int, ...], ...]:
        if len(stage.replicas) <= FEW_REPLICAS:
            return tuple((number,) for number in range(len(stage.replicas)))
        return replica_groups(stage, self._nodes)

    def _seconds(self, kind: Kind, stage: int) -> float | None:
        return None if self._stage_s is None else self._stage_s[kind.pipelines[0]][stage]

    def _least_cell(self, shown: Sequence[Kind]) -> float:
        """Wide enough for the longest name of devices."""
        names = (
            _heading([stage.replicas[r] for r in group], self._nodes)
            for kind in shown
            for stage in kind.first.stages
            for group in self._groups(stage)
        )
        return min(max(_LEAST_CELL, max(map(len, names)) * _CHARACTER + 20), _MOST_LEAST_CELL)

    def _box(self, replicas: list[Replica], y: float, height: float, width: float) -> Box:
        first = replicas[0]
        kind, spot = type_of(first.node, self._nodes), self._spot(first)
        detail = f"tp {first.tp}, {first.samples} sample{'s' if first.samples != 1 else ''}"
        memory = self._memory(replicas)
        told = "" if memory is None else f"; memory {num_bytes(memory[0])} of {num_bytes(memory[1])} usable"
        market = ", spot" if spot else ""
        return Box(
            y=y,
            height=height,
            colour=self._colours[kind],
            spot=spot,
            lines=(_fit(_heading(replicas, self._nodes), width), _fit(detail, width)),
            title=f"{_listed(replicas)} ({kind}{market}{self._about(first)}): {detail} of each micro-batch{told}",
            memory="" if memory is None else f"{memory[0] / memory[1]:.0%} of {num_bytes(memory[1])}",
            memory_share=None if memory is None else min(1.0, memory[0] / memory[1]),
        )

    def _about(self, replica: Replica) -> str:
        node = self._nodes.get(replica.node)
        if node is None:
            return ""
        held_s = self._held_s.get(replica.node)
        price = f", ${node.price_per_hour:g} an hour" if node.price_per_hour else ""
        return f", zone {node.zone}{price}" + (
            "" if held_s is None else f", with the job for {duration(round(held_s))}"
        )

    def _spot(self, replica: Replica) -> bool:
        return replica.node in self._nodes and self._nodes[replica.node].spot

    def _memory(self, replicas: list[Replica]) -> tuple[float, float] | None:
        """Used and usable bytes of the fullest of their devices."""
        found = [
            (self._used[str(ref)], self._usable[self._nodes[replica.node].device])
            for replica in replicas
            for ref in replica.refs()
            if str(ref) in self._used and replica.node in self._nodes
        ]
        return max((pair for pair in found if pair[1] > 0), key=lambda pair: pair[0] / pair[1], default=None)

    def _places(self, kind: Kind) -> list[Place]:
        found = []
        for number, stage in enumerate(kind.first.stages):
            seconds = self._seconds(kind, number)
            for group in self._groups(stage):
                replicas = [stage.replicas[r] for r in group]
                memory = self._memory(replicas)
                found.append(
                    Place(
                        pipelines=numbers_text(kind.pipelines),
                        stage=number,
                        layers=stage_text(kind.first, number),
                        time="" if seconds is None else duration(seconds),
                        devices=_listed(replicas, 3),
                        device_type=type_of(replicas[0].node, self._nodes),
                        market="spot" if self._spot(replicas[0]) else "on demand",
                        num_replicas=len(replicas) * len(kind.pipelines),
                        tp=replicas[0].tp,
                        samples=f"{replicas[0].samples} of {kind.first.micro_batch} in each of "
                        f"{kind.first.micro_batches} micro-batches",
                        memory="" if memory is None else f"{num_bytes(memory[0])} of {num_bytes(memory[1])}",
                    )
                )
        return found


def _each(plan: Plan) -> tuple[Kind, ...]:
    return tuple(Kind(pipelines=(number,), first=pipeline) for number, pipeline in enumerate(plan.pipelines))


def _name(kind: Kind) -> str:
    numbers = numbers_text(kind.pipelines)
    return f"pipeline {numbers}" if len(kind.pipelines) == 1 else f"pipelines {numbers}"


def _label(kind: Kind) -> str:
    """Short enough for the margin."""
    return _name(kind) if len(kind.pipelines) == 1 else f"{len(kind.pipelines)} pipelines"


def _colours(snapshot: ClusterSnapshot, plan: Plan, nodes: Nodes) -> dict[str, int]:
    names = {node.device_label for node in snapshot.nodes} | {
        type_of(place.device.node, nodes) for place in plan.places()
    }
    return {name: index % NUM_COLOURS for index, name in enumerate(sorted(names))}


def _usable(snapshot: ClusterSnapshot) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in {node.device for node in snapshot.nodes}:
        try:
            found[name] = usable_bytes(device_type(name, snapshot.overrides))
        except InvalidField:  # of a catalogue that is newer than this one: its memory alone is not shown
            found[name] = 0.0
    return found


def _heading(replicas: list[Replica], nodes: Nodes) -> str:
    """As in big-0:0,1 or big-0:0-7, or of several "64 x A100-80G"."""
    if len(replicas) == 1:
        return _devices(replicas[0])
    return f"{len(replicas)} x {type_of(replicas[0].node, nodes)}"


def _devices(replica: Replica) -> str:
    first, last = replica.devices[0], replica.devices[-1]
    if len(replica.devices) > 2 and replica.devices == tuple(range(first, last + 1)):
        return f"{replica.node}:{first}-{last}"
    return f"{replica.node}:{','.join(map(str, replica.devices))}"


def _listed(replicas: Sequence[Replica], most: int = _LISTED) -> str:
    return _some([_devices(replica) for replica in replicas], most)


def _some(names: Sequence[str], most: int = _LISTED) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _widths(pipeline: Pipeline, width: float, least: float) -> tuple[float, ...]:
    """Proportional to layers, above a least width at which the words can still be read."""
    room = width - LABEL_WIDTH - len(pipeline.stages) * (least + _GAP) + _GAP
    counts = [stage.num_layers for stage in pipeline.stages]
    natural = sum(counts) or 1
    return tuple(least + room * count / natural for count in counts)


def _fit(text: str, width: float) -> str:
    room = int((width - 12) / _CHARACTER)
    return text if len(text) <= room else text[: max(room - 3, 1)] + "..."
