"""Plan: which device runs which layers, on how many samples. A frozen value; `plan_id` is the hash of its structure.

Owns the invariants that hold on any cluster. Whether a plan *fits* a cluster and a job is judged by the cost model.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal_planner.chunks import check_chunks, check_cover
from shoal_planner.cluster import DeviceRef
from shoal_planner.errors import InvalidField
from shoal_planner.groups import Group, check_groups
from shoal_planner.job import JobSpec, Schedule
from shoal_planner.levels import OPTIMIZER_ALONE, DeviceGroups
from shoal_planner.levels import Level as Level
from shoal_planner.levels import Sharding as Sharding
from shoal_planner.overlap import NOTHING, Overlap, check_overlap
from shoal_planner.predicted import Prediction as Prediction
from shoal_planner.predicted import Terms as Terms
from shoal_planner.ranges import check_range
from shoal_planner.strict import check_document, read

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """`tp` devices of one node that together run their stage on `samples` of each micro-batch; with none they only
    hold their share of its optimizer state."""

    node: str
    devices: tuple[int, ...]
    tp: int = 1
    samples: int = 1
    state_share: float = 1.0

    def __post_init__(self) -> None:
        if self.tp < 1 or len(self.devices) != self.tp:
            raise InvalidField("devices", list(self.devices), f"must name as many devices as tp ({self.tp})")
        if len(set(self.devices)) != len(self.devices):
            raise InvalidField("devices", list(self.devices), "names a device twice")
        if self.samples < 0:
            raise InvalidField("samples", self.samples, "must be zero (the devices only hold state) or more")
        check_range("state_share", self.state_share, 1e-6, 1e6)

    def refs(self) -> tuple[DeviceRef, ...]:
        return tuple(DeviceRef(node=self.node, index=index) for index in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """What holds for blocks [first, last) of a stage instead of the stage's own choice. `offload: optimizer` keeps
    their optimizer state in the host's memory. `sharding: none` leaves their weights and gradients whole on each
    replica where the plan splits those of the others."""

    layers: tuple[int, int]
    recompute: Recompute | None = None
    offload: Literal["none", "optimizer"] = "none"
    sharding: Literal["none"] | None = None

    def __post_init__(self) -> None:
        first, last = self.layers
        if not 0 <= first < last:
            raise InvalidField("layers", [first, last], "must be [first, last) with 0 <= first < last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Transformer blocks in one chunk [first, last), or in several where the schedule is interleaved; the embedding
    goes with the first stage, final norm and head with the last one of a pipeline. Replicas share each micro-batch in
    their order. Where weights or gradients are split, they come together in `slices` of each unit, one by one."""

    layers: tuple[tuple[int, int], ...]
    replicas: tuple[Replica, ...]
    recompute: Recompute = "none"
    overrides: tuple[Override, ...] = ()
    slices: int = 1

    def __post_init__(self) -> None:
        check_chunks(self.layers)
        if not any(replica.samples for replica in self.replicas):
            raise InvalidField("replicas", len(self.replicas), "must have at least one entry that runs samples")
        reached = self.first
        for index, override in enumerate(self.overrides):
            first, last = override.layers
            if first < reached or not any(low <= first < last <= high for low, high in self.layers):
                within = f"layers {reached} to {self.last}" + (", and one chunk" if len(self.layers) > 1 else "")
                problem = f"must lie within {within}, in order and apart from each other"
                raise InvalidField(f"overrides[{index}].layers", list(override.layers), problem)
            reached = last

    @property
    def first(self) -> int:
        return self.layers[0][0]

    @property
    def last(self) -> int:
        """The end of its last chunk."""
        return self.layers[-1][1]

    @property
    def num_layers(self) -> int:
        return sum(last - first for first, last in self.layers)

    @property
    def samples(self) -> int:
        return sum(replica.samples for replica in self.replicas)

    def recomputed(self, chunk: int | None = None) -> dict[Recompute, int]:
        """How many of its layers, or of those of one chunk, are run with each kind of recomputation."""
        first, last = (self.first, self.last) if chunk is None else self.layers[chunk]
        found: dict[Recompute, int] = {"none": 0, "selective": 0, "full": 0}
        found[self.recompute] = self.num_layers if chunk is None else last - first
        for override in self.overrides:
            if first <= override.layers[0] < last:
                count = override.layers[1] - override.layers[0]
                found[self.recompute] -= count
                found[override.recompute or self.recompute] += count
        return found

    def recompute_of(self, layer: int) -> Recompute:
        """How this block is recomputed; what is no block of this stage (the model's ends) never is."""
        if not any(first <= layer < last for first, last in self.layers):
            return "none"
        for override in self.overrides:
            if override.layers[0] <= layer < override.layers[1]:
                return override.recompute or self.recompute
        return self.recompute

    def offloaded(self) -> int:
        """How many of its layers keep their optimizer state in the host's memory."""
        return sum(entry.layers[1] - entry.layers[0] for entry in self.overrides if entry.offload == "optimizer")

    def is_whole(self, layer: int) -> bool:
        """Whether this block is split among nobody, whatever the plan splits."""
        return any(entry.sharding and entry.layers[0] <= layer < entry.layers[1] for entry in self.overrides)

    def whole(self, recompute: Recompute | None = None) -> int:
        """How many of its layers are split among nobody, or of those that are recomputed so."""
        kept = (entry for entry in self.overrides if entry.sharding)
        alike = (entry for entry in kept if recompute in (None, entry.recompute or self.recompute))
        return sum(entry.layers[1] - entry.layers[0] for entry in alike)

    def sample_range(self, replica: int) -> tuple[int, int]:
        """The half-open range of samples of each micro-batch that this replica runs."""
        first = sum(other.samples for other in self.replicas[:replica])
        return first, first + self.replicas[replica].samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Runs `micro_batches` micro-batches of `micro_batch` samples in every step."""

    micro_batch: int
    micro_batches: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        for name in ("micro_batch", "micro_batches"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "must be at least 1")
        if not self.stages:
            raise InvalidField("stages", [], "must have at least one entry")
        check_cover([stage.layers for stage in self.stages])
        for index, stage in enumerate(self.stages):
            if stage.samples != self.micro_batch:
                raise InvalidField(
                    f"stages[{index}].replicas",
                    stage.samples,
                    f"samples must add up to micro_batch ({self.micro_batch})",
                )

    @property
    def samples(self) -> int:
        return self.micro_batch * self.micro_batches

    @property
    def num_chunks(self) -> int:
        """Of each of its stages."""
        return len(self.stages[0].layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank stands in a plan. Ranks count through pipelines, stages, replicas and tp ranks, in that order."""

    rank: int
    device: DeviceRef
    pipeline: int
    stage: int
    replica: int
    tp_rank: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = "1f1b"
    copies: int = 1
    sharding: Sharding = OPTIMIZER_ALONE
    groups: tuple[Group, ...] = ()
    device_groups: tuple[DeviceGroups, ...] = ()
    overlap: Overlap = NOTHING
    prediction: Prediction | None = None
    unused: tuple[str, ...] = ()
    reason: str = ""
    _plan_id: str = field(default="", init=False, repr=False, compare=False)  # once it was asked for

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise InvalidField("pipelines", [], "must have at least one entry")
        if self.copies < 0:
            raise InvalidField("copies", self.copies, "must be zero or more")
        for index, pipeline in enumerate(self.pipelines):
            if pipeline.num_chunks > 1 and self.schedule != "interleaved":
                problem = f"must be 'interleaved': the stages of pipelines[{index}] hold several chunks of layers"
                raise InvalidField("schedule", self.schedule, problem)
        lasts = {pipeline.stages[-1].last for pipeline in self.pipelines}
        if len(lasts) > 1:
            raise InvalidField("pipelines", sorted(lasts), "must all end at the same layer")
        seen: set[tuple[str, int]] = set()
        for replica in self.replicas():
            for index in replica.devices:
                if (replica.node, index) in seen:
                    raise InvalidField("pipelines", f"{replica.node}:{index}", "uses this device twice")
                seen.add((replica.node, index))
        check_groups(self.groups, self.num_layers)
        if self.groups and not self.exchanges_whole:
            problem = (
                "must be left out where sharding splits weights or gradients, or optimizer state within a stage, and "
                "where a replica runs no samples: there everything is exchanged directly"
            )
            raise InvalidField("groups", len(self.groups), problem)
        check_overlap(self.overlap, self.schedule, self.sharding, self.groups)
        if self.sharding.weights == self.sharding.gradients == "none":
            _check_nothing_whole(self.pipelines)
        named = [entry.node for entry in self.device_groups]
        if len(set(named)) < len(named):
            raise InvalidField("device_groups", named, "names a node twice")

    @property
    def num_layers(self) -> int:
        return self.pipelines[0].stages[-1].last

    @property
    def exchanges_whole(self) -> bool:
        """Whether all who hold a layer exchange all of it, once a step: so that there may be an algorithm for it."""
        levels = self.sharding
        split = levels.weights != "none" or levels.gradients != "none" or levels.optimizer in ("group", "node")
        return not split and all(replica.samples for replica in self.replicas())

    @property
    def global_batch(self) -> int:
        return sum(pipeline.samples for pipeline in self.pipelines)

    @property
    def plan_id(self) -> str:
        """The hash of the structure alone: predictions, reasons and unused devices do not count."""
        if not self._plan_id:
            text = json.dumps(_structure(self), sort_keys=True)
            object.__setattr__(self, "_plan_id", hashlib.sha256(text.encode()).hexdigest()[:12])
        return self._plan_id

    def replicas(self) -> Iterator[Replica]:
        return (replica for pipeline in self.pipelines for stage in pipeline.stages for replica in stage.replicas)

    def places(self) -> Iterator[RankPlace]:
        counter = itertools.count()
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                for r, replica in enumerate(stage.replicas):
                    for t, device in enumerate(replica.refs()):
                        yield RankPlace(
                            rank=next(counter), device=device, pipeline=p, stage=s, replica=r, tp_rank=t, tp=replica.tp
                        )

    def devices(self) -> frozenset[DeviceRef]:
        return frozenset(ref for replica in self.replicas() for ref in replica.refs())

    @property
    def num_devices(self) -> int:
        return sum(replica.tp for replica in self.replicas())

    def group_size(self, node: str) -> int:
        """Of the device groups of this node."""
        return next((entry.size for entry in self.device_groups if entry.node == node), 1)


