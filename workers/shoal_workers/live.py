"""All tensors of one rank under one plan, addressed by global coordinates.

Owns the buffers, their charges in the ledger, and the tag that says of which step they are. Does not own who holds what
(ShardMap), nor who may write when: the engine clears the tag before the first write of an update, under the exchange's
commit, and sets it after the last gathered weight. A recovery fills a fresh LiveState and sets its tag.

The state is what is kept. Where weights or gradients are split, a unit's are whole only while they are open: buffers
for what is computed from the state (`circulation` fills and empties them), not state themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import Parameter, parameters
from shoal_planner.slices import Portion
from shoal_recovery.state import ELEMENT_BYTES, OWNED_KINDS, Kind, RankState, ShardKey, Span, common, without
from shoal_workers.errors import OutOfDeviceMemory
from shoal_workers.first_values import FirstValues
from shoal_workers.flat import FlatBuffer, UnitBuffers
from shoal_workers.frozen import FrozenWeights, frozen_weights
from shoal_workers.hosted import HostedState, passing_bytes
from shoal_workers.lending import Buffers, Lent
from shoal_workers.memory import DeviceMemory, Ledger
from shoal_workers.portions import Cutter, cutter
from shoal_workers.sinks import Sink

Precision = Literal["fp32", "bf16"]
_ByUnit = Mapping[int, list[Span]]
_Charge = tuple[Ledger, str, int]
_AT_ONCE = 1 << 26  # elements of a parameter's first values, 256 MiB: all of most parameters

WEIGHTS = "weights"
FROZEN = "frozen weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
SECONDARY = "secondary weights"
GATHERED = "weights and gradients made whole"
PASSING = "gradients and weights on their way"


def weight_dtype(precision: Precision) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16


class LiveState:
    """`build` makes one. `tag` is the step whose state is whole here, None while it is not."""

    def __init__(
        self,
        model: ModelSpec,
        state: RankState,
        memory: DeviceMemory,
        dtype: torch.dtype,
        weights: UnitBuffers,
        gradients: UnitBuffers,
        owned: dict[Kind, FlatBuffer],
        hosted: HostedState,
        secondary: dict[int, FlatBuffer],
        frozen: FrozenWeights,
    ) -> None:
        self.model = model
        self.state = state
        self.tag: int | None = None
        self.hosted = hosted
        self.frozen = frozen
        self._memory = memory
        self._dtype = dtype
        self._weights = weights
        self._gradients = gradients
        self._owned = owned
        self._secondary = secondary
        self._parameters = {parameter.fqn: parameter for parameter in parameters(model)}
        self._cut = cutter(model, state.slicing)
        self._leaves: dict[tuple[str, int], Tensor] = {}
        self._sinks: dict[Tensor, Sink] = {}  # by leaf
        self._stale: dict[str, list[Span]] = {}  # by parameter: gradients of the step before, which count as zeros
        self._refreshed = common(state.keeps, _apart(state, dtype))
        self._charges: tuple[_Charge, ...] = ()

    @classmethod
    def build(
        cls,
        model: ModelSpec,
        state: RankState,
        precision: Precision,
        memory: DeviceMemory,
        *,
        device: torch.device | str = "cpu",
        lent: Lent | None = None,
        frozen_before: FrozenWeights | None = None,
    ) -> LiveState:
        """Allocates everything, with no tag and, but for gradients, no values; what is `lent` is used as it is, and
        what was frozen before where it fits. Raises OutOfDeviceMemory, having charged nothing."""
        dtype, device = weight_dtype(precision), torch.device(device)
        buffers = Buffers(lent=lent, dtype=dtype, device=device)
        holds, keeps, gives, sums = (
            _spans_by_unit(model, spans) for spans in (state.holds, state.keeps, state.contributes, _summed(state))
        )
        split_weights, split_gradients = _differing(holds, keeps), _differing(gives, sums)
        cut = cutter(model, state.slicing)
        hosted = _spans_by_unit(model, state.hosted)
        beside = without(state.owns, state.hosted)
        owned = {kind: beside for kind in OWNED_KINDS} | {Kind.MASTER: _apart(state, dtype)}
        charges = (
            (memory, WEIGHTS, _num_kept(holds, keeps, split_weights) * dtype.itemsize),
            (memory, GRADIENTS, _num_kept(holds, sums, split_gradients) * ELEMENT_BYTES),
            (memory, OPTIMIZER, sum(map(_num_bytes, owned.values()))),
            (memory, FROZEN, sum(span.numel for span in state.frozen) * dtype.itemsize),
            (memory, SECONDARY, sum(span.numel for span in state.near) * dtype.itemsize),
            (memory.host, OPTIMIZER, _num_bytes(state.hosted) * len(OWNED_KINDS)),
            (memory.host, PASSING, passing_bytes(hosted)),
        )
        _charge_all(charges)
        live = cls(
            model,
            state,
            memory,
            dtype,
            UnitBuffers(*_kept_and_whole(holds, keeps, split_weights, cut), split_weights, buffers.weights),
            UnitBuffers(*_kept_and_whole(holds, sums, split_gradients, cut), split_gradients, buffers.gradients),
            {kind: buffers.owned(kind, spans) for kind, spans in owned.items()},
            HostedState(hosted, device),
            {unit: FlatBuffer(spans, dtype, device) for unit, spans in _spans_by_unit(model, state.near).items()},
            frozen_weights(model, state.frozen, dtype, device, frozen_before),
        )
        live._charges = charges
        live.zero_gradients()
        return live

    @property
    def device(self) -> torch.device:
        return self._owned[Kind.MASTER].tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._dtype

    def lend(self, coming: frozenset[tuple[str, Kind]]) -> Lent:
        """To a state of the same step, which gets of these parameters and kinds something from elsewhere."""
        return Lent(weights=self._weights, gradients=self._gradients, owned=self._owned, coming=coming)

    def release(self) -> None:
        """Gives the charges back; the tensors go with this object. For a plan that is left behind."""
        for ledger, what, num_bytes in self._charges:
            ledger.release(what, num_bytes)
        self._charges = ()

    def owned_keys(self) -> tuple[ShardKey, ...]:
        """Master and moments of the owned spans."""
        return tuple(span.key(kind) for kind in OWNED_KINDS for span in self.state.owns)

    def vouched_keys(self) -> tuple[ShardKey, ...]:
        """Those of them that no other rank speaks for: what a snapshot of this rank has."""
        return self.state.vouched_keys

    def kept_keys(self) -> tuple[ShardKey, ...]:
        """The weights that this rank keeps."""
        return tuple(span.key(Kind.WEIGHT) for span in self.state.keeps)

    def vouched_spans(self, unit: int) -> tuple[Span, ...]:
        """The spans that this rank vouches for, of parameters whose home is this unit."""
        return tuple(span for span in self.state.vouches if self._home(span) == unit)

    def view(self, key: ShardKey) -> Tensor:
        """The elements of `key`, flat and contiguous; writing into it writes the state. Weights have the job's
        precision, all else is fp32. KeyError unless all of them lie here as one interval."""
        span = Span(fqn=key.fqn, first=key.first, last=key.last)
        match key.kind:
            case Kind.WEIGHT:
                return self.weight(span)
            case Kind.MASTER:
                return self.master(span)
            case _:
                return self.hosted.view(key.kind, span) if span in self.hosted else self._owned[key.kind].view(span)

    def weight(self, span: Span) -> Tensor:
        """The weights of kept elements."""
        return self._weights.kept(self._home(span), span)

    def secondary_weight(self, span: Span) -> Tensor:
        """What the node keeps of the weights that it gathered in this step; no state either."""
        return self._secondary[self._home(span)].view(span)

    def split_weights(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Those of which more is held than kept: they lie in two places while their units are open."""
        return tuple(span for span in spans if self._home(span) in self._weights.split)

    def split_gradients(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(span for span in spans if self._home(span) in self._gradients.split)

    def master(self, span: Span) -> Tensor:
        """The fp32 weights of owned elements. An owner need not keep the weights that it makes of them; where it does,
        and they are fp32 too, there is but one of both."""
        if span in self.hosted:
            return self.hosted.view(Kind.MASTER, span)
        apart = self._owned[Kind.MASTER]
        return apart.view(span) if span in apart else self.weight(span)

    def gradient(self, span: Span) -> Tensor:
        """The fp32 gradient of elements that add up here, summed over the samples of the step so far."""
        self._zero_stale(span.fqn)
        return self._gradients.kept(self._home(span), span)

    def whole_weight(self, span: Span) -> Tensor:
        """The weights of held elements of one portion, while it is open. Autograd does not notice what is written."""
        return self._weights.whole(self._portion(span), span).data

    def whole_gradient(self, span: Span) -> Tensor:
        """The fp32 gradient of held elements of one portion, while it is open: of what ran since then."""
        return self._gradients.whole(self._portion(span), span)

    def open_weights(self, portion: Portion) -> None:
        """Makes room for what is split of the weights that a portion of a unit uses. Raises OutOfDeviceMemory."""
        for home in self._homes(portion):
            self._memory.charge(GATHERED, self._weights.num_bytes(home))
            self._weights.open(home)

    def close_weights(self, portion: Portion) -> None:
        for home in self._homes(portion):
            self._weights.close(home)
            self._memory.release(GATHERED, self._weights.num_bytes(home))

    def open_gradients(self, portion: Portion) -> None:
        """As `open_weights`, with zeros."""
        for home in self._homes(portion):
            self._memory.charge(GATHERED, self._gradients.num_bytes(home))
            self._gradients.open(home)
            self._gradients.zero_whole(home)

    def close_gradients(self, portion: Portion) -> None:
        for home in self._homes(portion):
            self._gradients.close(home)
            self._memory.release(GATHERED, self._gradients.num_bytes(home))

    def refresh_weights(self) -> None:
        """The kept weights of owned elements become what their master is."""
        for span in self._refreshed:
            self.weight(span).copy_(self.master(span))

    def zero_gradients(self) -> None:
        """Those that are not split become so when they are first asked for, or are written over by the first gradient
        that comes: there is one in nearly every step. Until then they take no memory, though they are charged."""
        self._gradients.clear()
        self._stale.clear()
        for span in dict.fromkeys((*self.state.holds, *_summed(self.state))):
            if self._home(span) not in self._gradients.split:
                self._stale.setdefault(span.fqn, []).append(span)

    def parameter(self, fqn: str, number: int = 0) -> Tensor:
        """The held rows of this parameter in the portion of its unit of this number, as a leaf that autograd may use: a
        view of the weights, whose gradients add up in the gradient buffer; no leaf where it is frozen. KeyError if this
        rank does not hold it."""
        if fqn in self.frozen:
            return self.frozen.parameter(fqn)
        if (fqn, number) not in self._leaves:
            self._leaves[fqn, number] = self._leaf(fqn, number)
        return self._leaves[fqn, number]

    @torch.no_grad()
    def add_product(self, leaf: Tensor, left_TR: Tensor, right_TC: Tensor) -> None:
        """Adds left.T @ right to the gradient of a leaf, a matrix of R x C."""
        sink = self._sinks[leaf]
        gradient_RC, is_first = sink.gradient, sink.is_first()
        if left_TR.dtype != gradient_RC.dtype:
            product_RC = left_TR.t() @ right_TC
            gradient_RC.copy_(product_RC) if is_first else gradient_RC.add_(product_RC)
        elif is_first:
            torch.mm(left_TR.t(), right_TC, out=gradient_RC)
        else:
            gradient_RC.addmm_(left_TR.t(), right_TC)

    @torch.no_grad()
    def add_rows(self, leaf: Tensor, rows_T: Tensor, slope_TC: Tensor) -> None:
        """Adds to these rows of the gradient of a leaf, a matrix of R x C."""
        sink = self._sinks[leaf]
        if sink.is_first():
            sink.gradient.zero_()
        sink.gradient.index_add_(0, rows_T, slope_TC.to(sink.gradient.dtype))

    def initialise(self, values: FirstValues, go_on: Callable[[], None] = lambda: None) -> None:
        """Becomes step 0, the same in every layout. `go_on` is called before each part, and may
        raise."""
        self.frozen.fill(lambda: values, go_on)
        wanted = [(self.weight(span), span) for span in self.state.keeps]
        wanted += [(self.master(span), span) for span in (*_apart(self.state, self._dtype), *self.state.hosted)]
        for place, span in wanted:
            for first in range(span.first, span.last, _AT_ONCE):
                go_on()
                last = min(span.last, first + _AT_ONCE)
                part = values(self._parameters[span.fqn], first, last)
                place[first - span.first : last - span.first].copy_(part)
        for span in self.state.owns:
            self.view(span.key(Kind.EXP_AVG)).zero_()
            self.view(span.key(Kind.EXP_AVG_SQ)).zero_()
        self.tag = 0

    def _home(self, span: Span) -> int:
        return home_unit(self._parameters[span.fqn])

    def _portion(self, span: Span) -> Portion:
        number, _ = next(self._cut(span))
        return Portion(self._home(span), number)

    def _homes(self, portion: Portion) -> tuple[Portion, ...]:
        return tuple(Portion(home, portion.number) for home in homes(self.model, portion.unit))

    def _leaf(self, fqn: str, number: int) -> Tensor:
        held = [span for span in self.state.holds if span.fqn == fqn]
        spans = [part for span in held for its, part in self._cut(span) if its == number]
        if not spans:
            raise KeyError(fqn, number)
        span = Span(fqn=fqn, first=spans[0].first, last=spans[-1].last)
        shape = (-1, *self._parameters[fqn].shape[1:])
        portion = self._portion(span)
        leaf = self._weights.whole_now_or_later(portion, span).view(shape).detach().requires_grad_()
        sink = Sink(
            fqn=fqn,
            home=portion.unit,
            gradient=self._gradients.whole_now_or_later(portion, span).view(shape),
            alone=spans == held,
            stale=self._stale,
            buffers=self._gradients,
        )
        leaf.register_post_accumulate_grad_hook(sink.take)  # type: ignore[no-untyped-call]
        self._sinks[leaf] = sink
        return leaf

    def _zero_stale(self, fqn: str) -> None:
        for span in self._stale.pop(fqn, ()):
            self._gradients.reopen(self._home(span))
            self._gradients.kept(self._home(span), span).zero_()


def home_unit(parameter: Parameter) -> int:
    """The unit under which a parameter is kept and synchronised: a tied embedding has two, and lives in the first."""
    return parameter.units[0]


@functools.lru_cache(maxsize=4096)
def homes(model: ModelSpec, unit: int) -> tuple[int, ...]:
    """The units under which the parameters that this one uses are kept."""
    return tuple(sorted({home_unit(parameter) for parameter in parameters(model) if unit in parameter.units}))


def _summed(state: RankState) -> tuple[Span, ...]:
    """Who runs nothing and shares with nobody still needs the gradient of what it owns."""
    return state.sums or state.owns


def _apart(state: RankState, dtype: torch.dtype) -> tuple[Span, ...]:
    """What is owned on the device and has masters that are not the kept weights themselves."""
    beside = without(state.owns, state.hosted)
    if dtype != torch.float32:
        return beside
    return tuple(span for span in beside if common((span,), state.keeps) != (span,))


def _num_bytes(spans: tuple[Span, ...]) -> int:
    return sum(span.numel for span in spans) * ELEMENT_BYTES


def _num_kept(whole: _ByUnit, kept: _ByUnit, split: frozenset[int]) -> int:
    """Elements. Of a replicated parameter each rank has a gradient, though only one of them contributes it."""
    units = {*whole, *kept}
    spans = (span for unit in units for span in (kept if unit in split else whole).get(unit, ()))
    return sum(span.numel for span in spans)


def _kept_and_whole(
    whole: _ByUnit, kept: _ByUnit, split: frozenset[int], cut: Cutter
) -> tuple[_ByUnit, dict[Portion, list[Span]]]:
    """By unit what is kept, and of units that are split the whole by portion."""
    portions: dict[Portion, list[Span]] = {}
    for unit in split & whole.keys():
        for number, part in (found for span in whole[unit] for found in cut(span)):
            portions.setdefault(Portion(unit, number), []).append(part)
    return {unit: spans for unit, spans in whole.items() if unit not in split} | {
        unit: spans for unit, spans in kept.items() if unit in split
    }, portions


def _differing(one: _ByUnit, other: _ByUnit) -> frozenset[int]:
    return frozenset(unit for unit in {*one, *other} if one.get(unit) != other.get(unit))


def _spans_by_unit(model: ModelSpec, held: tuple[Span, ...]) -> dict[int, list[Span]]:
    by_name: dict[str, list[Span]] = {}
    for span in held:
        by_name.setdefault(span.fqn, []).append(span)
    found: dict[int, list[Span]] = {}
    for parameter in parameters(model):
        if parameter.fqn in by_name:
            found.setdefault(home_unit(parameter), []).extend(by_name[parameter.fqn])
    return found


def _charge_all(charges: tuple[_Charge, ...]) -> None:
    done: list[_Charge] = []
    try:
        for ledger, what, num_bytes in charges:
            ledger.charge(what, num_bytes)
            done.append((ledger, what, num_bytes))
    except OutOfDeviceMemory:
        for ledger, what, num_bytes in done:
            ledger.release(what, num_bytes)
        raise
