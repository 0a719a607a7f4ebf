"""How long a device takes for the parts of a model and for its update: the measured figures of the Profile.

Owns the stop-watch. Tensor-parallel shapes are measured as cut for one rank and without the other ranks, since what
their all-reduces cost is a matter of links, not of devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal_planner.cluster import DeviceRef
from shoal_planner.job import JobSpec, ModelSpec
from shoal_planner.parameters import frozen, parameters
from shoal_recovery.state import Kind, RankState, Span
from shoal_workers.adapting import adapted
from shoal_workers.compiling import compiled
from shoal_workers.devices import CPU, synchronise
from shoal_workers.exchange import SoloExchange
from shoal_workers.live import LiveState, Precision, weight_dtype
from shoal_workers.memory import DeviceMemory
from shoal_workers.model import Block, Embedding, Head, Lookup, Weights, rotary_of
from shoal_workers.optimizer import OwnedAdamW
from shoal_workers.own_modules import OwnUnits
from shoal_workers.products import ByAutograd, Products
from shoal_workers.remaking import keeping
from shoal_workers.slopes import backward
from shoal_workers.tensor_parallel import TensorGroup

_STD = 0.02
_UPDATE_ELEMENTS = 1 << 22
_PATIENCE_S = 1.0
_QUICKER = 0.95
Seconds = tuple[float, float]


def measure_block(
    model: ModelSpec,
    seq_len: int,
    tp: int,
    samples: int,
    threads: int,
    precision: Precision,
    repeats: int,
    device: torch.device = CPU,
) -> Seconds:
    """Seconds of one block, forward and backward, on `samples` sequences with `threads` threads."""
    if model.module is not None:
        block: Callable[[Tensor], Tensor] = _own_unit(model, 1, tp, precision, device)
    else:
        weights = Weights(model=model, lookup=_weights(model, tp, precision, device), group=_alone())
        block = Block(model, 0, weights, rotary_of(model, seq_len, device), keeping, _products(weights, 0))
    x_BSH = _activations(model, seq_len, samples, precision, device)
    return _measure(lambda: block(x_BSH), threads, repeats, device)


def compile_block(job: JobSpec, tp: int, samples: int, device: torch.device) -> None:
    """Has all compiled that a block of this job needs, if the process has not yet: without a backward, and with one."""
    model, train = job.model, job.train
    weights = Weights(model=model, lookup=_weights(model, tp, train.precision, device), group=_alone())
    rotary = rotary_of(model, train.seq_len, device, compiled)
    block = Block(model, 0, weights, rotary, keeping, _products(weights, 0), way=compiled)
    x_BSH = _activations(model, train.seq_len, samples, train.precision, device)
    with torch.no_grad():
        block(x_BSH)
    leaving = block(x_BSH)
    backward(leaving, torch.ones_like(leaving))


def measure_embedding(
    model: ModelSpec,
    seq_len: int,
    tp: int,
    samples: int,
    threads: int,
    precision: Precision,
    repeats: int,
    device: torch.device = CPU,
) -> Seconds:
    """As `measure_block`, for the embedding."""
    if model.module is not None:
        embedding: Callable[[Tensor], Tensor] = _own_unit(model, 0, tp, precision, device)
        num_rows = 1  # how many it knows is its own affair
    else:
        lookup = _weights(model, tp, precision, device)
        embedding = Embedding(Weights(model=model, lookup=lookup, group=_alone()))
        num_rows = len(lookup("embedding.weight"))
    tokens_BS = torch.randint(num_rows, (samples, seq_len), device=device)
    return _measure(lambda: embedding(tokens_BS), threads, repeats, device)


def measure_head(
    model: ModelSpec,
    seq_len: int,
    tp: int,
    samples: int,
    threads: int,
    precision: Precision,
    repeats: int,
    device: torch.device = CPU,
) -> Seconds:
    """As `measure_block`, for final norm, head and loss."""
    if model.module is not None:
        head: Callable[[Tensor, Tensor], Tensor] = _own_unit(model, model.layers + 1, tp, precision, device)
    else:
        weights = Weights(model=model, lookup=_weights(model, tp, precision, device), group=_alone())
        head = Head(model, weights, _products(weights, None))
    x_BSH = _activations(model, seq_len, samples, precision, device)
    targets_BS = torch.randint(model.vocab, (samples, seq_len), device=device)
    return _measure(lambda: head(x_BSH, targets_BS), threads, repeats, device)


def measure_update(job: JobSpec, threads: int, repeats: int, device: torch.device = CPU) -> float:
    """Elements of state in a second that the engine's optimizer updates with `threads` threads, on state like a rank's:
    that of the model, or as much of it as is well more than what caches keep. Where the job clips, it always does."""
    live = _state(job, device)
    optimizer = OwnedAdamW(job.train, live)
    with _threads(threads):
        seconds = [_seconds(partial(optimizer.apply, step, math.inf), device) for step in range(1, repeats + 2)][1:]
    return sum(span.numel for span in live.state.owns) / min(seconds)


def _state(job: JobSpec, device: torch.device) -> LiveState:
    spans, room = [], _UPDATE_ELEMENTS
    for parameter in parameters(job.model):
        if room:
            spans.append(Span(fqn=parameter.fqn, first=0, last=min(parameter.numel, room)))
            room -= spans[-1].numel
    held = tuple(sorted(spans))
    state = RankState(
        rank=0,
        device=DeviceRef(node="here", index=0),
        holds=held,
        keeps=held,
        contributes=held,
        sums=held,
        owns=held,
        vouches=held,
    )
    live = LiveState.build(job.model, state, job.train.precision, DeviceMemory("here:0", None), device=device)
    for span in held:
        live.view(span.key(Kind.MASTER)).normal_(std=_STD)
        live.view(span.key(Kind.EXP_AVG)).zero_()
        live.view(span.key(Kind.EXP_AVG_SQ)).zero_()
        live.gradient(span).normal_(std=_STD)
    return live


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Until the device has done it."""
    synchronise(device)
    began_s = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began_s


