"""No bound on pipelines of one replica per stage lies beyond what any of them really does: held to plans as they come,
on links as the cluster file says and as if measured, and with state on hosts."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from random_clusters import Instance
from real_lines import Real, draw, measured, reals, search_of

from shoal_planner.cluster import parse_cluster
from shoal_planner.crew_bounds import line_bounds
from shoal_planner.crew_search import CrewSearch
from shoal_planner.crews import lines
from shoal_planner.hiding import hop_s
from shoal_planner.job import parse_job
from shoal_planner.options import Floats, Ints
from shoal_planner.profile import LinkFigure, Profile
from shoal_planner.rows import AfterStage

SEEDS = range(24)
LINKS = pytest.mark.parametrize("links", ["told", "measured", "hosted", "ahead"])
_ROUNDING = 1 + 1e-12


def searching(seed: int, links: str) -> CrewSearch:
    instance = draw(seed)
    if links == "ahead":  # what passes between stages is received ahead of its use
        train = dataclasses.replace(instance.job.train, overlap="auto")
        instance = dataclasses.replace(instance, job=dataclasses.replace(instance.job, train=train))
    profile = measured(instance, seed) if links in ("measured", "ahead") else Profile()
    return search_of(instance, profile, away=0.5 if links == "hosted" else 0.0)


def reached(real: Real) -> list[tuple[int, float]]:
    """Samples, and the seconds of the quickest step with so many."""
    best_s = real.seconds.min(axis=0)
    return [(samples, float(best_s[samples])) for samples in range(1, len(best_s)) if np.isfinite(best_s[samples])]


@LINKS
def test_no_crew_runs_more_samples_than_its_bound(links: str) -> None:
    checked = 0
    for seed in SEEDS:
        search = searching(seed, links)
        for real in reals(search, seed):
            for samples, step_s in reached(real):
                most, by_ends = search.bounds.most(real.count, step_s, search.times.batch)
                assert most[real.number] >= samples, (seed, real.shape)
                assert most[real.number] == max(ends.most for ends in by_ends[real.number])
                here = [end.most for end in by_ends[real.number] if (end.first, end.last) == _ends(real)]
                assert here and here[0] >= samples, (seed, real.shape)
                checked += 1
    assert checked > 1000


def _ends(real: Real) -> tuple[object, object]:
    return real.line.stages[0][0], real.line.stages[-1][0]


@LINKS
def test_no_order_that_is_quick_enough_is_dropped(links: str) -> None:
    for seed in SEEDS:
        search = searching(seed, links)
        for real in reals(search, seed):
            crew = search.crews[real.number]
            every = lines(crew, set(crew.ends()), 10_000)
            for samples, step_s in reached(real)[::3]:
                within_s = step_s - search.bounds.vote_s[real.number]
                kept = line_bounds(search._figures, every, real.count, within_s, samples)
                assert real.line in [bound.chain for bound in kept], (seed, real.shape)


@LINKS
def test_exchange_and_update_take_no_less_than_their_bounds(links: str) -> None:
    """That of a unit whoever the others are, that of a pipeline of a shape whatever layers the others hold, the second
    being no less than the first."""
    for seed in SEEDS:
        search = searching(seed, links)
        for real in reals(search, seed):
            whoever_s = least_after_s(search._figures.after_stage(real.line, real.count), real.layers)
            told = search.exchanges.lone_after(real.shape)[real.place]
            told_s = least_after_s(told, real.layers)
            vote_s = search.exchanges.vote_s(real.shape)
            assert search.bounds.vote_s[real.number] <= vote_s
            assert (told_s + vote_s <= real.after_s * _ROUNDING).all(), (seed, real.shape)
            assert (whoever_s <= told_s * _ROUNDING).all(), (seed, real.shape)
            if real.count == 1 and links == "told" and np.isfinite(real.after_s).all():
                # Nobody else whose layers matter, and interfaces that no link is faster than.
                assert told_s + vote_s == pytest.approx(real.after_s, rel=1e-12), (seed, real.shape)


def test_hosts_that_lack_room_lack_it_whatever_the_layers() -> None:
    lack = 0
    for seed, gib in itertools.product(SEEDS, (2e-4, 2e-3, 2e-2)):
        instance = draw(seed)
        first, *others = instance.cluster.nodes
        tight = dataclasses.replace(first, host_memory_bytes=int(gib * 2**30))
        cluster = dataclasses.replace(instance.cluster, nodes=(tight, *others))
        search = search_of(dataclasses.replace(instance, cluster=cluster), Profile())
        for real in reals(search, seed):
            if search.exchanges.hosts_lack(real.shape):
                assert np.isinf(real.after_s).all(), (seed, real.shape)
                lack += 1
    assert lack > 20


def least_after_s(after: AfterStage, layers: Ints) -> Floats:
    """[K]: the longest exchange and the longest update among the stages."""
    busy_s = layers[:, :, None] * after.per_block + after.at_ends
    found: Floats = busy_s.max(axis=1).sum(axis=1)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_seconds_of_units_are_those_of_the_costs(seed: int) -> None:
    search = searching(seed, "told")
    figures, times = search._figures, search.times
    for (unit, number), (end, (first, last)) in itertools.product(
        figures.number.items(), enumerate(itertools.product((False, True), repeat=2))
    ):
        node = times.node_of(unit[0])
        assert node is not None
        for samples, layers in ((1, 0), (times.batch, 1), (1, times.num_layers)):
            exact = times.costs.stage(node, unit[1], samples, {"none": layers}, embedding=first, head=last)
            found_s = figures.end_s[number, end, samples - 1] + layers * figures.block_s[number, samples - 1]
            assert found_s == pytest.approx(exact.total_s, rel=1e-12, abs=1e-15)


@LINKS
def test_sending_on_takes_what_its_link_does(links: str) -> None:
    for seed in SEEDS:
        search = searching(seed, links)
        for real in reals(search, seed):
            names, units = search.times.names(real.line), types_of(search, real)
            for s, ((here,), (there,)) in enumerate(itertools.pairwise(real.line.stages)):
                same = np.array(here.slot == there.slot)
                found = search._figures.hops(units[s], units[s + 1], same)
                ends = names[here.slot], names[there.slot]
                for samples in (1, search.times.batch):
                    whole_s = 2 * search.costs.send_s(*ends, samples)
                    exposed_s = found.exposed_s[samples - 1]
                    assert exposed_s + found.hidden_s[samples - 1] == pytest.approx(whole_s, rel=1e-12)
                    assert exposed_s == pytest.approx(hop_s(search.costs, *ends, samples)[0], rel=1e-12)
                    assert links == "ahead" or exposed_s == pytest.approx(whole_s, rel=1e-12)


def types_of(search: CrewSearch, real: Real) -> Ints:
    return np.array([search._figures.number[real.line.slots[cell.slot].kind, cell.tp] for (cell,) in real.line.stages])


@pytest.mark.parametrize("links", ["told", "ahead"])
def test_tables_of_stages_make_up_the_seconds_of_their_pipeline(links: str) -> None:
    """Exactly, but for what a stage that takes too little time cannot hide; also where memory binds, if as many as can
    hold the same blocks and ends. Where hosts are tight, tables leave out what they have no room for as well."""
    finite = binding = tight = 0
    for seed in SEEDS:
        search = searching(seed, links)
        for real in reals(search, seed):
            table = search.times.row_table(real.line, search._figures.held(real.count), real.layers)
            assert (table <= real.running_s * _ROUNDING).all(), (seed, real.shape)
            own_s, exact_s = joined_s(search, real), table[:, 1:]
            hosts_are_tight = math.isfinite(search._left)
            no_more = (own_s <= exact_s * _ROUNDING) | (hosts_are_tight & np.isinf(own_s))
            assert no_more.all(), (seed, real.shape)
            assert links == "ahead" or (own_s * _ROUNDING >= exact_s).all(), (seed, real.shape)
            tight += hosts_are_tight
            finite += int(np.isfinite(exact_s).sum())
            binding += int(np.isinf(exact_s).sum())
    assert min(finite, binding) > 300
    assert tight


def test_most_layers_are_those_with_seconds() -> None:
    for seed in SEEDS:
        search = searching(seed, "told")
        figures, batch = search._figures, search.times.batch
        for real in reals(search, seed):
            types, stages = types_of(search, real)[None], len(real.line.stages)
            flights = np.arange(stages, 0, -1)[:, None].repeat(batch, axis=1)
            of = (types, real.count, flights, np.arange(1, batch + 1))
            caps, tables = figures.most_layers(*of), figures.tables(*of)
            fits = np.isfinite(tables)  # [1, S, L+1, B]
            assert (fits == (np.arange(fits.shape[2])[:, None] <= caps[:, :, None])).all()


def joined_s(search: CrewSearch, real: Real) -> Floats:
    """[K, B]: of each number of samples in micro-batches of every size that divides it, by tables and hops."""
    figures, batch, stages = search._figures, search.times.batch, len(real.line.stages)
    types, slots = types_of(search, real)[None], np.array([cell.slot for (cell,) in real.line.stages])
    hops = figures.hops(types[:, :-1], types[:, 1:], slots[None, :-1] == slots[None, 1:])
    exposed_s, hidden_s = hops.exposed_s[0], hops.hidden_s[0].sum(axis=0)
    network_s = max(search.times.network_s(real.line))
    found = np.full((len(real.layers), batch), np.inf)
    for samples, size in itertools.product(range(1, batch + 1), repeat=2):
        if samples % size == 0:
            number = samples // size
            flights = np.minimum(np.arange(stages, 0, -1), number)[:, None]
            tables = figures.tables(types, real.count, flights, np.array([size]))[0]
            tables[:-1] += exposed_s[:, None, size - 1, None]
            own_s = tables[np.arange(stages), real.layers, 0]
            whole_s = (
                own_s.sum(axis=1) + hidden_s[size - 1] + own_s.max(axis=1) * (number - 1 or 1e-30)
            )  # 0 x inf is no number
            found[:, samples - 1] = np.minimum(found[:, samples - 1], np.maximum(whole_s, network_s * samples))
    return found


# --- links that were measured ----------------------------------------------------------------------------------------


def two_nodes(within: tuple[float, float], between: tuple[float, float]) -> CrewSearch:
    """Of two devices, and of one; seconds and bytes per second of links within nodes and between them."""
    nodes = [{"name": f"n{size}", "device": "T4", "devices": size, "host_memory_gib": 4096} for size in (1, 2)]
    model = {"layers": 4, "hidden": 64, "heads": 1, "ffn": 128, "vocab": 256}
    train = {"global_batch": 4, "seq_len": 32, "steps": 10, "precision": "fp32"}
    job = parse_job({"name": "two", "model": model, "data": {"uri": "stdlib:"}, "train": train})
    cluster = parse_cluster({"nodes": nodes})
    figures = tuple(
        LinkFigure(from_node=here.id, to_node=there.id, latency_s=latency_s, bytes_per_s=rate, source="told")
        for here, there in itertools.combinations_with_replacement(cluster.nodes, 2)
        for latency_s, rate in [within if here is there else between]
    )
    return search_of(Instance(kind="two", seed=0, job=job, cluster=cluster), Profile(links=figures))


def test_a_vote_between_nodes_may_be_quicker_than_one_within() -> None:
    search = two_nodes(within=(1e-3, 1e9), between=(1e-6, 1e9))
    assert {len(crew.slots) for crew in search.crews} == {1, 2}
    assert (search.bounds.vote_s == 2e-6).all()


def test_interfaces_slow_down_what_crosses_them_alone() -> None:
    """One pipeline on a device of the larger node, beside one that has a stage there and one on the other node: the
    first exchanges half of its blocks within its node, however long interfaces would take for all of them."""
    search = two_nodes(within=(0.0, 1e5), between=(0.0, 1e18))
    some = [real for seed in range(4) for real in reals(search, seed) if real.count == 2]
    assert any(len(real.shape[0].nodes) != len(real.shape[1].nodes) for real in some)
    for real in some:
        told_s = least_after_s(search.exchanges.lone_after(real.shape)[real.place], real.layers)
        whoever_s = least_after_s(search._figures.after_stage(real.line, 2), real.layers)
        assert (np.maximum(told_s, whoever_s) <= real.after_s * _ROUNDING).all()
