"""Layers of a pipeline within some time: those that all there are leave when each is looked at, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from real_lines import Real, draw, lone, measured, reals, search_of

from shoal_planner.crew_bounds import line_bounds
from shoal_planner.crew_search import CrewSearch
from shoal_planner.options import Floats, Ints
from shoal_planner.profile import Profile
from shoal_planner.rows import AfterStage, Rows, rows_within

SEEDS = range(20)
LINKS = pytest.mark.parametrize("links", ["told", "measured", "hosted"])


def searching(seed: int, links: str) -> CrewSearch:
    instance = draw(seed)
    profile = measured(instance, seed) if links == "measured" else Profile()
    return search_of(instance, profile, away=0.5 if links == "hosted" else 0.0)


def listed(search: CrewSearch, real: Real, within_s: float, least: int) -> Rows | None:
    """As the search lists them; none if it has dropped the whole pipeline."""
    figures = search._figures
    bounds = line_bounds(figures, lone(real.line), real.count, within_s, least)
    if not bounds:
        return None
    after = figures.after_stage(real.line, real.count)
    held = figures.held(real.count)
    return rows_within(search.times, real.line, bounds[0].stages, held, after, within_s, least)


@LINKS
def test_no_layers_that_are_quick_enough_are_dropped(links: str) -> None:
    """Those that as many samples or more take so long with in a plan, or less."""
    checked = 0
    for seed in SEEDS:
        search = searching(seed, links)
        for real in reals(search, seed):
            vote_s = search.bounds.vote_s[real.number]
            for least in range(1, search.times.batch + 1, 3):
                step_s = real.seconds[:, least:].min(axis=1)
                for within_s in np.unique(step_s[np.isfinite(step_s)])[::3]:
                    found = listed(search, real, within_s - vote_s, least)
                    assert found is not None, (seed, real.shape)
                    left = {tuple(row) for row in found.layers.tolist()}
                    assert {tuple(row) for row in real.layers[step_s <= within_s].tolist()} <= left, (seed, real.shape)
                    checked += 1
    assert checked > 1000


@LINKS
def test_the_layers_are_those_of_all_there_are(links: str) -> None:
    """Each judged by its exact seconds, and the least that comes after. Not where hosts are tight: what these have no
    room for is left out before."""
    some = none = 0
    for seed in SEEDS:
        search = searching(seed, links)
        for real in reals(search, seed) if search.exchanges._ample_hosts else ():
            every = search.times.rows(len(real.line.stages))
            table = search.times.row_table(real.line, search._figures.held(real.count), every)
            after = search._figures.after_stage(real.line, real.count)
            least = 1 + seed % search.times.batch
            whole_s = table[:, least:].min(axis=1) + longest_s(after, every)
            for share in (0.5, 1.0, 1.2, 1.5):
                within_s = share * whole_s.min() if np.isfinite(whole_s).any() else 1.0
                kept, found = every[whole_s <= within_s * (1 + 1e-9)], listed(search, real, within_s, least)
                some += len(kept) > 1
                none += len(kept) == 0
                if found is None:
                    assert not len(kept), (seed, real.shape)
                    continue
                assert found.layers.tolist() == kept.tolist(), (seed, real.shape)
                again = search.times.row_table(real.line, search._figures.held(real.count), found.layers)
                assert (found.seconds == again).all()
                assert found.after_s == pytest.approx(longest_s(after, found.layers), rel=1e-12)
    assert min(some, none) > 50


def longest_s(after: AfterStage, layers: Ints) -> Floats:
    """[K]: the longest exchange and the longest update, stage by stage."""
    each = [
        [[n * after.per_block[s, part] + after.at_ends[s, part] for s, n in enumerate(row)] for part in (0, 1)]
        for row in layers.tolist()
    ]
    return np.array([sum(max(some) for some in parts) for parts in each])


# --- of rows that are there ------------------------------------------------------------------------------------------


def drawn(seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    num_rows, stages, batch = rng.integers(1, 7), rng.integers(1, 4), rng.integers(1, 6)
    seconds = rng.uniform(0, 10, (num_rows, batch + 1))
    seconds[rng.random(seconds.shape) < 0.3] = np.inf
    return Rows(
        layers=rng.integers(0, 5, (num_rows, stages)), seconds=seconds, after_s=rng.uniform(0, 3, int(num_rows))
    )


@pytest.mark.parametrize("seed", range(20))
def test_samples_in_time_are_counted_row_by_row(seed: int) -> None:
    rows = drawn(seed)
    within_s, batch = 6.0, rows.seconds.shape[1] - 1
    in_time = [
        [k for k, own_s in enumerate(row + after_s) if own_s <= within_s]
        for row, after_s in zip(rows.seconds, rows.after_s, strict=True)
    ]
    assert rows.samples(within_s).tolist() == sorted({k for some in in_time for k in some})
    assert rows.most(within_s) == max((k for some in in_time for k in some), default=0)
    for least in range(1, batch + 1):
        kept = [number for number, some in enumerate(in_time) if any(k >= least for k in some)]
        assert (rows.within(within_s, least).layers == rows.layers[kept]).all()
        assert len(rows.within(within_s, least).seconds) == len(kept)


@pytest.mark.parametrize("seed", range(20))
def test_later_figures_of_what_comes_after_replace_earlier_ones(seed: int) -> None:
    rows, rng = drawn(seed), np.random.default_rng(seed)
    stages = rows.layers.shape[1]
    after = AfterStage(per_block=rng.random((stages, 2)), at_ends=rng.random((stages, 2)))
    assert rows.later(after).after_s == pytest.approx(longest_s(after, rows.layers), rel=1e-12)
    assert rows.later(after).seconds is rows.seconds