def _check_nothing_whole(pipelines: tuple[Pipeline, ...]) -> None:
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            for index, entry in enumerate(stage.overrides):
                if entry.sharding:
                    field = f"pipelines[{p}].stages[{s}].overrides[{index}].sharding"
                    problem = (
                        "must be left out where sharding splits neither weights nor gradients: all layers are whole"
                    )
                    raise InvalidField(field, entry.sharding, problem)


def check_plan(plan: Plan, job: JobSpec) -> None:
    """Whether the plan is one of this job. Raises InvalidField."""
    if plan.num_layers != job.model.layers:
        raise InvalidField("pipelines", plan.num_layers, f"must cover the {job.model.layers} layers of the model")
    if plan.global_batch != job.train.global_batch:
        problem = f"micro-batches must add up to global_batch ({job.train.global_batch})"
        raise InvalidField("pipelines", plan.global_batch, problem)
    if job.model.module is not None:
        _check_own(plan)
    for replica in plan.replicas():
        if job.model.heads % replica.tp or job.model.num_kv_heads % replica.tp:
            problem = f"must divide heads ({job.model.heads}) and kv_heads ({job.model.num_kv_heads})"
            raise InvalidField("tp", replica.tp, problem)


def _check_own(plan: Plan) -> None:
    """Whether it asks nothing of modules of a user's own that only blocks of ours can do."""
    problem = "is not for modules of a user's own"
    if plan.schedule == "zero_bubble":
        raise InvalidField("schedule", plan.schedule, problem)
    if plan.overlap.tensor_chunks > 1:
        raise InvalidField("overlap.tensor_chunks", plan.overlap.tensor_chunks, problem)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if "selective" in (stage.recompute, *(override.recompute for override in stage.overrides)):
                raise InvalidField(f"pipelines[{p}].stages[{s}].recompute", "selective", problem)


