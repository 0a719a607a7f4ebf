"""Documents as numbered samples, where only those who read a sample tokenise what it is made of.

The slots of the global batch are streams: stream v reads the blocks at positions v, v + num_streams, ... of an order in
which each pass over the data is a permutation of all blocks, and packs each block by itself. So which sample a number
stands for depends on how many samples the blocks before gave; but where a sample begins, its `Mark`, is a fact about
the data that holds for every plan, rank and run. Whoever knows the mark of an earlier sample goes on from there, and
who knows none begins with the stream's first block. How many samples a block gives is remembered on the node, so that
even this is quick where it was read before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from shoal_workers.ahead import Ahead
from shoal_workers.block_counts import Counts
from shoal_workers.documents import Blocks, Encoder
from shoal_workers.errors import DataError
from shoal_workers.packing import Packed, Packer
from shoal_workers.packing import Sequence as Tokens
from shoal_workers.permutation import Permutation, mixed
from shoal_workers.samples import Row

_SPLIT = -1  # in the place of a pass: the order of blocks of which the first are held out
_KEPT_STEPS = 2  # the same samples are read again by a step's second attempt, and by its last stage
_STEPS_AHEAD = 2  # of which tokens are made while the model computes
_KEPT_MARKS = 32
_TOLD_AFTER_TOKENS = 2**14  # what whoever goes on from a mark may have to tokenise once more


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Sample `index` of a stream begins in its block number `turn`, after `skip` tokens of the document at `place`."""

    index: int
    turn: int
    place: int
    skip: int