def _measure(forward: Callable[[], Tensor], threads: int, repeats: int, device: torch.device) -> Seconds:
    """The first round only warms up. The quickest of the others counts, as other work on the machine only ever adds:
    so it goes on until `repeats` rounds in a row were not quicker than those before, or patience ends."""
    assert repeats > 0, repeats
    with _threads(threads):
        _round(forward, device)
        began_s, best, idle = time.perf_counter(), (math.inf, math.inf), 0
        while idle < repeats and (time.perf_counter() - began_s < _PATIENCE_S or best[0] == math.inf):
            one, other = _round(forward, device)
            idle = 0 if one + other < _QUICKER * sum(best) else idle + 1
            best = min(best[0], one), min(best[1], other)
    return best


def _round(forward: Callable[[], Tensor], device: torch.device) -> Seconds:
    made: list[Tensor] = []
    forward_s = _seconds(lambda: made.append(forward()), device)
    slope = torch.ones_like(made[0])
    back: Callable[[], object] = partial(backward, made[0], slope)
    if not made[0].requires_grad:  # a frozen embedding has none
        back = float
    return forward_s, _seconds(back, device)


def _products(weights: Weights, layer: int | None) -> Products:
    if weights.model.lora is None:
        return ByAutograd()
    return adapted(weights.model, layer, weights.lookup, weights.group)


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _weights(model: ModelSpec, tp: int, precision: Precision, device: torch.device) -> Lookup:
    """What tp rank 0 holds, made up on demand."""
    trained = {parameter.fqn for parameter in parameters(model)}
    known = {parameter.fqn: parameter for parameter in (*frozen(model), *parameters(model))}
    made: dict[str, Tensor] = {}

    def lookup(fqn: str, number: int = 0) -> Tensor:
        assert number == 0, number
        if fqn not in made:
            first, last = known[fqn].interval(0, tp)
            flat = torch.randn(last - first, device=device).mul_(_STD).to(weight_dtype(precision))
            made[fqn] = flat.view(-1, *known[fqn].shape[1:]).requires_grad_(fqn in trained)
        return made[fqn]

    return lookup


def _own_unit(model: ModelSpec, unit: int, tp: int, precision: Precision, device: torch.device) -> Any:
    """A module of the user's own on made up weights."""
    units = OwnUnits(model, 0, device, weight_dtype(precision))
    return units.unit(unit, _weights(model, tp, precision, device), _alone())


def _activations(model: ModelSpec, seq_len: int, samples: int, precision: Precision, device: torch.device) -> Tensor:
    x_BSH = torch.randn(samples, seq_len, model.hidden, device=device)
    return x_BSH.to(weight_dtype(precision)).requires_grad_()


def _alone() -> TensorGroup:
    return TensorGroup(rank=0, size=1, reducer=SoloExchange())
