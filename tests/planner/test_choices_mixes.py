"""How many equal layers take which choice: equal to brute force, within memory, and the cases of OSDP and AutoHete."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from shoal_planner import mixes
from shoal_planner.choices import Choice, Floats, LayerFigures, Options, options
from shoal_planner.mixes import FEW, cheapest

MB = 1e6
GB = 1e9


def table(seconds: Floats, num_bytes: Floats, peaks: Floats | None = None) -> Options:
    count = np.shape(seconds)[-1]
    return Options(
        choices=(Choice(),) * count,  # they only stand for what they cost
        seconds=np.asarray(seconds, float),
        micro_batch_s=np.zeros(np.shape(seconds)),
        bytes=np.asarray(num_bytes, float),
        peak_bytes=np.zeros(count) if peaks is None else np.asarray(peaks, float),
    )


def brute(found: Options, layers: int, cap: float) -> float:
    """Every multiset of choices."""
    taken = np.array(list(itertools.combinations_with_replacement(range(len(found.choices)), layers)))
    used = found.bytes[taken].sum(axis=1) + found.peak_bytes[taken].max(axis=1)
    seconds = found.seconds[taken].sum(axis=1)
    return float(seconds[used <= cap].min(initial=math.inf))


def respects(found: Options, counts: Floats, cap: float) -> bool:
    taken = counts > 0
    return bool(counts[taken] @ found.bytes[taken] + found.peak_bytes[taken].max(initial=0) <= cap)


@pytest.mark.parametrize("num_choices", [1, 2, FEW, FEW + 1, 5, 7])
def test_equal_to_brute_force(num_choices: int) -> None:
    rng = np.random.default_rng(num_choices)
    for _ in range(120):
        layers, scale = int(rng.integers(1, 7)), int(rng.choice([4, 30, 1000]))
        seconds = rng.integers(0, scale, num_choices) + rng.choice([0.0, 1.0]) * rng.random(num_choices)
        peaks = rng.integers(0, rng.choice([1, scale]), num_choices)
        if rng.random() < 0.2:
            seconds[rng.integers(num_choices)] = math.inf
        found = table(seconds, rng.integers(1, scale, num_choices), peaks)
        cap = float(rng.integers(0, scale * layers + 2))
        least_s, counts = cheapest(found, [layers], [cap])
        assert least_s[0] == pytest.approx(brute(found, layers, cap), rel=1e-12)
        assert counts[0].sum() == (layers if math.isfinite(least_s[0]) else 0)
        assert respects(found, counts[0], cap)


def test_equal_to_brute_force_in_long_stages() -> None:
    """Where many choices lie close to the best line, the whole mix matters, not its last layer alone."""
    rng = np.random.default_rng(3)
    for _ in range(25):
        sizes = np.sort(rng.choice(400, 5, replace=False))[::-1] + 1.0
        found = table(np.sort(rng.random(5)), sizes)
        layers = int(rng.integers(10, 17))
        cap = float(rng.integers(layers * sizes[-1], layers * sizes[0]))
        least_s, counts = cheapest(found, [layers], [cap])
        assert least_s[0] == pytest.approx(brute(found, layers, cap), rel=1e-12)
        assert respects(found, counts[0], cap)


@pytest.mark.parametrize("num_choices", [FEW, 6])
def test_stages_at_once_are_as_stages_alone(num_choices: int) -> None:
    rng = np.random.default_rng(11)
    rows = 60
    found = dataclasses.replace(
        table(rng.random((rows, num_choices)), rng.integers(1, 100, (rows, num_choices))),
        peak_bytes=rng.integers(0, 50, (rows, num_choices)).astype(float),
    )
    layers, caps = rng.integers(0, 20, rows), rng.integers(0, 1200, rows).astype(float)
    least_s, counts = cheapest(found, layers, caps)
    for row in range(rows):
        alone = table(found.seconds[row], found.bytes[row], found.peak_bytes[row])
        expected_s, expected = cheapest(alone, [layers[row]], [caps[row]])
        assert least_s[row] == expected_s[0]
        assert counts[row].tolist() == expected[0].tolist()
    assert np.isinf(least_s).any()
    assert np.isfinite(least_s).any()


@pytest.mark.parametrize("num_choices", [2, 3, 6])
def test_more_memory_is_never_slower(num_choices: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(8):
        found = table(rng.random(num_choices), rng.integers(1, 10**9, num_choices), rng.integers(0, 10**9, num_choices))
        caps = np.linspace(0, 30 * float(found.bytes.max()), 60)
        least_s, counts = cheapest(found, np.full(60, 24), caps)
        finite = np.isfinite(least_s)
        assert (np.diff(finite.astype(int)) >= 0).all()
        assert (np.diff(least_s[finite]) <= 1e-9).all()
        assert all(respects(found, row, cap) for row, cap in zip(counts, caps, strict=True))


def test_a_stage_without_layers_takes_nothing() -> None:
    least_s, counts = cheapest(table(np.array([0.0, 1.0]), np.array([9, 1]), np.array([5, 5])), [0, 0], [0.0, 100.0])
    assert least_s.tolist() == [0, 0]
    assert not counts.any()


def test_thinned_fronts_lose_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dozens of unrelated choices fronts grow without end, so they are thinned."""
    rng = np.random.default_rng(8)
    for _ in range(4):
        sizes = np.sort(rng.integers(1, 10**9, 30))[::-1].astype(float)
        found, cap = table(np.sort(rng.random(30)), sizes), 60 * float(sizes.mean())
        mixes._solve.cache_clear()
        best_s, _ = cheapest(found, [60], [cap])
        monkeypatch.setattr(mixes, "MOST_POINTS", 1024)
        mixes._solve.cache_clear()
        thinned_s, counts = cheapest(found, [60], [cap])
        monkeypatch.undo()
        assert respects(found, counts[0], cap)
        assert best_s[0] <= thinned_s[0] <= best_s[0] * 1.001
    mixes._solve.cache_clear()


