"""Weights that nobody trains: what a rank has of them it keeps, and it reads no more than it lacks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal_planner.job import ModelSpec, parse_job
from shoal_planner.parameters import Parameter, frozen
from shoal_recovery.state import Span
from shoal_workers.first_values import FirstValues
from shoal_workers.frozen import FrozenWeights, frozen_weights

SHAPE = {"layers": 4, "hidden": 16, "heads": 2, "ffn": 24, "vocab": 259}
CPU = torch.device("cpu")


@pytest.fixture
def model() -> ModelSpec:
    train = {"global_batch": 1, "seq_len": 8, "steps": 1, "init_from": "file:///base", "lora": {"rank": 2}}
    return parse_job({"name": "frozen", "model": SHAPE, "data": {"uri": "stdlib:"}, "train": train}).model


class Base:
    """Elements that are their own numbers; notes what was read."""

    def __init__(self) -> None:
        self.read: list[tuple[str, int, int]] = []
        self.opened = 0

    def open(self) -> FirstValues:
        self.opened += 1
        return self

    def __call__(self, parameter: Parameter, first: int, last: int) -> Tensor:
        self.read.append((parameter.fqn, first, last))
        return torch.arange(first, last, dtype=torch.float32)


def held(model: ModelSpec, units: range, tp_rank: int = 0, tp: int = 1) -> list[Span]:
    found = []
    for parameter in frozen(model):
        if parameter.units[0] in units:
            first, last = parameter.interval(tp_rank, tp)
            found.append(Span(fqn=parameter.fqn, first=first, last=last))
    return sorted(found)


def build(model: ModelSpec, spans: list[Span], before: FrozenWeights | None = None) -> FrozenWeights:
    return frozen_weights(model, spans, torch.float32, CPU, before)


def assert_right(weights: FrozenWeights, spans: list[Span]) -> None:
    assert weights.is_whole
    for span in spans:
        assert weights.view(span).tolist() == list(range(span.first, span.last))


def test_layers_that_stay_lie_where_they_lay_and_new_ones_are_read(model: ModelSpec) -> None:
    old, new, base = held(model, range(1, 3)), held(model, range(2, 4)), Base()
    before = build(model, old)
    before.fill(base.open)
    assert_right(before, old)
    base.read.clear()
    after = build(model, new, before)
    after.fill(base.open)
    assert_right(after, new)
    stays = next(span for span in new if span.fqn.startswith("layers.1."))
    assert after.view(stays).data_ptr() == before.view(stays).data_ptr()
    assert {fqn.split(".")[1] for fqn, _, _ in base.read} == {"2"}


def test_another_cut_reads_only_the_rows_that_were_not_there(model: ModelSpec) -> None:
    base, half, whole = Base(), held(model, range(1, 2), tp=2), held(model, range(1, 2))
    before = build(model, half)
    before.fill(base.open)
    base.read.clear()
    after = build(model, whole, before)
    after.fill(base.open)
    assert_right(after, whole)
    known = {span.fqn: span.last for span in half}
    assert base.read
    assert all(first == known[fqn] for fqn, first, _ in base.read)
    base.opened = 0
    narrow = build(model, half, after)
    narrow.fill(base.open)
    assert_right(narrow, half)
    assert base.opened == 0, "nothing was lacking"


def test_what_was_interrupted_goes_on_where_it_was(model: ModelSpec) -> None:
    spans, base, left = held(model, range(1, 3)), Base(), [5]

    def go_on() -> None:
        left[0] -= 1
        if not left[0]:
            raise InterruptedError

    weights = build(model, spans)
    with pytest.raises(InterruptedError):
        weights.fill(base.open, go_on)
    assert not weights.is_whole
    done = list(base.read)
    assert len(done) == 4
    base.read.clear()
    again = build(model, spans, weights)
    again.fill(base.open)
    assert_right(again, spans)
    assert not {*done} & {*base.read}


def test_rows_are_a_matrix_that_autograd_leaves_alone(model: ModelSpec) -> None:
    weights, base = build(model, held(model, range(5), 1, 2)), Base()
    weights.fill(base.open)
    found = weights.parameter("layers.0.mlp.up.weight")
    assert (tuple(found.shape), found.requires_grad) == ((12, 16), False)
    assert found is weights.parameter("layers.0.mlp.up.weight")
    assert weights.num_bytes == 4 * sum(span.numel for span in held(model, range(5), 1, 2))
    with pytest.raises(KeyError):
        weights.parameter("final_norm.weight")
