"""Pictures of plans and steps: well formed, nothing left out that was promised, nothing unescaped."""

from __future__ import annotations

import dataclasses
import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
from planner_ground import make_job

from shoal_planner.catalogue import CATALOGUE, device_type
from shoal_planner.cluster import GIB, ClusterSnapshot, parse_cluster
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField
from shoal_planner.kinds import devices_text, kinds, layers_text, marks, nodes_by_id, numbers_text, stage_texts
from shoal_planner.memory import usable_bytes
from shoal_planner.picture import MAX_BOXES, MAX_KINDS, plan_svg
from shoal_planner.picture_timeline import MAX_INSTRUCTIONS, num_instructions, timeline_svg
from shoal_planner.plan import Override, Pipeline, Plan, Prediction, Replica, Stage, Terms
from shoal_planner.profile import Profile
from shoal_planner.programs import Backward, Forward
from shoal_planner.simulate import simulate, spans
from shoal_planner.svg import escape, fit, fit_end

SVG = "{http://www.w3.org/2000/svg}"
CLUSTER = parse_cluster(
    {
        "nodes": [
            {"name": "a", "device": "A100-80G", "count": 64, "devices": 8, "spot": True},
            {"name": "t", "device": "T4", "count": 64, "devices": 8},
        ]
    }
)


def pipeline(index: int, *, micro_batches: int = 4, layers: int = 8) -> Pipeline:
    """Two stages: two layers on a T4 pair, the others on an A100 pair."""
    first = Replica(node=f"t-{index}", devices=(0, 1), tp=2, samples=1)
    last = Replica(node=f"a-{index}", devices=(0, 1), tp=2, samples=1)
    stages = (Stage(layers=((0, 2),), replicas=(first,)), Stage(layers=((2, layers),), replicas=(last,)))
    return Pipeline(micro_batch=1, micro_batches=micro_batches, stages=stages)


