"""Collectives as messages: every holder ends with the sum, and counting the messages gives the published table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.collective_counting import count
from benchmarks.collective_vectors import execute
from shoal_planner.algorithms import Algorithm, Tree, depth, num_holders
from shoal_planner.collective_counts import Counts, counts_of
from shoal_planner.collective_menus import factorisations
from shoal_planner.collective_messages import MessagePlan, all_reduce, tree_all_reduce
from shoal_planner.errors import InvalidField

SIZES = range(1, 17)


def least_touched(holders: int, fan_in: int) -> float:
    """The least memory traffic where no reduction has more than `fan_in` inputs (3.3 of the notes on the paper): each
    of k reductions of a block adds one write and one read of the running sum, and k >= (N - 1) / (fan_in - 1)."""
    reductions = math.ceil((holders - 1) / (fan_in - 1))
    return (holders - 1 + 2 * reductions) / holders


def algorithms(holders: int) -> list[Algorithm]:
    plain = [
        Algorithm(kind=kind, holders=holders)
        for kind in ("ring", "halving_doubling", "reduce_broadcast", "parameter_server")
    ]
    factored = [
        Algorithm(kind="parameter_server", holders=holders, factors=factors)
        for factors in factorisations(holders)
        if len(factors) > 1
    ]
    return plain + factored


def server(*factors: int) -> Algorithm:
    return Algorithm(kind="parameter_server", holders=math.prod(factors), factors=factors)


def vectors(holders: int, size: int) -> list[NDArray[np.float64]]:
    """Whole numbers, so that sums are exact in any order."""
    random = np.random.default_rng(holders * 1000 + size)
    return [random.integers(-1000, 1000, size).astype(np.float64) for _ in range(holders)]


def assert_sums(plan: MessagePlan, size: int) -> None:
    given = vectors(plan.holders, size)
    kept = [vector.copy() for vector in given]
    for found in execute(plan, given):
        np.testing.assert_array_equal(found, np.sum(given, axis=0))
    for vector, copy in zip(given, kept, strict=True):
        np.testing.assert_array_equal(vector, copy)


@pytest.mark.parametrize("holders", SIZES)
def test_every_holder_ends_with_the_sum(holders: int) -> None:
    for algorithm in algorithms(holders):
        for size in (1, 64, 101):  # smaller than the blocks, and no multiple of them
            assert_sums(all_reduce(algorithm), size)


@pytest.mark.parametrize("holders", SIZES)
def test_the_first_half_leaves_each_block_summed_with_its_owner(holders: int) -> None:
    for algorithm in algorithms(holders):
        plan = all_reduce(algorithm)
        half = MessagePlan(holders=plan.holders, blocks=plan.blocks, rounds=plan.reduce_rounds, owners=plan.owners)
        given = vectors(holders, plan.blocks)
        found = execute(half, given)
        assert all(message.reduce for messages in plan.reduce_rounds for message in messages)
        assert not any(message.reduce for messages in plan.gather_rounds for message in messages)
        for block, owner in enumerate(plan.owners):
            assert found[owner][block] == sum(vector[block] for vector in given)


@pytest.mark.parametrize("holders", SIZES)
def test_nobody_sends_what_another_message_of_the_round_brings(holders: int) -> None:
    """Receivers may add inputs as they come: no block is both overwritten and added to, nor copied to twice."""
    for algorithm in algorithms(holders):
        for messages in all_reduce(algorithm).rounds:
            copies = [
                (message.receiver, block)
                for message in messages
                if not message.reduce
                for block in range(message.first, message.last)
            ]
            assert len(copies) == len(set(copies))
            assert len({message.reduce for message in messages}) == 1


@pytest.mark.parametrize("holders", SIZES)
def test_counting_messages_gives_the_closed_forms(holders: int) -> None:
    for algorithm in algorithms(holders):
        counted, formula = count(all_reduce(algorithm)), counts_of(algorithm)
        for name in ("rounds", "fan_in", "peers"):
            assert getattr(counted, name) == getattr(formula, name), (algorithm, name)
        for name in ("sent", "reduced", "touched"):
            assert getattr(counted, name) == pytest.approx(getattr(formula, name), abs=1e-12), (algorithm, name)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_the_published_table(n: int) -> None:
    """The rows of the paper's table, counted from messages and written out here once more."""
    log = n.bit_length() - 1
    few = (2 * (n - 1) / n, (n - 1) / n)
    rows = {
        Algorithm(kind="reduce_broadcast", holders=n): (2, 2 * (n - 1), n - 1, n + 1, n),
        Algorithm(kind="ring", holders=n): (2 * (n - 1), *few, 3 * (n - 1) / n, 2),
        Algorithm(kind="halving_doubling", holders=n): (2 * log, *few, 3 * (n - 1) / n, 2),
        Algorithm(kind="parameter_server", holders=n): (2, *few, (n + 1) / n, n),
    }
    for algorithm, (rounds, sent, reduced, touched, fan_in) in rows.items():
        expected = Counts(rounds=rounds, sent=sent, reduced=reduced, touched=touched, fan_in=fan_in)
        found = count(all_reduce(algorithm))
        assert (found.rounds, found.fan_in) == (expected.rounds, expected.fan_in)
        assert (found.sent, found.reduced, found.touched) == pytest.approx((sent, reduced, touched))