_BEGIN = Mark(0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """Which block is read when: of `num_blocks`, the `held_out` first of a seeded order are never read; or, with
    `evaluation`, they alone are, always in the same order. There are never more streams than blocks for them."""

    num_blocks: int
    global_batch: int
    seed: int
    held_out: int = 0
    evaluation: bool = False

    @property
    def num_read(self) -> int:
        return self.held_out if self.evaluation else self.num_blocks - self.held_out

    @property
    def num_streams(self) -> int:
        """With few blocks, slots share streams: two that read one block would read the same samples in one step."""
        most = self.num_read if self.evaluation else self.num_read // 2
        return max(1, min(self.global_batch, most))

    def blocks(self) -> Iterator[int]:
        """All that are ever read."""
        return (self.block(place % self.num_streams, place // self.num_streams) for place in range(self.num_read))

    def block(self, stream: int, turn: int) -> int:
        time, within = divmod(stream + turn * self.num_streams, self.num_read)
        if self.evaluation:  # turned by one each time, or a stream might have nothing but a block without documents
            return self._split((within + time) % self.num_read)
        place = Permutation(self.num_read, mixed(self.seed, time))(within)
        return self._split(self.held_out + place) if self.held_out else place

    def _split(self, place: int) -> int:
        return Permutation(self.num_blocks, mixed(self.seed, _SPLIT))(place)


@dataclass(slots=True)
class _Stream:
    """`packer` gives the samples from `mark` on, of documents up to `place` in their `block` (None: all of them);
    `begun` is the index of the first of its block, if it is known."""

    kept: deque[tuple[int, Tokens]]
    mark: Mark = _BEGIN
    begun: int | None = 0
    packer: Packer | None = None
    block: int = 0
    place: int | None = None
    marks: list[Mark] = field(default_factory=lambda: [_BEGIN])
    told: Mark = _BEGIN


class Streams:
    """See `Samples`. Number n is sample n // num_streams of stream n % num_streams."""

    ignores = True

    def __init__(
        self, blocks: Blocks, encoder: Encoder, order: BlockOrder, seq_len: int, counts: Counts, name: str
    ) -> None:
        self._ahead = Ahead(blocks, encoder)
        self.by_document = encoder.by_document
        self._pad = encoder.end
        self._order = order
        self._num_streams = order.num_streams
        self._per_step = -(-order.global_batch // order.num_streams)
        self._seq_len = seq_len
        self._counts = counts
        self._name = name
        self._streams: dict[int, _Stream] = {}
        self._touched: set[int] = set()
        self._lock = Lock()

    def read(self, numbers: Sequence[int]) -> Tensor:
        """See `Samples`."""
        rows = np.empty((len(numbers), self._seq_len + 1), dtype=np.int64)
        with self._lock:
            for at, number in enumerate(numbers):
                rows[at] = self._sample(number % self._num_streams, number // self._num_streams)
        return torch.from_numpy(rows)

    def learn(self, marks: Sequence[Row]) -> None:
        """Rows are of (stream, index, turn, place, skip)."""
        with self._lock:
            self._ahead.clear()  # it may be other streams that are read from now on
            for stream, *mark in marks:
                _remember(self._stream(stream).marks, Mark(*mark))

    def marks(self, undone: Callable[[int], int]) -> list[Row]:
        """Of streams that got on by a block or many tokens since they were last told of."""
        found: list[Row] = []
        with self._lock:
            for number in sorted(self._touched):
                stream = self._streams[number]
                mark, told = _newest(stream.marks, self._first_undone(number, undone)), stream.told
                if mark.turn > told.turn or (mark.index - told.index) * self._seq_len >= _TOLD_AFTER_TOKENS:
                    stream.told = mark
                    found.append([number, mark.index, mark.turn, mark.place, mark.skip])
            self._touched.clear()
        return found

    def _first_undone(self, stream: int, undone: Callable[[int], int]) -> int:
        """The index of a sample of the stream; or where slots share streams, of one before it, if need be."""
        if self._num_streams == self._order.global_batch:
            return undone(stream) // self._num_streams
        return min(map(undone, range(self._order.global_batch))) // self._num_streams

    def _stream(self, number: int) -> _Stream:
        if number not in self._streams:
            self._streams[number] = _Stream(kept=deque(maxlen=_KEPT_STEPS * self._per_step))
        return self._streams[number]

    def _sample(self, number: int, index: int) -> Tokens:
        stream = self._stream(number)
        self._touched.add(number)
        for kept, tokens in stream.kept:
            if kept == index:
                return tokens
        self._place(number, stream, index)
        while True:
            at, tokens = self._next(number, stream)
            if at == index:
                self._read_ahead(number, stream)
                return tokens

    def _read_ahead(self, number: int, stream: _Stream) -> None:
        """Whoever read a sample of a stream reads the next one soon, unless he evaluates."""
        if self._order.evaluation or stream.packer is None:
            return
        missing = (1 + _STEPS_AHEAD * self._per_step) * self._seq_len - stream.packer.num_tokens
        if missing > 0:
            if stream.place is not None:
                self._ahead.want(number, (stream.block, stream.place), missing)
            else:
                self._ahead.want(number, (self._order.block(number, stream.mark.turn + 1), 0), missing)

    def _place(self, number: int, stream: _Stream, index: int) -> None:
        """Takes the stream to the nearest known place from which it reaches this sample."""
        if stream.mark.index == index:
            return
        best = self._passed_over(number, _newest(stream.marks, index), index)
        if stream.mark.index <= index and best.index <= stream.mark.index:
            return
        stream.mark, stream.packer = best, None
        stream.begun = best.index if (best.place, best.skip) == (0, 0) else None

    def _passed_over(self, number: int, mark: Mark, index: int) -> Mark:
        """By as many whole blocks as are known not to reach the sample. Raises DataError where none ever would."""
        num_empty = 0
        while (mark.place, mark.skip) == (0, 0):
            count = self._counts.get(self._order.block(number, mark.turn))
            if count is None or mark.index + count > index:
                break
            num_empty = 0 if count else num_empty + 1
            self._check_patience(num_empty)
            mark = Mark(mark.index + count, mark.turn + 1, 0, 0)
        return mark

    def _next(self, number: int, stream: _Stream) -> tuple[int, Tokens]:
        """The next sample of a stream, and its index."""
        num_empty = 0
        while True:
            mark = stream.mark
            packed = self._packed(number, stream)
            if packed is not None:
                stream.mark = Mark(mark.index + 1, mark.turn, packed.place, packed.skip)
                stream.kept.append((mark.index, packed.tokens))
                _remember(stream.marks, stream.mark)
                return mark.index, packed.tokens
            if stream.begun is not None:
                count = mark.index - stream.begun
                self._counts.put(stream.block, count)
                num_empty = 0 if count else num_empty + 1
                self._check_patience(num_empty)
            stream.mark, stream.begun, stream.packer = Mark(mark.index, mark.turn + 1, 0, 0), mark.index, None

    def _check_patience(self, num_empty: int) -> None:
        """After how many blocks without a sample there is none anywhere: a stream comes by each block in a while, but
        by the only one that has something perhaps not for several passes, as each is in another order. Raises
        DataError."""
        if num_empty <= 2 * self._order.num_read:
            return
        if num_empty > 64 * self._order.num_read or all(self._counts.get(block) == 0 for block in self._order.blocks()):
            raise DataError(self._name, "", "all documents together", "have nothing to learn from")

    def _packed(self, number: int, stream: _Stream) -> Packed | None:
        """The sample at the stream's mark; None where the block of that ends."""
        packer = stream.packer
        if packer is None:
            mark = stream.mark
            whole = (mark.place, mark.skip) == (0, 0)
            packer = stream.packer = Packer(self._seq_len, mark.skip, self._pad, whole=whole)
            stream.block, stream.place = self._order.block(number, mark.turn), mark.place
        while (packed := packer.next()) is None and stream.place is not None:
            made = self._ahead.take(number, (stream.block, stream.place))  # what raises leaves all as it was
            packer.add(made.documents)
            stream.place = made.end
        return packed or packer.end()


def _newest(marks: list[Mark], index: int) -> Mark:
    """Of which the sample is no later than this one."""
    return marks[bisect_right(marks, index, key=lambda mark: mark.index) - 1]


def _remember(marks: list[Mark], mark: Mark) -> None:
    """In order of indices, the newest ones; the first of all stays."""
    if mark.index > marks[-1].index:
        marks.append(mark)
    elif mark.index:
        at = bisect_right(marks, mark.index, key=lambda known: known.index)
        if marks[at - 1].index == mark.index:
            marks[at - 1] = mark
        else:
            marks.insert(at, mark)
    if len(marks) > _KEPT_MARKS:
        del marks[1 : 1 + _KEPT_MARKS // 4]