def parsed(svg: str) -> ElementTree.Element:
    """Raises ParseError unless it is well formed."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def titles(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}title")]


def boxes(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [shape for shape in root.iter(f"{SVG}rect") if " box" in shape.get("class", "") and shape.get("rx") == "5"]


def predicted(plan: Plan, used_bytes: float) -> Plan:
    memory = tuple((str(place.device), used_bytes) for place in plan.places())
    prediction = Prediction(
        step_s=2.0,
        tokens_per_s=1234.5,
        mfu=0.41,
        price_per_million_tokens=0.5,
        terms=Terms(compute_s=2.0),
        memory_bytes=memory,
    )
    return dataclasses.replace(plan, prediction=prediction)


def test_pipelines_that_are_alike_are_drawn_once_and_stages_by_their_layers() -> None:
    odd = pipeline(63, micro_batches=5)
    plan = Plan(pipelines=(*(pipeline(index) for index in range(63)), odd), unused=("a-0:7", "t-0:7", "t-1:7"))
    root = parsed(plan_svg(predicted(plan, 10 * GIB), CLUSTER))
    shown = texts(root)
    assert {"x 63", "pipelines 0-62", "pipeline 63", "4 micro-batches", "5 micro-batches"} <= set(shown)
    assert f"Plan {plan.plan_id}: 64 pipelines of 2 kinds on 256 devices" in shown
    assert any("predicted 2 s a step" in text and "$0.50 per million tokens" in text for text in shown)
    assert {"T4: 128 of 512 in use", "A100-80G: 128 of 512 in use", "dashed: spot"} <= set(shown)
    assert "Not used: 1 x A100-80G (a-0:7); 2 x T4 (t-0:7, t-1:7)" in shown
    narrow, wide, *_ = (float(box.get("width", "")) for box in boxes(root))
    assert len(boxes(root)) == 4 and 1.5 * narrow < wide < 3 * narrow + 1
    usable = usable_bytes(device_type("T4")) / GIB
    assert shown.count(f"10/{usable:.3g} GiB") == 2
    words = f"t-11:0-1 and 51 more (T4): tp 2, 1 sample of each micro-batch; memory 10.0 of {usable:.1f}"
    assert any(words in title for title in titles(root))
    assert [("spot" in box.get("class", "")) for box in boxes(root)] == [False, True, False, True]


def test_a_picture_stands_alone_in_light_and_dark() -> None:
    svg = plan_svg(Plan(pipelines=(pipeline(0),)), CLUSTER)
    assert "prefers-color-scheme: dark" in svg
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in svg and "url(" not in svg and svg.isascii()
    root = parsed(svg)
    assert root.get("role") == "img" and root.find(f"{SVG}title") is not None
    assert not [text for text in texts(root) if "GiB" in text or "predicted" in text]


def test_names_from_elsewhere_are_escaped() -> None:
    name = '<script>"&\x07\ud800'
    stage = Stage(layers=((0, 8),), replicas=(Replica(node=name, devices=(0,)),))
    plan = Plan(
        pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(stage,)),), unused=(f"{name}:1",), reason=name
    )
    root = parsed(plan_svg(plan, CLUSTER))
    assert any(title.startswith('<script>"&\ufffd\ufffd:0 (unknown)') for title in titles(root))
    assert not list(root.iter(f"{SVG}script"))
    assert "unknown: 1 of 0 in use" in texts(root)


def test_recomputation_and_overrides_are_marked() -> None:
    overrides = (
        Override(layers=(1, 3), recompute="full", offload="optimizer"),
        Override(layers=(3, 4), recompute="selective"),
        Override(layers=(5, 6)),
    )
    stage = Stage(
        layers=((0, 8),), replicas=(Replica(node="a-0", devices=(0,)),), recompute="selective", overrides=overrides
    )
    assert marks(stage) == (
        "recompute selective",
        "1-2: recompute full, optimizer on the host",
        "3: recompute selective",
    )
    root = parsed(plan_svg(Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(stage,)),)), CLUSTER))
    assert "; ".join(marks(stage)) in texts(root)


def test_a_stage_of_many_replicas_and_a_device_over_its_memory() -> None:
    replicas = tuple(Replica(node=f"a-{index}", devices=(0,), samples=1 + index % 9) for index in range(63))
    holder = Replica(node="t-0", devices=(0,), samples=0, state_share=0.25)
    stage = Stage(layers=((0, 8),), replicas=(*replicas, holder))
    plan = Plan(pipelines=(Pipeline(micro_batch=stage.samples, micro_batches=1, stages=(stage,)),))
    root = parsed(plan_svg(predicted(plan, 100 * GIB), CLUSTER))
    assert len(boxes(root)) == MAX_BOXES
    assert "7 x tp 1, 1 sample" in texts(root) and "29 x tp 1, 0-9 samples" in texts(root)
    assert any(shape.get("class") == "full" for shape in root.iter(f"{SVG}rect"))
    assert any("share of state 0.25-1" in title for title in titles(root))
    alone = dataclasses.replace(stage, replicas=(*replicas[:1], holder))
    plan = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(alone,)),))
    assert "tp 1, only state" in texts(parsed(plan_svg(plan, CLUSTER)))


def test_long_pipelines_take_several_lines_and_many_kinds_are_counted() -> None:
    chunks = [(index, index + 1) for index in range(19)] + [(19, 19)]
    stages = tuple(
        Stage(layers=(chunk,), replicas=(Replica(node=f"a-{index}", devices=(0,)),))
        for index, chunk in enumerate(chunks)
    )
    deep = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=4, stages=stages),))
    root = parsed(plan_svg(deep, CLUSTER))
    assert len({box.get("y") for box in boxes(root)}) == 3 and "head" in texts(root)
    assert all(float(box.get("x", "")) + float(box.get("width", "")) < 1240 for box in boxes(root))
    many = Plan(pipelines=tuple(pipeline(index, micro_batches=1 + index) for index in range(MAX_KINDS + 3)))
    assert "3 more pipelines of 3 other kinds" in texts(parsed(plan_svg(many, CLUSTER)))


def whole_nodes(index: int) -> Pipeline:
    stages = tuple(
        Stage(layers=(chunk,), replicas=(Replica(node=f"{name}-{index}", devices=tuple(range(8)), tp=8),))
        for name, chunk in (("t", (0, 2)), ("a", (2, 8)))
    )
    return Pipeline(micro_batch=1, micro_batches=4, stages=stages)


def test_a_plan_for_a_thousand_devices_is_a_small_picture() -> None:
    plan = Plan(pipelines=tuple(whole_nodes(index) for index in range(64)))
    assert len(plan.devices()) == 1024
    svg = plan_svg(predicted(plan, GIB), CLUSTER)
    assert len(svg) < 20_000 and len(boxes(parsed(svg))) == 2


SMALL = parse_cluster(
    {
        "nodes": [
            {"name": "a", "device": "A100-80G", "devices": 8},
            {"name": "t", "device": "T4", "count": 2, "devices": 4},
        ]
    }
)


def small_plan() -> tuple[Plan, CostModel]:
    first = Replica(node="t-0", devices=(0, 1), tp=2)
    last = Replica(node="a-0", devices=(0,))
    other = Replica(node="t-1", devices=(0,))
    stages = (Stage(layers=((0, 2),), replicas=(first,)), Stage(layers=((2, 8),), replicas=(last,)))
    plan = Plan(
        pipelines=(
            Pipeline(micro_batch=1, micro_batches=12, stages=stages),
            Pipeline(micro_batch=1, micro_batches=4, stages=(Stage(layers=((0, 8),), replicas=(other,)),)),
        )
    )
    return plan, CostModel(make_job(batch=16), SMALL, Profile())


def test_spans_cover_a_step_without_gaps_and_add_up_to_what_is_simulated() -> None:
    plan, costs = small_plan()
    found = spans(plan, costs, range(4))
    for rank in range(4):
        mine = [span for span in found if span.rank == rank]
        assert mine[0].start_s == 0.0
        for before, after in itertools.pairwise(mine):
            assert after.start_s == pytest.approx(before.end_s)
            assert after.end_s > after.start_s
    assert max(span.end_s for span in found) == pytest.approx(simulate(plan, costs).step_s)
    forwards = {span.instruction for span in found if span.rank == 2 and isinstance(span.instruction, Forward)}
    assert len(forwards) == 12
    assert spans(plan, costs, ()) == ()


def test_the_timeline_shows_every_micro_batch_of_one_pipeline_of_each_kind() -> None:
    plan, costs = small_plan()
    root = parsed(timeline_svg(plan, costs))
    shown = titles(root)
    assert {"embedding + layers 0-1", "layers 2-7 + head", "pipeline 1: 4 micro-batches of 1 sample"} <= set(
        texts(root)
    )
    assert sum("forward of micro-batch" in title and "exchange" not in title for title in shown) == 12 + 12 + 4
    assert any(title.startswith("exchange within forward of micro-batch 0") for title in shown)
    assert any("waits for the transfer of activations of micro-batch 0" in title for title in shown)
    assert "the closed form predicts 2 s" in " ".join(texts(parsed(timeline_svg(predicted(plan, 1.0), costs))))
    assert any(title.startswith("vote: ") for title in shown) and any(title.startswith("update: ") for title in shown)
    assert any("gathering the weights of unit" in title for title in shown)
    ends = [float(bar.get("x", "")) + float(bar.get("width", "")) for bar in root.iter(f"{SVG}rect")]
    assert max(ends) == pytest.approx(1240, abs=0.1)
    assert {"forward", "backward", "tensor", "transfer", "wait", "reduce", "update"} <= {
        bar.get("class") for bar in root.iter(f"{SVG}rect")
    }


def test_narrow_bars_of_one_sort_are_joined() -> None:
    job = make_job(batch=4096)
    stage = Stage(layers=((0, 8),), replicas=(Replica(node="a-0", devices=(0,)),))
    plan = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=4096, stages=(stage,)),))
    costs = CostModel(job, SMALL, Profile())
    alone = spans(plan, costs, (0,))
    assert sum(isinstance(span.instruction, Backward) for span in alone) == 4096
    assert len(parsed(timeline_svg(plan, costs)).findall(f".//{SVG}rect")) < len(alone) + 20


def test_a_plan_too_large_or_of_another_cluster_has_no_timeline() -> None:
    plan, costs = small_plan()
    assert num_instructions(plan) < MAX_INSTRUCTIONS
    huge = Plan(pipelines=tuple(pipeline(index, micro_batches=700) for index in range(64)))
    with pytest.raises(InvalidField, match=f"instructions = .*at most {MAX_INSTRUCTIONS:,} a step"):
        timeline_svg(huge, costs)
    with pytest.raises(InvalidField, match="node = 't-0': is not a node of this cluster"):
        timeline_svg(plan, CostModel(costs.job, ClusterSnapshot(nodes=SMALL.nodes[:1]), Profile()))


def test_a_legend_of_many_types_takes_several_lines() -> None:
    nodes = [{"name": f"n{index}", "device": name} for index, name in enumerate(sorted(CATALOGUE)[:20])]
    stage = Stage(layers=((0, 8),), replicas=(Replica(node="n0-0", devices=(0,)),))
    plan = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=1, stages=(stage,)),))
    root = parsed(plan_svg(plan, parse_cluster({"nodes": nodes})))
    entries = [text for text in root.iter(f"{SVG}text") if (text.text or "").endswith("in use")]
    assert len(entries) == 20 and len({entry.get("y") for entry in entries}) > 2
    assert all(float(entry.get("x", "")) + 6 * len(entry.text or "") < 1240 for entry in entries)


def test_words_of_pictures() -> None:
    assert numbers_text((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert devices_text(Replica(node="a-0", devices=(0, 1, 3), tp=3)) == "a-0:0-1,3"
    replica = (Replica(node="a-0", devices=(0,)),)
    assert [layers_text(Stage(layers=(chunk,), replicas=replica)) for chunk in ((3, 3), (3, 4), (3, 6))] == [
        *("no layers", "layer 3", "layers 3-5")
    ]
    assert fit(70, "embedding + layers") == "embeddin.." and fit(70, "head") == "head"
    assert fit(70, "embedding + layers", "emb. + lay") == "emb. + lay"
    assert fit_end(70, "a100-80g-0:0-1 +3", "a100-80g-0:0-1") == "..0g-0:0-1"
    assert fit_end(70, "t4-0:0-1 +3", "t4-0:0-1") == "t4-0:0-1"
    assert fit(40, "embedding + layers", "emb. + layers") == "emb.."
    whole = Pipeline(micro_batch=1, micro_batches=1, stages=(Stage(layers=((0, 6),), replicas=replica),))
    assert stage_texts(whole, 0) == ("embedding + layers 0-5 + head", "emb. + layers 0-5 + head", "emb. + 0-5 + head")
    assert escape("a\x00<&>\"'\u00b7") == "a&#65533;&lt;&amp;&gt;&quot;'&#183;"
    plan, costs = small_plan()
    assert [kind.pipelines for kind in kinds(plan, nodes_by_id(costs.snapshot))] == [(0,), (1,)]
