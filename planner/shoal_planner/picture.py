"""The plan as a picture: which devices run which layers, on how many samples, in how much of their memory.

Owns what stands where. Pipelines that are alike are drawn once, so are replicas of a stage; long pipelines take several
lines. Does not own the look (`svg`), what counts as alike (`kinds`), nor the picture of a step (`picture_timeline`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import GIB, ClusterSnapshot, Node
from shoal_planner.explain import shared
from shoal_planner.groups import group_text
from shoal_planner.kinds import (
    Kind,
    devices_text,
    kinds,
    marks,
    nodes_by_id,
    numbers_text,
    replica_groups,
    stage_text,
    stage_texts,
    type_of,
)
from shoal_planner.memory import usable_bytes
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.svg import BOLD, NUM_COLOURS, document, fit, fit_end, line, rectangle, titled, words

WIDTH = 1240.0
MAX_KINDS = 40  # of pipelines; the picture says how many it leaves out
MAX_BOXES = 6  # of a stage; more sorts of replicas share the last one
PER_LINE = 8  # stages beside each other
_EDGE = 20.0
_LABEL = 150.0
_LEAST = 112.0
_GAP = 10.0
_HEAD = 22.0
_BOX = 56.0
_MARK = 15.0
_LISTED = 12  # names in a tooltip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """What every part of the picture looks up."""

    plan: Plan
    nodes: dict[str, Node]
    colours: dict[str, int]
    used_bytes: dict[str, float]
    usable_bytes: dict[str, float]


def plan_svg(plan: Plan, snapshot: ClusterSnapshot) -> str:
    """The picture as text; with a prediction it shows memory and speed. Nodes that the snapshot lacks are drawn as of
    unknown type. Raises InvalidField for a device type of the snapshot that neither it nor the catalogue knows."""
    scene = _scene(plan, snapshot)
    found = kinds(plan, scene.nodes)
    shapes = [words(_EDGE, 32, _title(plan, found), "title"), words(_EDGE, 52, _summary(plan), "soft")]
    legend, y = _legend(scene, snapshot)
    shapes.extend(legend)
    for kind in found[:MAX_KINDS]:
        drawn, y = _kind(scene, kind, y)
        shapes.extend(drawn)
    if len(found) > MAX_KINDS:
        rest = sum(len(kind.pipelines) for kind in found[MAX_KINDS:])
        shapes.append(words(_EDGE, y + 12, f"{rest} more pipelines of {len(found) - MAX_KINDS} other kinds", "soft"))
        y += 26
    if plan.unused:
        unused = _unused(plan, scene)
        shapes.append(
            titled(", ".join(plan.unused[:400]), words(_EDGE, y + 12, fit(WIDTH - 2 * _EDGE, unused), "soft"))
        )
        y += 26
    if told := shared(plan.sharding).removeprefix(", "):
        shapes.append(words(_EDGE, y + 12, told[0].upper() + told[1:], "soft"))
        y += 26
    if plan.groups:
        named = "; ".join(group_text(group, plan.num_layers) for group in plan.groups)
        text = words(_EDGE, y + 12, fit(WIDTH - 2 * _EDGE, f"Gradients are added up: {named}"), "soft")
        shapes.append(titled(named, text))
        y += 26
    return document(WIDTH, y, f"Plan {plan.plan_id}", plan.reason or _summary(plan), shapes)


def _scene(plan: Plan, snapshot: ClusterSnapshot) -> _Scene:
    nodes = nodes_by_id(snapshot)
    used = {place.device.node for place in plan.places()}
    types = sorted({node.device_label for node in snapshot.nodes} | {type_of(node_id, nodes) for node_id in used})
    usable: dict[str, float] = {}
    for name in {node.device for node in snapshot.nodes}:
        usable[name] = usable_bytes(device_type(name, snapshot.overrides))
    return _Scene(
        plan=plan,
        nodes=nodes,
        colours={name: index % NUM_COLOURS for index, name in enumerate(types)},
        used_bytes=dict(plan.prediction.memory_bytes) if plan.prediction else {},
        usable_bytes=usable,
    )


def _title(plan: Plan, found: tuple[Kind, ...]) -> str:
    num, devices = len(plan.pipelines), len(plan.devices())
    alike = f" of {len(found)} kinds" if 1 < len(found) < num else " of one kind" if num > 1 == len(found) else ""
    return f"Plan {plan.plan_id}: {_count(num, 'pipeline')}{alike} on {_count(devices, 'device')}"


def _summary(plan: Plan) -> str:
    parts = [f"{plan.global_batch} samples a step", f"schedule {plan.schedule}"]
    if plan.prediction is not None:
        predicted = plan.prediction
        price = predicted.price_per_million_tokens
        parts = [
            f"predicted {predicted.step_s:.4g} s a step",
            f"{predicted.tokens_per_s:,.0f} tokens/s",
            f"{predicted.mfu:.1%} of the peak",
            *(
                [f"${price:.2f} per million tokens" if price >= 0.1 else f"${price:.2g} per million tokens"]
                * (price > 0)
            ),
            *parts,
        ]
    return "  \u00b7  ".join(parts)


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _legend(scene: _Scene, snapshot: ClusterSnapshot) -> tuple[list[str], float]:
    used = Counter(type_of(device.node, scene.nodes) for device in scene.plan.devices())
    there = Counter({name: 0 for name in scene.colours})
    for node in snapshot.nodes:
        there[node.device_label] += node.devices
    entries = [
        (f"d{colour} box", f"{name}: {used[name]:,} of {there[name]:,} in use")
        for name, colour in scene.colours.items()
    ]
    if any(node.spot for node in snapshot.nodes):
        entries.append(("ground spot", "dashed: spot"))
    if scene.used_bytes:
        entries.append(("used", "bar: predicted peak of usable memory"))
    shapes, x, y = [], _EDGE, 68.0
    for style, text in entries:
        width = 26 + 7.0 * len(text)
        if x + width > WIDTH - _EDGE and x > _EDGE:
            x, y = _EDGE, y + 20
        shapes += [rectangle(x, y + 1, 13, 11 if style != "used" else 5, style, 2), words(x + 19, y + 11, text, "soft")]
        x += width
    return shapes, y + 30


def _kind(scene: _Scene, kind: Kind, top: float) -> tuple[list[str], float]:
    """A card with the pipelines' name on the left and their stages on as many lines as they need."""
    pipeline = kind.first
    widths, y, body = _widths(pipeline), top + 8, list[str]()
    for first in range(0, len(pipeline.stages), PER_LINE):
        numbers = range(first, min(first + PER_LINE, len(pipeline.stages)))
        height = max(_stage_height(scene, pipeline.stages[number]) for number in numbers)
        x = _EDGE + _LABEL
        for number in numbers:
            body.append(_stage(scene, kind, number, x, y, widths[number], height))
            x += widths[number] + _GAP
            if number < len(pipeline.stages) - 1:
                middle = y + (_HEAD + height) / 2
                body.append(line(x - _GAP + 1, middle, x - 2, middle, "arrow"))
        y += height + 8
    card = rectangle(_EDGE / 2, top, WIDTH - _EDGE, y - top, "card", 6)
    return [card, *_label(kind, top), *body], y + 8


