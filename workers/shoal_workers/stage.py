"""One rank's part of a pipeline stage: micro-batches forward and backward, and what travels between stages.

Owns what travels, from the first receive of a step to its last send, and its charges. Receives are posted ahead, each
into a buffer of its own, so no send ever waits for anything but the wire. Does not own what happens in between, from
what enters the stage to what leaves it (`segments`).
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
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from shoal_workers.data import Samples
from shoal_workers.exchange import Exchange, Pending
from shoal_workers.memory import DeviceMemory
from shoal_workers.model import Unit
from shoal_workers.segments import Segments
from shoal_workers.tags import Purpose, tag

PIPELINE = "buffers between stages"

_GRADIENTS_AHEAD = 2  # receives of gradients that are posted before they are needed
_ALL = 2**62

_Receive = ReceiveActivation | ReceiveGradient
_R = TypeVar("_R", ReceiveActivation, ReceiveGradient)


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
    """Of what travels between stages, per sample, and where it is computed on."""

    seq_len: int
    hidden: int
    dtype: torch.dtype
    device: torch.device

    def buffer(self, num_samples: int) -> Tensor:
        """On the host, where the wire begins."""
        return torch.empty(num_samples, self.seq_len, self.hidden, dtype=self.dtype)

    def num_bytes(self, num_samples: int) -> int:
        return num_samples * self.seq_len * self.hidden * self.dtype.itemsize


class StageRun:
    """Executes the instructions of one rank's program that concern its pipeline; `begin` before each step."""

    def __init__(
        self,
        units: Sequence[Unit],
        feed: Feed,
        shape: Shape,
        program: Program,
        exchange: Exchange,
        memory: DeviceMemory,
    ) -> None:
        self._takes_tokens = units[0].takes_tokens
        self._gives_loss = units[-1].gives_loss
        self.segments = Segments(units, feed.global_batch * shape.seq_len, memory)
        self._feed = feed
        self.shape = shape
        self._exchange = exchange
        self._memory = memory
        self._activations = _by_micro_batch(item for item in program if isinstance(item, ReceiveActivation))
        self._gradients = _by_micro_batch(item for item in program if isinstance(item, ReceiveGradient))
        self._in_flight = _most_in_flight(program)
        self._num_rows = feed.high - feed.low
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._step = step
        self._loss = torch.zeros((), dtype=torch.float64)
        self._unposted: dict[type[_Receive], deque[tuple[_Receive, ...]]] = {
            ReceiveActivation: deque(self._activations),
            ReceiveGradient: deque(self._gradients),
        }
        self._pending: dict[_Receive, Pending] = {}
        self._inputs: dict[int, Tensor] = {}
        self._slopes: dict[int, Tensor] = {}  # gradients of what leaves, by micro-batch
        self._answers: dict[int, Tensor] = {}  # gradients of what entered
        self.segments.begin()
        self._leaving: dict[int, Tensor] = {}
        self._sent_activations: dict[int, list[Pending]] = defaultdict(list)
        self._sent_gradients: dict[int, list[Pending]] = defaultdict(list)

    def begin(self, step: int) -> None:
        """Posts the receives of as many micro-batches as can be in flight, and one more: a sender never finds nobody
        there, and buffers do not grow with the number of micro-batches."""
        self._reset(step)
        for _ in range(self._in_flight + 1):
            self._post(ReceiveActivation)
        for _ in range(_GRADIENTS_AHEAD):
            self._post(ReceiveGradient)

    def _post(self, kind: type[_Receive]) -> None:
        """The receives of one more micro-batch, if there is one."""
        if not self._unposted[kind]:
            return
        items = self._unposted[kind].popleft()
        buffers, purpose = self._inputs, Purpose.ACTIVATION
        if kind is ReceiveGradient:
            buffers, purpose = self._slopes, Purpose.GRADIENT
        self._charge(1)
        buffer = buffers[items[0].micro_batch] = self.shape.buffer(self._num_rows)
        for item in items:
            part = self._rows(buffer, item.first, item.last)
            self._pending[item] = self._exchange.irecv(part, item.peer, tag(purpose, item.micro_batch))

    def receive(self, item: _Receive) -> None:
        self._pending.pop(item).wait()

    def forward(self, item: Forward) -> None:
        leaving = self.segments.forward(item.micro_batch, *self._entering(item.micro_batch))
        if self._gives_loss:
            self._loss += leaving.cpu()
        else:
            self._charge(1)
            self._leaving[item.micro_batch] = leaving

    def backward(self, item: Backward) -> None:
        """Gradients of this micro-batch add up in the live state."""
        slope = None
        if not self._gives_loss:
            slope = self._slopes.pop(item.micro_batch).to(self.shape.device)
        answer = self.segments.backward(item.micro_batch, slope)
        if not self._gives_loss:
            _wait(self._sent_activations.pop(item.micro_batch, []))  # long taken: its gradient came back
            del self._leaving[item.micro_batch]
            self._release(2)
        if not self._takes_tokens:
            assert answer is not None
            self._answers[item.micro_batch] = answer  # takes over the charge of what entered
        self._post(ReceiveActivation)
        self._post(ReceiveGradient)

    def send(self, item: SendActivation | SendGradient) -> None:
        if isinstance(item, SendActivation):
            whole, purpose, sent = self._leaving[item.micro_batch], Purpose.ACTIVATION, self._sent_activations
        else:
            whole, purpose, sent = self._answers[item.micro_batch], Purpose.GRADIENT, self._sent_gradients
            self._settle_gradients(item.micro_batch - self._in_flight)
        part = self._rows(whole, item.first, item.last).cpu().contiguous()
        sent[item.micro_batch].append(self._exchange.isend(part, item.peer, tag(purpose, item.micro_batch)))

    def _settle_gradients(self, before: int) -> None:
        """Gradients of earlier micro-batches than this one have been taken; their buffers go."""
        for micro_batch in [number for number in self._answers if number < before]:
            _wait(self._sent_gradients.pop(micro_batch, []))
            del self._answers[micro_batch]
            self._release(1)

    def end(self) -> None:
        """Waits until everything sent has been taken."""
        for sent in self._sent_activations.values():
            _wait(sent)
        self._sent_activations.clear()
        self._settle_gradients(_ALL)

    @property
    def loss(self) -> float:
        """This rank's part of the step's loss; zero where the head is elsewhere."""
        return float(self._loss)

    def _entering(self, micro_batch: int) -> tuple[Tensor, Tensor | None]:
        tokens = None
        if self._takes_tokens or self._gives_loss:
            tokens = self._feed.samples.read(self._feed.numbers(self._step, micro_batch)).to(self.shape.device)
        targets = tokens[:, 1:] if tokens is not None and self._gives_loss else None
        if self._takes_tokens:
            assert tokens is not None
            return tokens[:, :-1], targets
        return self._inputs.pop(micro_batch).to(self.shape.device).requires_grad_(), targets

    def _rows(self, whole: Tensor, first: int, last: int) -> Tensor:
        """Rows of a micro-batch, of which this rank has [low, high)."""
        return whole[first - self._feed.low : last - self._feed.low]

    def _charge(self, num_buffers: int) -> None:
        self._memory.charge(PIPELINE, num_buffers * self.shape.num_bytes(self._num_rows))

    def _release(self, num_buffers: int) -> None:
        self._memory.release(PIPELINE, num_buffers * self.shape.num_bytes(self._num_rows))


def _wait(sent: Iterable[Pending]) -> None:
    for pending in sent:
        pending.wait()


def _by_micro_batch(items: Iterable[_R]) -> tuple[tuple[_R, ...], ...]:
    """In the order of the program, which is that of micro-batches for each direction."""
    return tuple(tuple(group) for _, group in itertools.groupby(items, key=lambda item: item.micro_batch))


def _most_in_flight(program: Program) -> int:
    """Micro-batches between their forward and their backward, at the fullest moment."""
    now = most = 0
    for item in program:
        now += isinstance(item, Forward) - isinstance(item, Backward)
        most = max(most, now)
    return most
