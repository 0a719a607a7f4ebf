"""What a layer's choices cost, and what plans say of them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from shoal_planner.choices import Choice, LayerFigures, Options, options, overrides
from shoal_planner.errors import InvalidField
from shoal_planner.plan import Override

PLAIN = LayerFigures(
    micro_batches=8.0,
    in_flight=3.0,
    kept_bytes=1000.0,
    selective_bytes=400.0,
    full_bytes=50.0,
    again_bytes=1000.0,
    selective_s=0.1,
    full_s=1.0,
    weight_bytes=200.0,
    gradient_bytes=400.0,
    optimizer_bytes=600.0,
)
SHARED = dataclasses.replace(PLAIN, share=0.25, gather_s=0.3, scatter_s=0.6)


def figures_of(found: Options, choice: Choice) -> tuple[float, float, float]:
    """Seconds of a step, bytes, peak bytes."""
    at = found.choices.index(choice)
    return float(found.seconds[at]), float(found.bytes[at]), float(found.peak_bytes[at])


def test_a_layer_that_keeps_everything_costs_nothing_more() -> None:
    assert figures_of(options(PLAIN), Choice()) == (0.0, 200 + 400 + 600 + 3 * 1000, 0.0)


def test_recomputation_pays_in_every_micro_batch_and_frees_all_in_flight() -> None:
    found = options(PLAIN)
    assert figures_of(found, Choice(recompute="selective")) == (pytest.approx(0.8), 1200 + 3 * 400, 1000)
    assert figures_of(found, Choice(recompute="full")) == (8.0, 1200 + 3 * 50, 1000)


def test_without_sharers_and_without_a_host_neither_is_a_choice() -> None:
    found = options(PLAIN, splits=(1, 4))
    assert [choice.recompute for choice in found.choices] == ["none", "selective", "full"]
    assert {(choice.sharded, choice.offload) for choice in found.choices} == {(0, "none")}


def test_sharding_one_micro_batch_costs_half_as_much_again_as_replication() -> None:
    """OSDP: three transfers of the layer for two."""
    same = dataclasses.replace(SHARED, micro_batches=1.0, scatter_s=0.3)
    seconds, num_bytes, peak = figures_of(options(same, splits=(1,)), Choice(sharded=1))
    assert seconds == pytest.approx(0.5 * (0.3 + 0.3))
    assert num_bytes == 600 * 0.25 + 600 + 3 * 1000
    assert peak == 600


def test_more_micro_batches_gather_again_what_replication_reduces_once() -> None:
    seconds, _, _ = figures_of(options(SHARED, splits=(1,)), Choice(sharded=1))
    assert seconds == pytest.approx(8 * (2 * 0.3 + 0.6) - (0.3 + 0.6))


def test_slices_trade_peak_and_bytes_against_seconds() -> None:
    found = options(SHARED, splits=(4,), recomputes=("none",))
    prices = [figures_of(found, Choice(sharded=j, split=4)) for j in (1, 2, 3, 4)]
    assert [peak for _, _, peak in prices] == [150.0] * 4
    for before, after in itertools.pairwise(prices):
        assert after[0] > before[0]
        assert after[1] < before[1]
    assert prices[-1][1] == figures_of(options(SHARED, splits=(1,)), Choice(sharded=1))[1]


def test_slices_cost_messages_kernels_and_a_third_gather_with_full_recomputation() -> None:
    dear = dataclasses.replace(SHARED, message_s=0.01, slice_s=0.002)
    found = options(dear, splits=(1, 4))

    def seconds(choice: Choice) -> float:
        return figures_of(found, choice)[0]

    once = 0.3 + 0.6 + 2 * 0.01
    assert seconds(Choice(sharded=1)) == pytest.approx(8 * (1.2 + 3 * 0.01) - once)
    assert seconds(Choice(sharded=4, split=4)) == pytest.approx(8 * (1.2 + 4 * 3 * 0.01 + 3 * 0.002) - once)
    assert seconds(Choice(sharded=1, recompute="full")) == pytest.approx(seconds(Choice(sharded=1)) + 8 * 1.0)
    again = seconds(Choice(sharded=4, split=4, recompute="full"))
    assert again == pytest.approx(seconds(Choice(sharded=4, split=4)) + 8 * (1.0 + 0.3 + 4 * 0.01))


def test_offload_frees_the_optimizer_state_for_the_hosts_time() -> None:
    hosted = dataclasses.replace(PLAIN, host_s=0.7)
    assert figures_of(options(hosted), Choice(offload="optimizer")) == (pytest.approx(0.7), 600 + 3 * 1000, 0.0)


def test_stages_are_priced_at_once_each_with_what_it_can_do() -> None:
    both = dataclasses.replace(
        SHARED, in_flight=np.array([1.0, 4.0]), share=np.array([1.0, 0.5]), host_s=np.array([0.2, math.inf])
    )
    found = options(both, splits=(1,), recomputes=("none",))
    assert found.seconds.shape == found.bytes.shape == (2, 3)  # neither can do both
    sharded, hosted = found.choices.index(Choice(sharded=1)), found.choices.index(Choice(offload="optimizer"))
    assert np.isinf(found.seconds[:, sharded]).tolist() == [True, False]
    assert np.isinf(found.seconds[:, hosted]).tolist() == [False, True]
    assert found.bytes[:, found.choices.index(Choice())].tolist() == [1200 + 1000, 1200 + 4000]


def test_bytes_are_whole_so_that_sums_do_not_round() -> None:
    found = options(dataclasses.replace(SHARED, share=1 / 3, kept_bytes=1000.3), splits=(4,))
    assert (found.bytes == np.ceil(found.bytes)).all()
    assert (found.peak_bytes == np.ceil(found.peak_bytes)).all()


@pytest.mark.parametrize(("field", "choice"), [("split", (0, 0)), ("sharded", (3, 2)), ("sharded", (-1, 2))])
def test_choices_that_mean_nothing_are_refused(field: str, choice: tuple[int, int]) -> None:
    with pytest.raises(InvalidField) as refused:
        Choice(sharded=choice[0], split=choice[1])
    assert refused.value.field == field


def test_overrides_name_what_differs_from_most_layers() -> None:
    choices = (Choice(), Choice(recompute="full"), Choice(recompute="full", offload="optimizer"))
    assert overrides(4, choices, (6, 0, 0)) == ("none", ())
    assert overrides(4, choices, (0, 6, 0)) == ("full", ())
    assert overrides(4, choices, (1, 3, 2)) == (
        "full",
        (
            Override(layers=(4, 5), recompute="none"),
            Override(layers=(8, 10), recompute="full", offload="optimizer"),
        ),
    )


def test_a_plan_says_which_layers_are_not_sharded_but_not_which_slices() -> None:
    with pytest.raises(InvalidField) as refused:
        overrides(0, (Choice(sharded=1, split=2),), (2,))
    assert str(refused.value) == "sharded = 1: must be 0 or all 2 slices in a plan"
    mixed = (Choice(sharded=2, split=2), Choice())
    assert overrides(0, mixed, (2, 0)) == overrides(0, mixed, (0, 2)) == ("none", ())
    assert overrides(0, mixed, (2, 3)) == ("none", (Override(layers=(2, 5), recompute="none", sharding="none"),))
