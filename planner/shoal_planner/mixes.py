"""How many layers of a stage take which choice: the least seconds within a stage's memory, exactly.

The layers are equal, and what one does costs the next nothing: so counts are all that matters. PAPERS 5.2 with R = 0;
layers that differ are for `recurrence`. Does not own what a choice costs (`choices`).

Array shapes: N stages, C choices, F points of a front.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal_planner.choices import Floats, Options

Ints = NDArray[np.int64]
# Seconds that differ by less than this share are equal: sums of the same figures in another order.
SAME_SHARE = 1e-12
# With so few choices every count can be tried, for all stages at once.
FEW = 3
# Parts of the gap between its bounds in which a mix is looked for, the smallest first: most are close to the floor.
GAP_SHARES = (1 / 64, 1 / 8, 1.0)
# The widest front that is grown on in full: the widest of 1,500 stages with random figures had 1,083 points. With
# dozens of unrelated choices only the points closest to the floor go on, and the answer may miss the best by a hair.
MOST_POINTS = 1536


def cheapest(options: Options, layers: ArrayLike, caps: ArrayLike) -> tuple[Floats, Ints]:
    """By stage: the fewest seconds of a step with which its layers' bytes, and the largest peak among them, are within
    its cap, and how many layers take each choice. Infinite seconds and no counts where nothing is."""
    layers_N, caps_N = (array.astype(float) for array in np.broadcast_arrays(layers, caps))
    shape = (len(layers_N), len(options.choices))
    seconds_NC, bytes_NC, peaks_NC = (
        np.broadcast_to(figures, shape) for figures in (options.seconds, options.bytes, options.peak_bytes)
    )
    need_NC = np.where(np.isfinite(seconds_NC), layers_N[:, None] * bytes_NC + peaks_NC, np.inf)
    fits_NC = need_NC <= caps_N[:, None]
    best_N = seconds_NC.argmin(axis=1)
    every = np.arange(len(layers_N))
    found_N = np.where(fits_NC.any(axis=1), layers_N * seconds_NC[every, best_N], np.inf)
    counts_NC = np.zeros(shape, dtype=np.int64)
    counts_NC[every, best_N] = np.where(np.isfinite(found_N), layers_N, 0)
    # A stage of no layers needs nothing, not even a peak.
    found_N = np.where(layers_N == 0, 0.0, found_N)
    short = np.flatnonzero(fits_NC.any(axis=1) & ~fits_NC[every, best_N] & (layers_N > 0))
    if shape[1] <= FEW:
        found_N[short], counts_NC[short] = _few(
            seconds_NC[short], bytes_NC[short], peaks_NC[short], layers_N[short], caps_N[short]
        )
        return found_N, counts_NC
    for row in short:
        figures = (tuple(array[row].tolist()) for array in (seconds_NC, bytes_NC, peaks_NC))
        found_N[row], counts_NC[row] = _solve(*figures, int(layers_N[row]), float(caps_N[row]))
    return found_N, counts_NC


def _few(
    seconds_NC: Floats, bytes_NC: Floats, peaks_NC: Floats, layers_N: Floats, caps_N: Floats
) -> tuple[Floats, Ints]:
    """At most three choices, all stages at once. The peak of a mix is that of one choice in it: each is the bound."""
    rows, width = seconds_NC.shape
    best_N, counts_NC = np.full(rows, np.inf), np.zeros((rows, width), dtype=np.int64)
    for bound in range(width):
        peak_N = peaks_NC[:, bound]
        if any(np.array_equal(peak_N, peaks_NC[:, before]) for before in range(bound)):
            continue
        allowed_s = np.where(peaks_NC <= peak_N[:, None], seconds_NC, np.inf)
        found_N, mixed_NC = _three(allowed_s, bytes_NC, layers_N, caps_N - peak_N)
        better = found_N < best_N
        best_N[better], counts_NC[better] = found_N[better], mixed_NC[better]
    return best_N, counts_NC


def _three(seconds_NC: Floats, bytes_NC: Floats, layers_N: Floats, rooms_N: Floats) -> tuple[Floats, Ints]:
    """Every number of layers on the middle choice, and then as few as possible on the slowest."""
    rows, width = seconds_NC.shape
    padded_s, padded = np.full((rows, FEW), np.inf), np.zeros((rows, FEW))
    padded_s[:, :width], padded[:, :width] = seconds_NC, bytes_NC
    order_NC = np.argsort(padded_s, axis=1, kind="stable")
    fast_s, middle_s, slow_s = np.take_along_axis(padded_s, order_NC, axis=1).T[:, :, None]
    fast, middle, slow = np.take_along_axis(padded, order_NC, axis=1).T[:, :, None]
    grid = np.arange(int(layers_N.max(initial=0)) + 1)[None, :]
    over = layers_N[:, None] * fast - grid * (fast - middle) - rooms_N[:, None]
    saved = np.where(np.isfinite(slow_s), fast - slow, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slowed = np.where(over <= 0, 0.0, np.where(saved > 0, _least(over, saved), np.inf))
        left = layers_N[:, None] - grid - slowed
        total_s = left * fast_s
        total_s += np.where(grid > 0, grid * middle_s, 0.0) + np.where(slowed > 0, slowed * slow_s, 0.0)
    total_s = np.where((left >= 0) & np.isfinite(fast_s), total_s, np.inf)
    at_N, every = total_s.argmin(axis=1), np.arange(rows)
    found_N = total_s[every, at_N]
    possible = np.isfinite(found_N)
    mixed = np.stack([left[every, at_N], at_N, slowed[every, at_N]], axis=1)
    counts_NC = np.zeros((rows, FEW), dtype=np.int64)
    np.put_along_axis(counts_NC, order_NC, np.where(possible[:, None], mixed, 0).astype(np.int64), axis=1)
    return found_N, counts_NC[:, :width]


def _least(over: Floats, saved: Floats) -> Floats:
    """The fewest layers that save so many bytes together; exact though the division rounds."""
    moved = np.ceil(over / saved)
    moved += moved * saved < over
    moved -= (moved - 1) * saved >= over
    return moved


@functools.lru_cache(maxsize=1 << 16)
def _solve(
    seconds: tuple[float, ...], sizes: tuple[float, ...], peaks: tuple[float, ...], layers: int, cap: float
) -> tuple[float, Ints]:
    """One stage that some mix fits. The peak of a mix is that of one choice in it: each is tried as the bound."""
    tried = []
    for ladder in _ladders(seconds, sizes, peaks):
        room = cap - ladder.peak
        if layers * ladder.bytes[-1] <= room:
            tried.append((_bounds(ladder, layers, room), ladder, room))
    tried.sort(key=lambda entry: entry[0].floor_s)
    best_s, best = np.inf, np.zeros(len(seconds), dtype=np.int64)
    for bounds, ladder, room in tried:
        if bounds.floor_s >= best_s:
            break
        counts_C = _exact(ladder, bounds, layers, room)
        found_s = float(counts_C @ ladder.seconds)
        if found_s < best_s:
            best_s, best = found_s, np.zeros(len(seconds), dtype=np.int64)
            best[ladder.members] = counts_C
    best.flags.writeable = False  # the cache hands it out again
    return best_s, best


class _Ladder(NamedTuple):
    """Choices with at most this peak of which none is better than another in seconds and bytes; the fastest first."""

    peak: float
    members: Ints
    seconds: Floats
    bytes: Floats


@functools.lru_cache(maxsize=4096)
def _ladders(seconds: tuple[float, ...], sizes: tuple[float, ...], peaks: tuple[float, ...]) -> tuple[_Ladder, ...]:
    found: list[_Ladder] = []
    order = sorted(range(len(seconds)), key=lambda c: (seconds[c], sizes[c], peaks[c], c))
    for peak in sorted(set(peaks)):
        kept: list[int] = []
        for c in order:
            if peaks[c] <= peak and np.isfinite(seconds[c]) and (not kept or sizes[c] < sizes[kept[-1]]):
                kept.append(c)
        if kept and max(peaks[c] for c in kept) == peak:  # else a smaller bound allows the same
            members = np.array(kept)
            found.append(_Ladder(peak, members, np.array(seconds)[members], np.array(sizes)[members]))
    return tuple(found)


class _Bounds(NamedTuple):
    """Seconds that no mix can beat, what a byte is worth there, and the best mix of two choices."""

    floor_s: float
    seconds_per_byte: float
    mix_s: float
    counts: Ints


def _bounds(ladder: _Ladder, layers: int, room: float) -> _Bounds:
    """With fractions of layers, two choices are enough: one that is too large for all layers, one that is not."""
    excess = layers * ladder.bytes - room
    large = int(np.argmax(excess <= 0))
    counts_C = np.zeros(len(excess), dtype=np.int64)
    if large == 0:
        counts_C[0] = layers
        every_s = layers * float(ladder.seconds[0])
        return _Bounds(every_s, 0.0, every_s, counts_C)
    start_s, over = layers * ladder.seconds[:large, None], excess[:large, None]
    saved = ladder.bytes[:large, None] - ladder.bytes[None, large:]
    added_s = ladder.seconds[None, large:] - ladder.seconds[:large, None]
    floors_s = start_s + over / saved * added_s
    tight = np.unravel_index(int(floors_s.argmin()), floors_s.shape)
    moved = _least(over, saved)
    mixes_s = start_s + moved * added_s
    i, j = np.unravel_index(int(mixes_s.argmin()), mixes_s.shape)
    counts_C[large + j] = moved[i, j]
    counts_C[i] = layers - int(moved[i, j])
    return _Bounds(float(floors_s[tight]), float(added_s[tight] / saved[tight]), float(mixes_s[i, j]), counts_C)


class _Front(NamedTuple):
    """Mixes of as many layers of which none is better than another, by rising bytes and falling seconds."""

    bytes: Floats  # beyond the smallest choice
    seconds: Floats  # beyond the fastest choice
    above_s: Floats  # beyond the best price of seconds and bytes together
    counts: Ints


class _Limits(NamedTuple):
    """What a whole mix may have of each; a part of it then has no more."""

    bytes: float
    seconds: float
    above_s: float


def _exact(ladder: _Ladder, bounds: _Bounds, layers: int, room: float) -> Ints:
    """The best counts. Priced at what a byte is worth, every layer of a mix costs as much as the best choice or a
    little more; what a mix exceeds the floor by bounds the sum of that. So few mixes need a look."""
    fastest_s, smallest = float(ladder.seconds[0]), float(ladder.bytes[-1])
    priced_C = ladder.seconds + bounds.seconds_per_byte * ladder.bytes
    rounding_s = SAME_SHARE * layers * float(priced_C.max())
    counts = np.eye(len(priced_C), dtype=np.int64)
    unit = _Front(ladder.bytes - smallest, ladder.seconds - fastest_s, priced_C - priced_C.min(), counts)
    best_s, best_C = bounds.mix_s, bounds.counts
    for share in GAP_SHARES:
        if best_s - bounds.floor_s <= rounding_s:
            break
        within_s = (bounds.mix_s - bounds.floor_s) * share
        limits = _Limits(room - layers * smallest, best_s - layers * fastest_s, within_s + rounding_s)
        found_s, found_C = _search(unit, limits, layers)
        found_s += layers * fastest_s
        if found_s < best_s * (1 - SAME_SHARE):
            best_s, best_C = found_s, found_C
        if best_s <= bounds.floor_s + within_s:
            break  # whatever is better was within the limits too
    return best_C


def _search(unit: _Front, limits: _Limits, layers: int) -> tuple[float, Ints]:
    """The best of all mixes within the limits; infinite seconds if there is none."""
    near = np.flatnonzero(unit.above_s <= limits.above_s)[::-1]
    if len(near) <= 2:
        return np.inf, unit.counts[0]  # no better than the best mix of two, which is known
    least = _Front(unit.bytes[near], unit.seconds[near], unit.above_s[near], unit.counts[near])
    grown = _Growth(least, limits)
    # Neither is empty: a part of the mix with fractions, cut down to whole layers, is within all limits.
    here, there = grown.front(layers // 2), grown.front(layers - layers // 2)
    # Of the other half, the fastest mix that still fits.
    at = np.searchsorted(there.bytes, limits.bytes - here.bytes, side="right") - 1
    total_s = np.where(at >= 0, here.seconds + there.seconds[at], np.inf)
    best = int(total_s.argmin())
    return float(total_s[best]), here.counts[best] + there.counts[at[best]]


class _Growth:
    """Fronts of any number of layers, each made of two of about half as many."""

    def __init__(self, unit: _Front, limits: _Limits) -> None:
        none = _Front(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros((1, unit.counts.shape[1]), dtype=np.int64))
        self._fronts = {0: none, 1: unit}
        self._limits = limits

    def front(self, layers: int) -> _Front:
        if layers not in self._fronts:
            self._fronts[layers] = self._join(self.front(layers // 2), self.front(layers - layers // 2))
        return self._fronts[layers]

    def _join(self, here: _Front, there: _Front) -> _Front:
        sums = [one[:, None] + other[None, :] for one, other in zip(here[:3], there[:3], strict=True)]  # by pair
        i, j = np.nonzero(
            (sums[0] <= self._limits.bytes) & (sums[1] <= self._limits.seconds) & (sums[2] <= self._limits.above_s)
        )
        sizes, seconds, above_s = (column[i, j] for column in sums)
        order = np.lexsort((seconds, sizes))
        fastest_s = np.minimum.accumulate(seconds[order])
        better = np.ones(len(order), dtype=bool)
        better[1:] = seconds[order][1:] < fastest_s[:-1] * (1 - SAME_SHARE)
        order = order[better]
        if len(order) > MOST_POINTS:
            order = order[np.sort(np.argsort(above_s[order], kind="stable")[:MOST_POINTS])]
        counts = here.counts[i[order]] + there.counts[j[order]]
        return _Front(sizes[order], seconds[order], above_s[order], counts)