def _label(kind: Kind, top: float) -> list[str]:
    pipeline, num = kind.first, len(kind.pipelines)
    name = f"pipeline{'s' if num > 1 else ''} {numbers_text(kind.pipelines)}"
    batches = _count(pipeline.micro_batches, "micro-batch").replace("batchs", "batches")
    lines = [
        (f"x {num}" if num > 1 else fit(_LABEL - 10, name), "strong"),
        *([(fit(_LABEL - 10, name), "soft")] if num > 1 else []),
        (batches, "soft"),
        (f"of {_count(pipeline.micro_batch, 'sample')}", "soft"),
    ]
    shapes = [words(_EDGE, top + 26 + 17 * index, text, style) for index, (text, style) in enumerate(lines)]
    each = " each" if num > 1 else ""
    return [titled(f"{name}: {batches} of {_count(pipeline.micro_batch, 'sample')}{each}", *shapes)]


def _widths(pipeline: Pipeline) -> list[float]:
    """Above a least width at which words can still be read, in proportion to layers: one scale for all lines."""
    counts = [stage.num_layers for stage in pipeline.stages]
    lines = [counts[first : first + PER_LINE] for first in range(0, len(counts), PER_LINE)]
    room = WIDTH - 2 * _EDGE - _LABEL
    scale = min((room + _GAP - len(line) * (_LEAST + _GAP)) / max(sum(line), 1) for line in lines)
    return [_LEAST + scale * count for count in counts]


def _stage_height(scene: _Scene, stage: Stage) -> float:
    boxes = min(len(replica_groups(stage, scene.nodes)), MAX_BOXES)
    return _HEAD + (_MARK if marks(stage) else 0) + boxes * (_BOX + 3)