@pytest.mark.parametrize(
    ("algorithm", "touched"),
    [
        (server(8), 1.125),
        (server(4, 2), 1.625),
        (server(2, 4), 2.125),
        (Algorithm(kind="ring", holders=8), 2.625),
        (Algorithm(kind="halving_doubling", holders=8), 2.625),
        (server(12), 1.0833),
        (server(3, 4), 1.75),
        (server(2, 6), 2.0833),
        (Algorithm(kind="ring", holders=12), 2.75),
        (server(15), 1.0667),
        (server(5, 3), 1.4667),
        (server(3, 5), 1.7333),
        (Algorithm(kind="ring", holders=15), 2.8),
        (server(16), 1.0625),
        (server(4, 4), 1.5625),
        (Algorithm(kind="ring", holders=16), 2.8125),
        (Algorithm(kind="halving_doubling", holders=16), 2.8125),
    ],
    ids=lambda value: value.name if isinstance(value, Algorithm) else str(value),
)
def test_check_values_of_memory_traffic(algorithm: Algorithm, touched: float) -> None:
    assert count(all_reduce(algorithm)).touched == pytest.approx(touched, abs=5e-5)


def test_halving_doubling_folds_what_exceeds_a_power_of_two() -> None:
    """Two more rounds and two more vectors over the busiest port than the power of two below."""
    for holders in (3, 5, 6, 7, 9, 13, 15):
        core = 1 << (holders.bit_length() - 1)
        with_fold = count(all_reduce(Algorithm(kind="halving_doubling", holders=holders)))
        without = count(all_reduce(Algorithm(kind="halving_doubling", holders=core)))
        assert with_fold.rounds == without.rounds + 2
        assert with_fold.sent == pytest.approx(without.sent + 2)


@pytest.mark.parametrize("holders", range(2, 17))
def test_traffic_follows_the_number_of_reductions(holders: int) -> None:
    """D = (N - 1 + 2k) S/N for k reductions of a block, and no plan beats the bound that its fan-in sets."""
    for algorithm in algorithms(holders):
        if algorithm.kind == "parameter_server":
            found = counts_of(algorithm)
            reductions = sum(math.prod(algorithm.factors[index + 1 :]) for index in range(len(algorithm.factors)))
            assert found.touched == pytest.approx((holders - 1 + 2 * reductions) / holders)
            assert found.touched >= least_touched(holders, found.fan_in) - 1e-12


def test_the_two_optimalities_conflict_beyond_the_fan_in() -> None:
    for holders in range(3, 17):
        for fan_in in range(2, 17):
            assert (least_touched(holders, fan_in) > (holders + 1) / holders + 1e-12) == (holders > fan_in)


TREES: list[Tree] = [
    1, 5, (4, 4, 4, 4), (2, 3), (5, 3), (1, 1, 1), (3, 1), (4, 3, 2, 1), ((2, 2), (2, 2)), ((2, 3), (4,)),
    ((1, 2), (3, 1), (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("kind", ["ring", "parameter_server"])
def test_every_holder_of_a_tree_ends_with_the_sum(tree: Tree, kind: str) -> None:
    plan = tree_all_reduce(tree, lambda level, members: Algorithm(kind=kind, holders=members))  # type: ignore[arg-type]
    assert plan.holders == num_holders(tree)
    assert_sums(plan, plan.blocks)
    assert_sums(plan, 37)


def test_a_tree_may_use_another_algorithm_at_each_vertex() -> None:
    def pick(level: int, members: int) -> Algorithm:
        if members == 4:
            return server(2, 2) if level else Algorithm(kind="halving_doubling", holders=4)
        return Algorithm(kind="ring", holders=members)

    plan = tree_all_reduce((4, 3, 4, 2), pick)
    assert_sums(plan, plan.blocks)
    assert sorted(set(plan.owners)) == list(range(13))


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidField, match=r"factors = \[3, 2\]: must multiply to holders \(8\)"):
        Algorithm(kind="parameter_server", holders=8, factors=(3, 2))
    with pytest.raises(InvalidField, match="belongs to parameter_server, not to ring"):
        Algorithm(kind="ring", holders=8, factors=(8,))
    with pytest.raises(InvalidField, match="holders = 0"):
        Algorithm(kind="ring", holders=0)
    with pytest.raises(InvalidField, match="tree = 0"):
        depth((3, 0))
    with pytest.raises(InvalidField, match="same depth"):
        depth((3, (2, 2)))
    with pytest.raises(InvalidField, match="vectors = 1: must be one for each of 2 holders"):
        execute(all_reduce(server(2)), vectors(1, 4))
