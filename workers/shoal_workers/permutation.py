"""Orders that a seed decides, computed number by number and never stored."""

from __future__ import annotations

from dataclasses import dataclass

_ROUNDS = 4
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Permutation:
    """A seeded bijection of [0, size), computed as a Feistel network over a power of four that walks on while it is
    outside. Four rounds, and at most four walks on average."""

    size: int
    seed: int

    def __call__(self, number: int) -> int:
        assert 0 <= number < self.size, number
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        place = self._shuffle(number, half_bits)
        while place >= self.size:
            place = self._shuffle(place, half_bits)
        return place

    def _shuffle(self, number: int, half_bits: int) -> int:
        mask = (1 << half_bits) - 1
        left, right = number >> half_bits, number & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mixed(self.seed * _ROUNDS + turn, right) & mask)
        return left << half_bits | right


def mixed(key: int, value: int) -> int:
    """splitmix64: cheap, and every bit of the result depends on every bit of both."""
    return _scramble((_scramble(key & _MASK) + value * 0x9E3779B97F4A7C15) & _MASK)


def _scramble(mixed: int) -> int:
    mixed = (mixed + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