def _stage(scene: _Scene, kind: Kind, number: int, x: float, y: float, width: float, height: float) -> str:
    pipeline = kind.first
    stage = pipeline.stages[number]
    held, marked = stage_text(pipeline, number), marks(stage)
    title = f"stage {number}: {held} ({_count(stage.num_layers, 'layer')})" + "".join(f"; {mark}" for mark in marked)
    shapes = [words(x + 1, y + 15, fit(width / BOLD, *stage_texts(pipeline, number)), "strong")]
    top = y + _HEAD
    if marked:
        shapes.append(words(x + 1, top + 9, fit(width, "; ".join(marked)), "mark"))
        top += _MARK
    groups = replica_groups(stage, scene.nodes)
    if len(groups) > MAX_BOXES:
        rest = tuple(sorted(replica for group in groups[MAX_BOXES - 1 :] for replica in group))
        groups = (*groups[: MAX_BOXES - 1], rest)
    each = (y + height - top) / len(groups)
    for at, group in enumerate(groups):
        shapes.append(_box(scene, kind, number, group, (x, top + at * each, width, each - 3)))
    return titled(title, *shapes)


def _box(
    scene: _Scene, kind: Kind, number: int, group: tuple[int, ...], place: tuple[float, float, float, float]
) -> str:
    """The replicas of this group, in all pipelines that are alike."""
    x, y, width, height = place
    replicas = [scene.plan.pipelines[p].stages[number].replicas[r] for p in kind.pipelines for r in group]
    mine = [kind.first.stages[number].replicas[r] for r in group]
    first = replicas[0]
    name = devices_text(first)
    names = (f"{name} +{len(replicas) - 1}", name) if len(replicas) > 1 else (name,)
    style = f"d{scene.colours[type_of(first.node, scene.nodes)]} box"
    if any(replica.node in scene.nodes and scene.nodes[replica.node].spot for replica in replicas):
        style += " spot"
    shapes = [
        rectangle(x, y, width, height, style, 5),
        words(x + 7, y + 16, fit_end((width - 12) / BOLD, *names), "strong"),
        words(x + 7, y + 31, fit(width - 12, _work(mine)), "small"),
    ]
    memory = _memory(scene, replicas)
    if memory is not None:
        shapes.extend(_bar(memory, x + 7, y + 38, width - 14))
    return titled(_box_title(scene, replicas, mine, memory), *shapes)


def _work(replicas: list[Replica]) -> str:
    """What each of them does: "8 x tp 2, 3 samples"."""
    samples = sorted({replica.samples for replica in replicas})
    shown = _count(samples[0], "sample") if len(samples) == 1 else f"{samples[0]}-{samples[-1]} samples"
    times = f"{len(replicas)} x " if len(replicas) > 1 else ""
    degrees = ", ".join(map(str, sorted({replica.tp for replica in replicas})))
    return f"{times}tp {degrees}, " + ("only state" if samples == [0] else shown)


def _memory(scene: _Scene, replicas: list[Replica]) -> tuple[float, float] | None:
    """Used and usable bytes of the fullest of their devices."""
    found = [
        (scene.used_bytes[str(ref)], scene.usable_bytes[scene.nodes[replica.node].device])
        for replica in replicas
        for ref in replica.refs()
        if str(ref) in scene.used_bytes and replica.node in scene.nodes
    ]
    return max(found, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0, default=None)


def _bar(memory: tuple[float, float], x: float, y: float, width: float) -> list[str]:
    used, usable = memory
    share = used / usable if usable else 1.0
    text = f"{used / GIB:.3g}/{usable / GIB:.3g} GiB"
    room = width - 7.0 * len(text) * 0.9
    shapes = [words(x + width, y + 8, text, "small end")]
    if room > 20:
        shapes += [
            rectangle(x, y + 1, room, 6, "bar", 3),
            rectangle(x, y + 1, room * min(share, 1), 6, "used" if share <= 1 else "full", 3),
        ]
    return shapes


def _box_title(scene: _Scene, replicas: list[Replica], mine: list[Replica], memory: tuple[float, float] | None) -> str:
    names = ", ".join(devices_text(replica) for replica in replicas[:_LISTED])
    more = f" and {len(replicas) - _LISTED} more" if len(replicas) > _LISTED else ""
    node = scene.nodes.get(replicas[0].node)
    kind = type_of(replicas[0].node, scene.nodes) + (", spot" if node is not None and node.spot else "")
    text = f"{names}{more} ({kind}): {_work(mine)} of each micro-batch"
    if memory is not None:
        text += f"; memory {memory[0] / GIB:.1f} of {memory[1] / GIB:.1f} GiB usable"
    shares = {replica.state_share for replica in mine}
    return text if shares == {1.0} else text + f"; share of state {min(shares):g}-{max(shares):g}"


def _unused(plan: Plan, scene: _Scene) -> str:
    found: dict[str, list[str]] = defaultdict(list)
    for name in plan.unused:
        found[type_of(name.rsplit(":", 1)[0], scene.nodes)].append(name)
    listed = (f"{len(names)} x {kind} ({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})"
              for kind, names in sorted(found.items()))  # fmt: skip
    return f"Not used: {'; '.join(listed)}"
