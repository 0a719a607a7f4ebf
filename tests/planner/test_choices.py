"""What a layer's choices cost, and what plans say of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from shoal_planner.choices import Choice, LayerFigures, Options, options, overrides
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


def test_without_a_host_that_is_no_choice() -> None:
    found = options(PLAIN)
    assert [choice.recompute for choice in found.choices] == ["none", "selective", "full"]
    assert {choice.offload for choice in found.choices} == {"none"}


def test_offload_frees_the_optimizer_state_for_the_hosts_time() -> None:
    hosted = dataclasses.replace(PLAIN, host_s=0.7)
    assert figures_of(options(hosted), Choice(offload="optimizer")) == (pytest.approx(0.7), 600 + 3 * 1000, 0.0)


def test_stages_are_priced_at_once_each_with_what_it_can_do() -> None:
    both = dataclasses.replace(PLAIN, in_flight=np.array([1.0, 4.0]), host_s=np.array([0.2, math.inf]))
    found = options(both, recomputes=("none",))
    assert found.seconds.shape == found.bytes.shape == (2, 2)
    hosted = found.choices.index(Choice(offload="optimizer"))
    assert np.isinf(found.seconds[:, hosted]).tolist() == [False, True]
    assert found.bytes[:, found.choices.index(Choice())].tolist() == [1200 + 1000, 1200 + 4000]


def test_bytes_are_whole_so_that_sums_do_not_round() -> None:
    found = options(dataclasses.replace(PLAIN, kept_bytes=1000.3))
    assert (found.bytes == np.ceil(found.bytes)).all()
    assert (found.peak_bytes == np.ceil(found.peak_bytes)).all()


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
