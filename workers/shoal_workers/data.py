"""The training text as numbered sequences, and the order in which training takes them.

Owns reading bytes from files and the order of samples. Sample numbers count through the whole training: step s takes
[(s - 1) * global_batch, s * global_batch). Each pass over the data is a permutation of its sequences that is computed
number by number, never stored. Neither plan, rank nor machine has a part in it. What is held out for evaluations is the
same random choice of sequences in every pass, and of as many, in every run with that seed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor

from shoal_planner.errors import InvalidField
from shoal_planner.job import DataSpec, JobSpec

# Folders of the standard library's folder that differ between machines, or that many machines lack.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests"})
_ROUNDS = 4
_MASK = (1 << 64) - 1
_SPLIT = -1  # in the place of a pass: the order of sequences of which the first are held out


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
            left, right = right, left ^ (_mix(self.seed * _ROUNDS + turn, right) & mask)
        return left << half_bits | right


def _mix(key: int, value: int) -> int:
    """splitmix64: cheap, and every bit of the result depends on every bit of both."""
    mixed = (_scramble(key & _MASK) + value * 0x9E3779B97F4A7C15) & _MASK
    return _scramble(mixed)


def _scramble(mixed: int) -> int:
    mixed = (mixed + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


class Samples:
    """Sequences of seq_len tokens and the token after them: sequence j begins at byte j * seq_len of the whole text.
    Those that are `held_out` are never read; or, with `evaluation`, they alone are, in one order for ever."""

    def __init__(
        self, texts: Sequence[Tensor], seq_len: int, seed: int, *, held_out: int = 0, evaluation: bool = False
    ) -> None:
        self._texts = texts  # uint8, none of them empty
        self._starts = tuple(accumulate((len(text) for text in texts), initial=0))
        self._seq_len = seq_len
        self._seed = seed
        self._held_out = held_out
        self._evaluation = evaluation

    @property
    def num_sequences(self) -> int:
        return max(0, self._starts[-1] - 1) // self._seq_len

    @property
    def digest(self) -> str:
        """Of all text, in order; reads all of it. Equal digests mean equal samples on every machine."""
        found = hashlib.blake2b(digest_size=16)
        for text in self._texts:
            found.update(text.numpy().data)
        return found.hexdigest()

    def read(self, numbers: Sequence[int]) -> Tensor:
        """The samples of these numbers as int64 [len(numbers), seq_len + 1]."""
        return torch.stack([self._sequence(self._place(number)) for number in numbers]).long()

    def _place(self, number: int) -> int:
        if self._evaluation:
            assert number < self._held_out, number
            return self._split(number)
        num_read = self.num_sequences - self._held_out
        turn, within = divmod(number, num_read)
        place = Permutation(num_read, _mix(self._seed, turn))(within)
        return self._split(self._held_out + place) if self._held_out else place

    def _split(self, number: int) -> int:
        return Permutation(self.num_sequences, _mix(self._seed, _SPLIT))(number)

    def _sequence(self, place: int) -> Tensor:
        first = place * self._seq_len
        last = first + self._seq_len + 1
        parts = []
        index = bisect_right(self._starts, first) - 1
        while first < last:
            start = self._starts[index]
            part = self._texts[index][first - start : last - start]
            parts.append(part)
            first += len(part)
            index += 1
        return torch.cat(parts)


def open_samples(data: DataSpec, seq_len: int, seed: int) -> Samples:
    """Maps the text of `data`. Raises InvalidField("data.uri") if there is none to read, or too little."""
    return Samples(_open("data.uri", data.uri, seq_len, 1), seq_len, seed)


def training_samples(job: JobSpec) -> Samples:
    """Raises InvalidField as `open_samples` does."""
    seq_len, held_out = job.train.seq_len, job.held_out_sequences
    return Samples(_open("data.uri", job.data.uri, seq_len, held_out + 1), seq_len, job.train.seed, held_out=held_out)


def evaluation_samples(job: JobSpec) -> Samples | None:
    """None where the job evaluates nothing. Raises InvalidField("data.eval_uri"), or "data.uri" where that is read."""
    if not job.eval_sequences:
        return None
    seq_len, num = job.train.seq_len, job.eval_sequences
    if job.data.eval_uri is None:
        texts = _open("data.uri", job.data.uri, seq_len, num + 1)
    else:
        texts = _open("data.eval_uri", job.data.eval_uri, seq_len, num)
    return Samples(texts, seq_len, job.train.seed, held_out=num, evaluation=True)


@functools.lru_cache(maxsize=1)
def samples_of(job: JobSpec) -> tuple[Samples, Samples | None]:
    """To train on and to evaluate with, of the one job of this process: there may be thousands of files, and they are
    the same in every epoch."""
    return training_samples(job), evaluation_samples(job)


def _open(field: str, uri: str, seq_len: int, num_sequences: int) -> list[Tensor]:
    try:
        texts = [_map_text(path) for path in _paths(field, uri) if path.stat().st_size]
    except (OSError, RuntimeError) as error:  # torch says RuntimeError for what it cannot map
        raise InvalidField(field, uri, f"cannot be read: {error}") from error
    if sum(map(len, texts)) < num_sequences * seq_len + 1:
        wanted = "one sequence" if num_sequences == 1 else f"{num_sequences} sequences"
        raise InvalidField(field, uri, f"has too little text for {wanted} of {seq_len} tokens and the next")
    return texts


def _map_text(path: Path) -> Tensor:
    """Mapped, so that only what is read takes memory; unlike Python's own mmap, torch keeps no descriptor open."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _paths(field: str, uri: str) -> list[Path]:
    """In an order that is the same on every machine: by relative path."""
    parts = urlsplit(uri)
    if parts.scheme == "stdlib":
        return _walk(Path(sysconfig.get_path("stdlib")), suffix=".py", left_out=_LEFT_OUT)
    root = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not root.is_absolute():
        raise InvalidField(field, uri, "must name a place on every node: file:///absolute/path")
    if not root.exists():
        raise InvalidField(field, uri, "does not exist")
    return _walk(root, suffix="", left_out=frozenset()) if root.is_dir() else [root]


def _walk(root: Path, *, suffix: str, left_out: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in left_out]
        found.extend(Path(folder, name) for name in names if name.endswith(suffix))
    return sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error