def plan_to_mapping(plan: Plan) -> dict[str, object]:
    """The published form of a plan: plain JSON values."""
    structure: dict[str, object] = json.loads(json.dumps(_structure(plan)))  # tuples become lists
    mapping = {"plan_id": plan.plan_id, "reason": plan.reason, **structure, "unused": list(plan.unused)}
    if plan.prediction is not None:
        predicted = dataclasses.asdict(plan.prediction)
        predicted |= {name: dict(predicted[name]) for name in ("memory_bytes", "host_bytes")}
        if not predicted["host_bytes"]:
            del predicted["host_bytes"]
        mapping["predicted"] = predicted
    return mapping


def _structure(plan: Plan) -> dict[str, object]:
    """Groups of either kind, and what overlaps, only where there are some, so that plans without any keep their ids."""
    found: dict[str, object] = {
        "schedule": plan.schedule,
        "copies": plan.copies,
        "sharding": _levels(plan.sharding),
        "pipelines": [_plain(pipeline) for pipeline in plan.pipelines],
    }
    kinds = {"groups": plan.groups, "device_groups": plan.device_groups}
    found |= {name: _plain(entries) for name, entries in kinds.items() if entries}
    return found if plan.overlap == NOTHING else found | {"overlap": _plain(plan.overlap)}


