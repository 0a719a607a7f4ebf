"""One step as a picture: when which stage does what, one lane a stage, for one pipeline of each kind.

Owns what stands where and the limit of size; the clock is that of `simulate`. Does not own the look (`svg`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.kinds import (
    Kind,
    devices_text,
    kinds,
    nodes_by_id,
    numbers_text,
    stage_text,
    stage_texts,
    type_of,
)
from shoal_planner.plan import Plan
from shoal_planner.programs import Backward, Forward, Gather, InputGradient, Reduce, Update, Vote, WeightGradient
from shoal_planner.simulate import Span, spans
from shoal_planner.svg import document, fit, line, number, rectangle, titled, words

# Some seconds of work: beyond it the closed form of `predict` is the tool, and no picture shows so many.
MAX_INSTRUCTIONS = 1_000_000
MAX_KINDS = 12
MAX_LANES = 96
WIDTH = 1240.0
_EDGE = 20.0
_LABEL = 210.0
_LANE = 34.0
_BAR = 24.0
_LEAST = 0.6  # narrower spans of one sort that follow each other are drawn as one
_PLAIN = (("forward", "forward"), ("backward", "backward"))
_CHUNKED = (
    ("forward", "forward"),
    ("forward odd", "odd chunks"),
    ("backward", "backward"),
    ("backward odd", "odd chunks"),
)
_SPLIT = (("forward", "forward"), ("backward", "gradient of the input"), ("weights", "gradients of weights"))
_SORTS = (
    ("tensor", "exchange of tensor parallelism"),
    ("transfer", "waits for a transfer"),
    ("wait", "waits for others"),
    ("reduce", "gradients and weights"),
    ("update", "vote and optimizer"),
)
_STYLE = """
.forward { fill: #4f9fce; } .backward { fill: #e0a02f; } .tensor { fill: #a4579c; } .transfer { fill: #d9614c; }
.weights { fill: #8d9a3a; } .forward.odd { fill: #86bfe0; } .backward.odd { fill: #efc779; }
.wait { fill: #dfe4e9; } .reduce { fill: #3f9f71; } .update { fill: #6a66b8; }
.inside { fill: #10161c; font-size: 10px; text-anchor: middle; }
@media (prefers-color-scheme: dark) {
.forward { fill: #3f86b2; } .backward { fill: #b27d1f; } .weights { fill: #6f7a2b; }
.forward.odd { fill: #2a5f80; } .backward.odd { fill: #7d5714; } .wait { fill: #2a343d; } .inside { fill: #f2f5f8; }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Neighbouring spans of one sort, drawn as one bar."""

    sort: str
    name: str
    inside: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    label: str
    detail: str
    title: str
    rank: int


def num_instructions(plan: Plan) -> int:
    """About how many instructions a step of all ranks has."""
    found = 0
    for pipeline in plan.pipelines:
        ranks = sum(replica.tp for stage in pipeline.stages for replica in stage.replicas)
        messages = 0 if len(pipeline.stages) == 1 else 4
        work = pipeline.num_chunks * (3 if plan.schedule == "zero_bubble" else 2) + pipeline.num_chunks * messages
        found += ranks * pipeline.micro_batches * work + 2 * ranks * (plan.num_layers // len(pipeline.stages))
    return found


def check_size(plan: Plan) -> None:
    """Raises InvalidField for a plan that is too large to simulate one instruction after the other."""
    needed = num_instructions(plan)
    if needed > MAX_INSTRUCTIONS:
        problem = f"a timeline is simulated one instruction after the other, at most {MAX_INSTRUCTIONS:,} a step"
        raise InvalidField("instructions", needed, problem)


def timeline_svg(plan: Plan, costs: CostModel) -> str:
    """The picture as text. Raises InvalidField for a plan that is too large (`check_size`) or not of this cluster."""
    check_size(plan)
    found = kinds(plan, nodes_by_id(costs.snapshot))[:MAX_KINDS]
    groups = [(kind, _lanes(plan, kind, costs)) for kind in found]
    ranks = [lane.rank for _, lanes in groups for lane in lanes]
    try:
        traced = spans(plan, costs, ranks)
    except KeyError as error:
        raise InvalidField("node", error.args[0], "is not a node of this cluster") from error
    by_rank = {rank: tuple(group) for rank, group in itertools.groupby(traced, key=lambda span: span.rank)}
    step_s = max(span.end_s for span in traced)
    scale = (WIDTH - 2 * _EDGE - _LABEL) / step_s
    shapes = [words(_EDGE, 32, f"One step of plan {plan.plan_id}: {_seconds(step_s)}", "title")]
    shapes += [words(_EDGE, 52, _subtitle(plan, found), "soft"), *_legend(plan)]
    y, lanes_top = 118.0, 104.0
    for kind, lanes in groups:
        shapes.append(words(_EDGE, y + 4, _kind_title(kind), "strong"))
        y += 14
        for lane in lanes:
            shapes += _draw(lane, by_rank.get(lane.rank, ()), y, scale)
            y += _LANE
        y += 16
    return document(WIDTH, y + 4, f"One step of plan {plan.plan_id}", _subtitle(plan, found),
                    [*_grid(step_s, scale, lanes_top, y - 12), *shapes], _STYLE)  # fmt: skip


def _lanes(plan: Plan, kind: Kind, costs: CostModel) -> tuple[_Lane, ...]:
    """The first rank of each stage stands for the stage."""
    nodes = nodes_by_id(costs.snapshot)
    p = kind.pipelines[0]
    firsts = [place for place in plan.places() if place.pipeline == p and place.replica == place.tp_rank == 0]
    lanes = []
    for place in firsts[:MAX_LANES]:
        held = stage_text(kind.first, place.stage)
        replica = kind.first.stages[place.stage].replicas[0]
        device = f"{devices_text(replica)} ({type_of(replica.node, nodes)})"
        title = f"pipeline {p}, stage {place.stage}: {held} on {device}, tp {replica.tp}; rank {place.rank} is shown"
        label = fit(_LABEL - 14, *stage_texts(kind.first, place.stage))
        lanes.append(_Lane(label=label, detail=device, title=title, rank=place.rank))
    return tuple(lanes)


def _subtitle(plan: Plan, found: tuple[Kind, ...]) -> str:
    shown = sum(len(kind.pipelines) for kind in found)
    rest = len(plan.pipelines) - shown
    text = f"simulated, schedule {plan.schedule}; one pipeline of each kind, of each stage its first rank"
    if plan.prediction is not None:
        text += f"; the closed form predicts {_seconds(plan.prediction.step_s)}"
    return text + (f"; {rest} more pipelines are not drawn" if rest else "")


def _kind_title(kind: Kind) -> str:
    num, pipeline = len(kind.pipelines), kind.first
    name = (
        f"pipelines {numbers_text(kind.pipelines[:40])} ({num} alike)" if num > 1 else f"pipeline {kind.pipelines[0]}"
    )
    batches = f"{pipeline.micro_batches} micro-batch{'es' if pipeline.micro_batches > 1 else ''}"
    return f"{fit(500, name)}: {batches} of {pipeline.micro_batch} sample{'s' if pipeline.micro_batch > 1 else ''}"


def _legend(plan: Plan) -> list[str]:
    shapes, x = [], _EDGE
    match plan.schedule:
        case "1f1b":
            work: tuple[tuple[str, str], ...] = _PLAIN
        case "interleaved":
            work = _CHUNKED
        case "zero_bubble":
            work = _SPLIT
        case _:
            assert_never(plan.schedule)
    entries = [*work, *(entry for entry in _SORTS if entry[0] != "tensor" or _has_tensor_parallelism(plan))]
    gap = min(38.0, (WIDTH - 2 * _EDGE) / len(entries) - 6.3 * sum(len(text) for _, text in entries) / len(entries))
    for style, text in entries:
        shapes += [rectangle(x, 68, 13, 11, style, 2), words(x + 19, 78, text, "soft")]
        x += gap + 6.3 * len(text)
    return shapes


def _has_tensor_parallelism(plan: Plan) -> bool:
    return any(replica.tp > 1 for replica in plan.replicas())


def _grid(step_s: float, scale: float, top: float, bottom: float) -> list[str]:
    """A line every 1, 2 or 5 times a power of ten seconds, at most ten of them."""
    power = 10.0 ** math.floor(math.log10(step_s))
    tick_s = next(m * power for m in (0.1, 0.2, 0.5, 1.0) if step_s / (m * power) <= 10)
    shapes = []
    for index in range(int(step_s / tick_s) + 1):
        x = _EDGE + _LABEL + index * tick_s * scale
        shapes.append(line(x, top, x, bottom, "rule"))
        shapes.append(words(x, top - 3, _seconds(index * tick_s), "soft middle"))
    return shapes


def _draw(lane: _Lane, found: tuple[Span, ...], y: float, scale: float) -> list[str]:
    label = titled(
        lane.title,
        words(_EDGE, y + 9, lane.label),
        words(_EDGE, y + 23, fit(_LABEL - 8, lane.detail), "soft"),
    )
    shapes = [label]
    for piece in _pieces(found, _LEAST / scale):
        x, width = _EDGE + _LABEL + piece.start_s * scale, (piece.end_s - piece.start_s) * scale
        bar = f'<rect class="{piece.sort}" x="{x:.2f}" y="{number(y)}" width="{width:.2f}" height="{number(_BAR)}"/>'
        inside = []
        if piece.inside and width > 5 + 6 * len(piece.inside):
            inside = [words(x + width / 2, y + 16, piece.inside, "inside")]
        took = _seconds(piece.end_s - piece.start_s)
        shapes.append(titled(f"{piece.name}: {took}, from {_seconds(piece.start_s)}", bar, *inside))
    return shapes


def _pieces(found: Iterable[Span], least_s: float) -> Iterator[_Piece]:
    """Spans in order; those too narrow to see join with what follows them if it is of their sort."""
    last: _Piece | None = None
    for span in found:
        sort, name, inside = _named(span)
        if last is not None and last.sort == sort and last.end_s - last.start_s < least_s:
            last = _Piece(sort=sort, name=_joined(last.name), inside="", start_s=last.start_s, end_s=span.end_s)
            continue
        if last is not None:
            yield last
        last = _Piece(sort=sort, name=name, inside=inside, start_s=span.start_s, end_s=span.end_s)
    if last is not None:
        yield last


def _joined(name: str) -> str:
    return name if name.endswith(" and more") else f"{name} and more"


def _named(span: Span) -> tuple[str, str, str]:
    """Sort, name, and what stands within the bar."""
    instruction, what = span.instruction, span.term
    text, inside = _instruction(span)
    if what == "bubble_s":
        return "wait", f"waits before {text}", ""
    if what == "pipeline_s":
        return "transfer", f"waits for the transfer of {text}", ""
    if what == "tensor_s":
        return "tensor", f"exchange within {text}", ""
    match instruction:
        case Forward():
            return f"forward{_odd(instruction.chunk)}", text, inside
        case Backward() | InputGradient():
            return f"backward{_odd(instruction.chunk)}", text, inside
        case WeightGradient():
            return "weights", text, inside
        case Reduce() | Gather():
            return "reduce", text, ""
        case _:
            return "update", text, ""


def _odd(chunk: int) -> str:
    return " odd" if chunk % 2 else ""


def _instruction(span: Span) -> tuple[str, str]:
    match span.instruction:
        case Forward(micro_batch=at, chunk=chunk):
            return f"forward of micro-batch {at}{_through(chunk)}", str(at)
        case Backward(micro_batch=at, chunk=chunk):
            return f"backward of micro-batch {at}{_through(chunk)}", str(at)
        case InputGradient(micro_batch=at):
            return f"gradient of the input of micro-batch {at}", str(at)
        case WeightGradient(micro_batch=at):
            return f"gradients of weights of micro-batch {at}", str(at)
        case Reduce(unit=unit):
            return f"reduction of the gradients of unit {unit}", ""
        case Gather(unit=unit):
            return f"gathering the weights of unit {unit}", ""
        case Vote():
            return "vote", ""
        case Update():
            return "update", ""
        case message:
            kind = "activations" if "Activation" in type(message).__name__ else "gradients"
            return f"{kind} of micro-batch {message.micro_batch}", ""


def _through(chunk: int) -> str:
    return f" through chunk {chunk}" if chunk else ""


def _seconds(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
