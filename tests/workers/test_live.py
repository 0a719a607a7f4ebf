"""Live state: the same values in every layout, addressed by global coordinates, charged to the device."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from engine_runs import LAYOUTS, job

from shoal_planner.parameters import Parameter, parameters
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Kind, ShardKey, Span
from shoal_workers.errors import OutOfDeviceMemory
from shoal_workers.initial import initial_values
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory

MODEL = job().model
UNEVEN = LAYOUTS["3 stages beside 1"]


def _live(rank: int, *, precision: str = "fp32", limit_bytes: int | None = None) -> LiveState:
    state = shard_map(UNEVEN, MODEL).ranks[rank]
    return LiveState.build(MODEL, state, precision, DeviceMemory("here:0", limit_bytes))  # type: ignore[arg-type]


def seeded(parameter: Parameter, first: int, last: int) -> torch.Tensor:
    return initial_values(parameter, MODEL, 0, first, last)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_zero_is_the_same_in_every_layout(layout: str) -> None:
    whole = {
        parameter.fqn: initial_values(parameter, MODEL, 0, 0, parameter.numel).numpy()
        for parameter in parameters(MODEL)
    }
    for state in shard_map(LAYOUTS[layout], MODEL).ranks:
        live = LiveState.build(MODEL, state, "fp32", DeviceMemory("here:0", None))
        assert live.tag is None
        live.initialise(seeded)
        assert live.tag == 0
        for key in (*live.kept_keys(), *live.owned_keys()):
            expected = whole[key.fqn][key.first : key.last]
            if key.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
                expected = np.zeros_like(expected)
            np.testing.assert_array_equal(live.view(key).numpy(), expected)


def test_initial_values_do_not_depend_on_where_they_are_cut() -> None:
    big = Parameter(fqn="layers.0.mlp.up.weight", shape=(1000, 200), units=(1,), cut=True, decay=True)
    whole = initial_values(big, MODEL, 7, 0, big.numel)
    for first, last in ((0, 1), (65_535, 65_537), (70_000, 199_999), (131_072, 200_000)):
        torch.testing.assert_close(initial_values(big, MODEL, 7, first, last), whole[first:last], rtol=0, atol=0)
    assert abs(float(whole.std()) - MODEL.hidden**-0.5) < 1e-3
    assert not torch.equal(whole, initial_values(big, MODEL, 8, 0, big.numel)), "another seed"


def test_residual_projections_begin_smaller_and_norms_as_ones() -> None:
    known = {parameter.fqn: parameter for parameter in parameters(MODEL)}
    up, down = known["layers.3.mlp.up.weight"], known["layers.3.mlp.down.weight"]
    ratio = initial_values(up, MODEL, 0, 0, up.numel).std() / initial_values(down, MODEL, 0, 0, down.numel).std()
    assert float(ratio) == pytest.approx((2 * MODEL.layers) ** 0.5, rel=0.05)
    assert initial_values(known["final_norm.weight"], MODEL, 0, 0, 5).tolist() == [1.0] * 5


def test_views_are_the_state_itself() -> None:
    live = _live(0)
    live.initialise(seeded)
    key = next(key for key in live.kept_keys() if key.fqn == "layers.0.attention.q.weight")
    live.view(key).fill_(2.5)
    assert torch.equal(live.parameter(key.fqn), torch.full((32, 64), 2.5))
    middle = ShardKey(fqn=key.fqn, kind=Kind.WEIGHT, first=key.first + 10, last=key.first + 20)
    assert live.view(middle).tolist() == [2.5] * 10


def test_what_is_not_here_is_a_key_error() -> None:
    live = _live(0)
    held = next(key for key in live.kept_keys() if key.fqn == "layers.0.attention.q.weight")
    outside = (
        ShardKey(fqn="layers.5.attention.q.weight", kind=Kind.WEIGHT, first=0, last=1),
        ShardKey(fqn=held.fqn, kind=Kind.WEIGHT, first=held.first, last=held.last + 1),
        ShardKey(fqn=held.fqn, kind=Kind.EXP_AVG, first=held.first, last=held.last),
    )
    for key in outside:
        with pytest.raises(KeyError):
            live.view(key)
    with pytest.raises(KeyError):
        live.parameter("layers.5.attention.q.weight")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_add_up_in_the_flat_buffer(precision: str) -> None:
    live = _live(0, precision=precision)
    leaf = live.parameter("layers.0.mlp_norm.weight")
    for _ in range(2):
        (leaf.float() * 3.0).sum().backward()
    gradient = live.gradient(Span(fqn="layers.0.mlp_norm.weight", first=0, last=MODEL.hidden))
    assert gradient.dtype == torch.float32
    assert gradient.tolist() == [6.0] * MODEL.hidden
    live.zero_gradients()
    (leaf.float() * 1.0).sum().backward()
    assert gradient.tolist() == [1.0] * MODEL.hidden


def test_too_little_memory_is_refused_and_leaves_no_charge() -> None:
    state = shard_map(UNEVEN, MODEL).ranks[4]
    memory = DeviceMemory("here:4", 2_000_000)
    with pytest.raises(OutOfDeviceMemory, match="here:4"):
        LiveState.build(MODEL, state, "fp32", memory)
    assert memory.used_bytes == 0


def test_bf16_weights_take_half() -> None:
    memories = []
    for precision in ("fp32", "bf16"):
        memory = DeviceMemory("here:0", None)
        LiveState.build(MODEL, shard_map(UNEVEN, MODEL).ranks[0], precision, memory)  # type: ignore[arg-type]
        memories.append(memory.breakdown["weights"])
    assert memories[0] == 2 * memories[1]


def test_gradient_of_what_nothing_ran_through_is_zero() -> None:
    live = _live(0)
    span = Span(fqn="layers.0.mlp_norm.weight", first=0, last=MODEL.hidden)
    live.parameter(span.fqn).sum().backward()
    live.zero_gradients()
    assert live.gradient(span).tolist() == [0.0] * MODEL.hidden


def test_a_state_that_is_left_behind_goes_at_once() -> None:
    live = _live(0)
    live.parameter("layers.0.mlp_norm.weight").sum().backward()
    left = weakref.ref(live)
    del live
    assert left() is None
