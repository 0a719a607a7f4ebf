"""What is timed of a job before its first plan, and how the answer becomes figures of its Profile."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_planner.cluster import Node, parse_cluster
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.profile import profile_from_mapping, profile_to_mapping
from shoal_workers.measurements import figures, is_timed, order, untimed
from shoal_workers.messages import Measure, Measured, decode, encode
from shoal_workers.timing import time_parts


def make_job(heads: int = 4, kv_heads: int = 2, batch: int = 3) -> JobSpec:
    model: dict[str, Any] = {
        "layers": 2,
        "hidden": 16 * heads,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": 96,
        "vocab": 256,
    }
    train = {"global_batch": batch, "seq_len": 16, "steps": 1}
    return parse_job({"name": "timed", "model": model, "data": {"uri": "stdlib:"}, "train": train})


def node(devices: int) -> Node:
    return parse_cluster({"nodes": [{"name": "a", "device": "cpu-1t", "devices": devices}]}).nodes[0]


@pytest.mark.parametrize(
    ("heads", "devices", "degrees"),
    [(4, 1, []), (4, 2, [2]), (4, 3, [2]), (16, 8, [2, 4, 8]), (48, 16, [2, 6, 16]), (3, 2, [])],
)
def test_shares_are_timed_of_degrees_that_the_node_and_the_model_have(
    heads: int, devices: int, degrees: list[int]
) -> None:
    asked = order(make_job(heads, heads), node(devices), ())
    assert (asked.degrees, asked.num_threads) == (degrees, 1)
    assert decode(encode(asked)) == asked
    assert isinstance(asked, Measure)


def test_what_was_timed_becomes_figures_that_say_what_they_contain() -> None:
    job = make_job()
    rows = list(time_parts(job, 1, degrees=(2,)))
    blocks = {(tp, samples) for part, samples, _, _, tp in rows if part == "block"}
    assert blocks == {(1, 1), (1, 2), (1, 3), (2, 1), (2, 3)}
    assert {(part, tp) for part, _, _, _, tp in rows if part != "block"} == {("embedding", 1), ("head", 1)}
    answer = decode(encode(Measured(rows=rows, updates_per_s=1e9)))
    found = figures(job, "cpu-1t", answer, "now")
    assert {(figure.part, figure.tp, figure.exchanges) for figure in found.layers} == {
        ("block", 1, True),
        ("block", 2, False),
        ("embedding", 1, True),
        ("head", 1, True),
    }
    assert profile_from_mapping(profile_to_mapping(found)) == found
    assert is_timed(job, found, "cpu-1t")
    assert list(untimed(job, found, [node(2)])) == []
