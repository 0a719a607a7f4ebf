"""One rank's part of a pipeline stage: micro-batches forward and backward, and what travels between stages.

Owns what travels, from the first receive of a step to its last send, and its charges. Where the plan says so, receives
are posted ahead, each into a buffer of its own: then no send waits for anything but the wire. Does not own what happens
in between, from what enters the stage to what leaves it (`segments`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shoal_planner.plan import Plan, RankPlace
from shoal_planner.programs import (
    Backward,
    Forward,
    InputGradient,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    WeightGradient,
)
from shoal_workers.borders import Borders
from shoal_workers.circulation import Circulation
from shoal_workers.devices import Wire
from shoal_workers.exchange import Exchange, Pending
from shoal_workers.memory import DeviceMemory
from shoal_workers.model import Unit
from shoal_workers.samples import Samples, batch
from shoal_workers.segments import Segments
from shoal_workers.tags import Purpose, tag

PIPELINE = "buffers between stages"

_GRADIENTS_AHEAD = 2  # receives of gradients that are posted before they are needed

_Receive = ReceiveActivation | ReceiveGradient
_Send = SendActivation | SendGradient
_R = TypeVar("_R", ReceiveActivation, ReceiveGradient)
_Key = tuple[int, int]  # chunk, micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Which samples of each step a replica runs: rows [low, high) of each micro-batch of its pipeline, whose first
    sample of a step is number `offset` of that step."""

    samples: Samples
    global_batch: int
    offset: int
    micro_batch: int
    low: int
    high: int

    def numbers(self, step: int, micro_batch: int) -> range:
        """Sample numbers through the whole training; step 1 is the first."""
        first = (step - 1) * self.global_batch + self.offset + micro_batch * self.micro_batch
        return range(first + self.low, first + self.high)

    def fed(self, step: int, program: Program) -> tuple[tuple[int, int], ...]:
        """The numbers of all samples of a step, in the order of the program, adjacent ranges joined."""
        ranges: list[tuple[int, int]] = []
        for instruction in program:
            if isinstance(instruction, Forward) and instruction.chunk == 0:
                numbers = self.numbers(step, instruction.micro_batch)
                if ranges and ranges[-1][1] == numbers.start:
                    ranges[-1] = (ranges[-1][0], numbers.stop)
                else:
                    ranges.append((numbers.start, numbers.stop))
        return tuple(ranges)


