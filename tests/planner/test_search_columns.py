"""Options and columns: what a stage can run on, and what templates get done in a time."""

from __future__ import annotations

import numpy as np
import pytest
from planner_ground import make_cluster, make_job

from shoal_planner.columns import Columns
from shoal_planner.costs import CostModel
from shoal_planner.node_kinds import node_kinds
from shoal_planner.options import Kind, Option, group_kinds, options_of, sizes_of, tp_degrees, usable_nodes
from shoal_planner.profile import Profile

CLUSTER = make_cluster(("a", "A100-40G", 2, 4), ("t", "T4", 3, 2), memory_mib={"T4": 2500}, inter_gbit_per_s=25.0)
JOB = make_job(layers=12, batch=48, heads=24, hidden=1536, seq_len=512, precision="bf16")


def ground() -> tuple[CostModel, tuple[Kind, ...], tuple[Option, ...]]:
    costs = CostModel(JOB, CLUSTER, Profile())
    kinds = group_kinds(usable_nodes(JOB, CLUSTER), costs)
    return costs, kinds, options_of(kinds, costs)


def test_equal_nodes_are_a_number() -> None:
    _, kinds, _ = ground()
    assert [(kind.node.device, kind.nodes, kind.devices) for kind in kinds] == [
        ("A100-40G", ("a-0", "a-1"), 8),
        ("T4", ("t-0", "t-1", "t-2"), 6),
    ]
    numbers = node_kinds(CLUSTER, Profile())
    assert len({numbers["a-0"], numbers["a-1"]}) == 1 and numbers["a-0"] != numbers["t-0"]


def test_device_types_that_the_job_leaves_out_are_no_kind() -> None:
    job = make_job(limits={"device_types": ["T4"]})
    assert {node.device for node in usable_nodes(job, CLUSTER)} == {"T4"}


def test_degrees_divide_heads_and_a_width_counts_what_nobody_else_can_use() -> None:
    costs, _, options = ground()
    assert tp_degrees(costs, 8) == (1, 2, 3, 4, 6)  # of 24 heads and 12 key heads
    assert [(option.kind.node.device, option.tp, option.per_node, option.width) for option in options] == [
        ("A100-40G", 1, 4, 1.0),
        ("A100-40G", 2, 2, 2.0),
        ("A100-40G", 3, 1, 4.0),  # the fourth device of the node is lost to others of its make
        ("A100-40G", 4, 1, 4.0),
        ("T4", 1, 2, 1.0),
        ("T4", 2, 1, 2.0),
    ]


def test_sizes_of_micro_batches_stay_within_the_batch() -> None:
    assert list(sizes_of(1)) == [1]
    assert max(sizes_of(7)) <= 7
    assert list(sizes_of(48)) == sorted(set(sizes_of(48)))


@pytest.fixture(scope="module")
def grown() -> tuple[Columns, float, float]:
    """Columns, and the least time before and after they grew."""
    costs, kinds, options = ground()
    columns = Columns(costs, kinds, options, 2, JOB.train.global_batch, 1500)
    columns.start()
    before_s = columns.least_time()
    return columns, before_s, columns.grow()


def test_growing_finds_better_templates(grown: tuple[Columns, float, float]) -> None:
    columns, before_s, after_s = grown
    assert 0 < after_s <= before_s * (1 + 1e-9)
    assert len(columns.templates) == len(columns.needs) == len(columns.period_s) == len(columns.size)


def test_templates_need_no_more_than_there_is_and_all_hold_the_model(grown: tuple[Columns, float, float]) -> None:
    columns, _, _ = grown
    assert (columns.needs <= columns.stock + 1e-9).all()
    assert np.isfinite(columns.period_s).all() and (columns.fill_s >= columns.period_s * (1 - 1e-9)).all()
    assert {len(sequence) for sequence, _ in columns.templates} > {1, 2}


def test_more_time_gets_more_done_and_never_more_than_the_batch(grown: tuple[Columns, float, float]) -> None:
    columns, _, time_s = grown
    before = np.zeros(len(columns.templates))
    for factor in (0.1, 0.5, 1.0, 2.0, 100.0):
        values = columns.values(time_s * factor)
        assert (values >= before).all()
        assert (values <= JOB.train.global_batch).all()
        before = values


def test_a_single_pipeline_takes_what_the_closed_form_says(grown: tuple[Columns, float, float]) -> None:
    columns, _, _ = grown
    row = int(np.argmin(columns.alone_s()))
    numbers = -(-JOB.train.global_batch // columns.size[row])
    run_s = columns.fill_s[row] + (numbers - 1) * columns.period_s[row]
    assert columns.alone_s()[row] == pytest.approx(run_s + columns.sync_s[row])