# --- OSDP's measured trade-off: hidden 8192, four levels of sharding (PAPERS 5.5) ------------------------------------

OSDP = table(np.array([1.246, 1.656, 2.009, 2.439]), np.array([10753, 7680, 3584, 1539]) * MB)


def test_osdp_goes_from_all_sharded_to_all_replicated_step_by_step() -> None:
    layers = 48
    caps = np.linspace(layers * 1539 * MB, layers * 10753 * MB, 400)
    least_s, counts = cheapest(OSDP, np.full(400, layers), caps)
    assert counts[0].tolist() == [0, 0, 0, 48]
    assert counts[-1].tolist() == [48, 0, 0, 0]
    assert least_s[0] == pytest.approx(layers * 2.439)
    assert least_s[-1] == pytest.approx(layers * 1.246)
    assert (np.diff(least_s) <= 1e-9).all()
    assert len(set(np.round(least_s, 9))) > 3 * layers
    for row, cap in zip(counts, caps, strict=True):
        left = cap - row @ OSDP.bytes
        # What is left is less than what the next faster level of any layer would need.
        upgrades = [OSDP.bytes[c - 1] - OSDP.bytes[c] for c in range(1, 4) if row[c]]
        assert 0 <= left < min(upgrades, default=math.inf)


def test_osdp_is_no_slower_than_any_mix_of_two_levels() -> None:
    caps = np.linspace(48 * 1539 * MB, 48 * 10753 * MB, 40)
    least_s, _ = cheapest(OSDP, np.full(40, 48), caps)
    for cap, found_s in zip(caps, least_s, strict=True):
        for i, j in itertools.combinations(range(4), 2):
            for there in range(49):
                used = (48 - there) * OSDP.bytes[i] + there * OSDP.bytes[j]
                if used <= cap:
                    assert found_s <= (48 - there) * OSDP.seconds[i] + there * OSDP.seconds[j] + 1e-9


# --- AutoHete: a stage that lacks 30 % of what it needs (PAPERS 7.6) -------------------------------------------------


@pytest.mark.parametrize("blocks", [3, 5, 8])
@pytest.mark.parametrize("micro_batches", [1.0, 8.0])
def test_autohete_makes_a_stage_fit_that_lacks_memory(blocks: int, micro_batches: float) -> None:
    """Recomputation and offload of the optimizer together, at the least time that brute force knows."""
    figures = LayerFigures(
        micro_batches=micro_batches,
        in_flight=4.0,
        kept_bytes=0.55 * GB,
        selective_bytes=0.34 * GB,
        full_bytes=0.02 * GB,
        again_bytes=0.55 * GB,
        selective_s=0.004,
        full_s=0.021,
        weight_bytes=0.4 * GB,
        gradient_bytes=0.8 * GB,
        optimizer_bytes=1.2 * GB,
        host_s=0.11,
    )
    found = options(figures)
    need = blocks * float(found.bytes[found.choices.index(Choice())])
    cap = 0.7 * need
    least_s, counts = cheapest(found, [blocks], [cap])
    assert 0 < least_s[0] < math.inf
    assert respects(found, counts[0], cap)
    assert least_s[0] == pytest.approx(brute(found, blocks, cap), rel=1e-12)