def feed(plan: Plan, place: RankPlace, samples: Samples) -> Feed:
    """Samples of a step go to pipelines in order, then to micro-batches in order, then to rows."""
    pipeline = plan.pipelines[place.pipeline]
    low, high = pipeline.stages[place.stage].sample_range(place.replica)
    return Feed(
        samples=samples,
        global_batch=plan.global_batch,
        offset=sum(before.samples for before in plan.pipelines[: place.pipeline]),
        micro_batch=pipeline.micro_batch,
        low=low,
        high=high,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of what travels between stages, per sample, and where it lies when it does."""

    seq_len: int
    hidden: int
    dtype: torch.dtype
    wire: Wire

    def buffer(self, num_samples: int) -> Tensor:
        return self.wire.empty(num_samples, self.seq_len, self.hidden, dtype=self.dtype)

    def num_bytes(self, num_samples: int) -> int:
        return num_samples * self.seq_len * self.hidden * self.dtype.itemsize


class StageRun:
    """Executes the instructions of one rank's program that concern its pipeline; `begin` before each step. `chunks` are
    the units of each chunk of its layers. Unless receives are posted `ahead`, each is when it is waited for."""

    def __init__(
        self,
        chunks: Sequence[Sequence[Unit]],
        feed: Feed,
        shape: Shape,
        program: Program,
        exchange: Exchange,
        memory: DeviceMemory,
        circulation: Circulation,
        *,
        ahead: bool,
    ) -> None:
        tokens = feed.global_batch * shape.seq_len
        self.chunks = tuple(Segments(units, tokens, memory, circulation) for units in chunks)
        self._feed = feed
        self.shape = shape
        self._exchange = exchange
        self._memory = memory
        self._activations = _by_key(item for item in program if isinstance(item, ReceiveActivation))
        self._gradients = _by_key(item for item in program if isinstance(item, ReceiveGradient))
        self._received = _most_received(program)
        self._num_rows = feed.high - feed.low
        self._ahead = ahead
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._step = step
        self._loss = torch.zeros((), dtype=torch.float64, device=self.shape.wire.device)
        self.num_targets = 0  # of this rank's part of the loss
        self._unposted: dict[type[_Receive], deque[tuple[_Receive, ...]]] = {
            ReceiveActivation: deque(self._activations),
            ReceiveGradient: deque(self._gradients),
        }
        self._pending: dict[_Receive, Pending] = {}
        self._inputs: dict[_Key, Tensor] = {}
        self._slopes: dict[_Key, Tensor] = {}  # gradients of what leaves
        self._answers: dict[_Key, Tensor] = {}  # gradients of what entered, oldest first
        self._leaving: dict[_Key, Tensor] = {}
        self._sent_activations: dict[_Key, list[Pending]] = defaultdict(list)
        self._sent_gradients: dict[_Key, list[Pending]] = defaultdict(list)
        for segments in self.chunks:
            segments.begin()

    def begin(self, step: int) -> None:
        """Posts the receives of as many micro-batches as can be in flight, and one more: a sender never finds nobody
        there, and buffers do not grow with the number of micro-batches."""
        self._reset(step)
        for _ in range(self._received + 1):
            self._post_ahead(ReceiveActivation)
        for _ in range(_GRADIENTS_AHEAD):
            self._post_ahead(ReceiveGradient)

    def _post_ahead(self, kind: type[_Receive]) -> None:
        if self._ahead:
            self._post(kind)

    def _post(self, kind: type[_Receive]) -> None:
        """The receives of one more micro-batch, if there is one."""
        if not self._unposted[kind]:
            return
        items = self._unposted[kind].popleft()
        buffers = self._slopes if kind is ReceiveGradient else self._inputs
        self._charge(1)
        buffer = buffers[_key(items[0])] = self.shape.buffer(self._num_rows)
        for item in items:
            part = self._rows(buffer, item.first, item.last)
            self._pending[item] = self._exchange.irecv(part, item.peer, message_tag(item, len(self.chunks)))

    def receive(self, item: _Receive) -> None:
        if item not in self._pending:
            self._post(type(item))
        self._pending.pop(item).wait()

    def forward(self, item: Forward) -> None:
        segments = self.chunks[item.chunk]
        leaving = segments.forward(item.micro_batch, *self._entering(_key(item)))
        if segments.gives_loss:
            self._loss += leaving
        else:
            self._charge(1)
            self._leaving[_key(item)] = leaving

    def backward(self, item: Backward | InputGradient) -> None:
        """Gradients of this micro-batch, but for those that are put off, add up in the live state."""
        key, segments = _key(item), self.chunks[item.chunk]
        slope = None if segments.gives_loss else self.shape.wire.arrived(self._slopes.pop(key))
        answer = segments.backward(item.micro_batch, slope)
        if not segments.gives_loss:
            _wait(self._sent_activations.pop(key, []))  # long taken: its gradient came back
            del self._leaving[key]
            self._release(2)
            self._post_ahead(ReceiveGradient)
        if not segments.takes_tokens:
            assert answer is not None
            self._answers[key] = answer  # takes over the charge of what entered
            self._post_ahead(ReceiveActivation)

    def weight_gradients(self, item: WeightGradient) -> None:
        """Those that the micro-batch's backward has put off."""
        self.chunks[item.chunk].weight_gradients(item.micro_batch)

    def send(self, item: _Send) -> None:
        if isinstance(item, SendActivation):
            whole, sent = self._leaving[_key(item)], self._sent_activations
        else:
            whole, sent = self._answers[_key(item)], self._sent_gradients
            self._settle_gradients(self._received + 1)
        part = self.shape.wire.leaving(self._rows(whole, item.first, item.last))
        sent[_key(item)].append(self._exchange.isend(part, item.peer, message_tag(item, len(self.chunks))))

    def _settle_gradients(self, left: int) -> None:
        """Waits until all but the last so many gradients have been taken; their buffers go."""
        while len(self._answers) > left:
            key = next(iter(self._answers))
            _wait(self._sent_gradients.pop(key, []))
            del self._answers[key]
            self._release(1)

    def end(self) -> None:
        """Waits until everything sent has been taken."""
        for sent in self._sent_activations.values():
            _wait(sent)
        self._sent_activations.clear()
        self._settle_gradients(0)

    @property
    def loss(self) -> float:
        """This rank's part of the step's loss; zero where the head is elsewhere."""
        return float(self._loss)

    def _entering(self, key: _Key) -> tuple[Tensor, Tensor | None, Borders | None]:
        chunk, micro_batch = key
        segments, samples, targets_BS = self.chunks[chunk], self._feed.samples, None
        read = None
        if segments.reads(samples):
            read = batch(samples, self._feed.numbers(self._step, micro_batch), self.shape.wire.device)
        borders = None if read is None else read.borders
        if read is not None and segments.gives_loss:
            targets_BS = read.targets_BS
            self.num_targets += read.num_targets
        if segments.takes_tokens:
            assert read is not None
            return read.tokens_BS, targets_BS, borders
        return self.shape.wire.arrived(self._inputs.pop(key)).requires_grad_(), targets_BS, borders

    def _rows(self, whole: Tensor, first: int, last: int) -> Tensor:
        """Rows of a micro-batch, of which this rank has [low, high)."""
        return whole[first - self._feed.low : last - self._feed.low]

    def _charge(self, num_buffers: int) -> None:
        self._memory.charge(PIPELINE, num_buffers * self.shape.num_bytes(self._num_rows))

    def _release(self, num_buffers: int) -> None:
        self._memory.release(PIPELINE, num_buffers * self.shape.num_bytes(self._num_rows))


def message_tag(item: _Receive | _Send, num_chunks: int) -> int:
    """Made of the sender's chunk, which both ends know."""
    receives = isinstance(item, ReceiveActivation | ReceiveGradient)
    is_activation = isinstance(item, ReceiveActivation | SendActivation)
    number = item.micro_batch * num_chunks + (item.peer_chunk if receives else item.chunk)
    return tag(Purpose.ACTIVATION if is_activation else Purpose.GRADIENT, number)


def _wait(sent: Iterable[Pending]) -> None:
    for pending in sent:
        pending.wait()


def _key(item: Forward | Backward | InputGradient | _Receive | _Send) -> _Key:
    return item.chunk, item.micro_batch


def _by_key(items: Iterable[_R]) -> tuple[tuple[_R, ...], ...]:
    """In the order of the program."""
    return tuple(tuple(group) for _, group in itertools.groupby(items, key=_key))


def _most_received(program: Program) -> int:
    """Micro-batches that were received, between their forward and their backward, at the fullest moment."""
    received = {_key(item) for item in program if isinstance(item, ReceiveActivation)}
    now = most = 0
    for item in program:
        if isinstance(item, Forward | Backward | InputGradient) and _key(item) in received:
            now += 1 if isinstance(item, Forward) else -1
            most = max(most, now)
    return most
