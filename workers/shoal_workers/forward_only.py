"""The forwards of a step's program without its backwards, on any samples: for evaluations, and to find out where a step
that came out not finite first went wrong.

Every rank has to run them at once. Nothing is kept of a micro-batch once the next stage has it, so they need no more
memory than a step: of what enters a stage and of what leaves it, two buffers each.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal_planner.programs import Forward, Program, ReceiveActivation, SendActivation
from shoal_workers.circulation import Circulation, Use
from shoal_workers.exchange import Exchange, Pending
from shoal_workers.memory import DeviceMemory
from shoal_workers.samples import Samples, batch
from shoal_workers.stage import PIPELINE, Feed, StageRun, message_tag

_AHEAD = 2  # receives that are posted, and outputs that are not yet taken

Seen = Callable[[int, Tensor], None]  # told the number of each unit, and what came out of it


class Passed(NamedTuple):
    """A rank's part of the loss over a batch, as a step would report it before it knows how many targets there are;
    and how many it is over. Zeros where the head is elsewhere."""

    loss: float
    num_targets: int


class ForwardOnly:
    """Of one rank. `run` leaves nothing behind, neither in the live state nor on the wire."""

    def __init__(
        self,
        stage: StageRun,
        feed: Feed,
        program: Program,
        exchange: Exchange,
        memory: DeviceMemory,
        circulation: Circulation,
        wanted: tuple[Use, ...],
    ) -> None:
        self._chunks = stage.chunks
        self._feed = feed
        self._shape = stage.shape
        self._circulation = circulation
        self._wanted = wanted
        self._exchange = exchange
        self._memory = memory
        self._num_rows = feed.high - feed.low
        self._program = tuple(
            item for item in program if isinstance(item, ReceiveActivation | Forward | SendActivation)
        )
        self._begin()

    def _begin(self) -> None:
        receives = (item for item in self._program if isinstance(item, ReceiveActivation))
        self._unposted = deque(tuple(group) for _, group in itertools.groupby(receives, _key))
        self._pending: dict[ReceiveActivation, Pending] = {}
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: deque[tuple[Tensor, list[Pending]]] = deque()
        self._num_targets = 0

    def run(self, step: int, samples: Samples, seen: Seen) -> Passed:
        """Over those of `samples` that a step of this number takes."""
        self._begin()
        self._circulation.begin(self._wanted)
        loss = torch.zeros((), dtype=torch.float64)
        for _ in range(_AHEAD):
            self._post()
        for item in self._program:
            match item:
                case ReceiveActivation():
                    self._pending.pop(item).wait()
                case Forward():
                    loss += self._forward(self._feed.numbers(step, item.micro_batch), item, samples, seen)
                case SendActivation():
                    self._send(item)
        self._settle(0)
        return Passed(float(loss), self._num_targets)

    def _post(self) -> None:
        """The receives of one more micro-batch, if there is one."""
        if not self._unposted:
            return
        items = self._unposted.popleft()
        self._charge()
        buffer = self._inputs[_key(items[0])] = self._shape.buffer(self._num_rows)
        for item in items:
            part = buffer[item.first - self._feed.low : item.last - self._feed.low]
            self._pending[item] = self._exchange.irecv(part, item.peer, message_tag(item, len(self._chunks)))

    def _forward(self, numbers: range, item: Forward, samples: Samples, seen: Seen) -> Tensor:
        """What it adds to the loss."""
        segments, read, targets_BS = self._chunks[item.chunk], None, None
        if segments.reads(samples):
            read = batch(samples, numbers, self._shape.wire.device)
        borders = None if read is None else read.borders
        if read is not None and segments.gives_loss:
            targets_BS = read.targets_BS
            self._num_targets += read.num_targets
        if segments.takes_tokens:
            assert read is not None
            out = segments.forward_only(read.tokens_BS, targets_BS, seen, borders)
        else:
            entering = self._shape.wire.arrived(self._inputs.pop(_key(item)))
            out = segments.forward_only(entering, targets_BS, seen, borders)
            self._release()
            self._post()
        if segments.gives_loss:
            return out.cpu()
        self._settle(_AHEAD - 1)
        self._charge()
        self._outputs.append((out, []))
        return torch.zeros(())

    def _send(self, item: SendActivation) -> None:
        out, sends = self._outputs[-1]
        part = self._shape.wire.leaving(out[item.first - self._feed.low : item.last - self._feed.low])
        sends.append(self._exchange.isend(part, item.peer, message_tag(item, len(self._chunks))))

    def _settle(self, left: int) -> None:
        """Waits until no more outputs than these are still to be taken."""
        while len(self._outputs) > left:
            for send in self._outputs.popleft()[1]:
                send.wait()
            self._release()

    def _charge(self) -> None:
        self._memory.charge(PIPELINE, self._shape.num_bytes(self._num_rows))

    def _release(self) -> None:
        self._memory.release(PIPELINE, self._shape.num_bytes(self._num_rows))


def _key(item: ReceiveActivation | Forward) -> tuple[int, int]:
    return item.chunk, item.micro_batch