def _levels(sharding: Sharding) -> dict[str, object]:
    """What is no level only where it is not the default, for the same reason."""
    levels = {name: getattr(sharding, name) for name in ("weights", "gradients", "optimizer")}
    rest = {name: getattr(sharding, name) for name in ("gather", "scatter", "secondary")}
    return levels | {name: value for name, value in rest.items() if value != getattr(OPTIMIZER_ALONE, name)}


def _plain(value: Any) -> object:
    """As `dataclasses.asdict`, which copies every leaf and so takes several times as long on large plans. What came
    later is said only where it is not the default, so that plans without it keep their ids."""
    kind: Any = type(value)
    if kind is tuple:
        return [_plain(item) for item in value]
    if kind in _ATOMS:
        return value
    found = {name: _plain(getattr(value, name)) for name in _names(kind)}
    if kind in _LATER:
        name, usual = _LATER[kind]
        if found[name] == usual:
            del found[name]
    return found


_LATER: dict[type, tuple[str, object]] = {Stage: ("slices", 1), Override: ("sharding", None)}
_ATOMS = frozenset((int, str, float, bool, type(None)))


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """What may stand in a plan file: the structure, and what other tools or we add to it."""

    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = "1f1b"
    copies: int = 1
    sharding: Sharding = OPTIMIZER_ALONE
    groups: tuple[Group, ...] = ()
    device_groups: tuple[DeviceGroups, ...] = ()
    overlap: Overlap = NOTHING
    unused: tuple[str, ...] = ()
    reason: str = ""


ADDED = ("plan_id", "seed", "search_s", "truncated", "predicted", "candidates", "explanation", "goodput", "profile")


def parse_plan(value: object) -> Plan:
    """The plan in a mapping of the published form; figures that a search added are ignored. Raises InvalidField."""
    given = check_document(value, "plan")
    document = read(PlanDocument, {key: item for key, item in given.items() if key not in ADDED})
    return Plan(
        pipelines=document.pipelines,
        schedule=document.schedule,
        copies=document.copies,
        sharding=document.sharding,
        groups=document.groups,
        device_groups=document.device_groups,
        overlap=document.overlap,
        unused=document.unused,
        reason=document.reason,
    )
