"""Devices for templates: every unit within a node, no device twice, and slices of the same nodes."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from planner_ground import make_cluster, make_job

from shoal_planner.assembly import assemble, bundle
from shoal_planner.costs import CostModel
from shoal_planner.finish import Word
from shoal_planner.options import Kind, Option, group_kinds, options_of
from shoal_planner.profile import Profile

CLUSTER = make_cluster(("a", "A100-40G", 3, 4), ("t", "T4", 2, 2), memory_mib={})


def ground() -> tuple[tuple[Kind, ...], tuple[Option, ...]]:
    costs = CostModel(make_job(heads=8), CLUSTER, Profile())
    kinds = group_kinds(CLUSTER.nodes, costs)
    return kinds, options_of(kinds, costs)


KINDS, OPTIONS = ground()
SEQUENCES = st.lists(st.lists(st.integers(0, len(OPTIONS) - 1), min_size=1, max_size=5).map(tuple), max_size=6)


def devices(words: tuple[Word, ...]) -> list[tuple[str, int]]:
    return [(unit.node, device) for word in words for unit in word for device in unit.devices]


@settings(deadline=None, max_examples=300)
@given(SEQUENCES)
def test_every_unit_stands_on_its_kind_of_node_and_no_device_is_used_twice(sequences: list[tuple[int, ...]]) -> None:
    words = assemble(sequences, OPTIONS, KINDS)
    if words is None:
        return
    assert [len(word) for word in words] == [len(sequence) for sequence in sequences]
    for word, sequence in zip(words, sequences, strict=True):
        for unit, index in zip(word, sequence, strict=True):
            option = OPTIONS[index]
            assert unit.tp == option.tp
            assert unit.node in option.kind.nodes
            assert all(0 <= device < option.kind.slice for device in unit.devices)
    used = devices(words)
    assert len(used) == len(set(used))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, len(OPTIONS) - 1), min_size=1, max_size=8))
def test_what_fits_into_whole_nodes_is_placed(single: list[int]) -> None:
    """Units that fill nodes one after the other, widest first, leave no room unused."""
    widths = {number: [OPTIONS[i].tp for i in single if OPTIONS[i].kind.number == number] for number in (0, 1)}
    fits = all(_fits(sorted(widths[kind.number], reverse=True), kind) for kind in KINDS)
    words = assemble([(index,) for index in single], OPTIONS, KINDS)
    assert (words is not None) == fits


def _fits(widths: list[int], kind: Kind) -> bool:
    """Widths are powers of two: first-fit of the widest first is exact."""
    free = [kind.slice] * len(kind.nodes)
    for width in widths:
        at = next((number for number, room in enumerate(free) if room >= width), None)
        if at is None:
            return False
        free[at] -= width
    return True


def test_stages_of_one_kind_stand_on_one_node_as_far_as_they_fit() -> None:
    one = next(i for i, option in enumerate(OPTIONS) if option.tp == 1 and option.kind.slice == 4)
    words = assemble([(one,) * 4, (one,) * 3], OPTIONS, KINDS)
    assert words is not None
    assert [len({unit.node for unit in word}) for word in words] == [1, 1]


@settings(deadline=None, max_examples=100)
@given(SEQUENCES, st.integers(1, 4))
def test_bundles_share_nodes_and_no_devices(sequences: list[tuple[int, ...]], copies: int) -> None:
    words = assemble(sequences, OPTIONS, KINDS)
    if words is None:
        return
    bundles = [bundle(word, copies) for word in words]
    for word, made in zip(words, bundles, strict=True):
        assert len(made) == copies
        for copy in made:
            assert [(unit.node, unit.tp) for unit in copy] == [(unit.node, unit.tp) for unit in word]
    used = devices(tuple(itertools.chain.from_iterable(bundles)))
    assert len(used) == len(set(used))
    assert all(device < copies * max(kind.slice for kind in KINDS) for _, device in used)
