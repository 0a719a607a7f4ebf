"""Within a step: the weights of a unit come together before it computes, and its gradients go to their parts after.

Owns when these are on their way. All ranks of a stage walk their units in one order, and the portions of each
(`slices`), so whoever shares with whom exchanges in step. Where the plan has that overlap, weights are under way one
portion ahead, in buffers of the wire, and gradients while the next portion computes (`scattering`). Nothing of it is
state: what was gathered is dropped after its use, and sums begin anew with every attempt at a step. After an abandoned
wait nothing is closed, as something may still arrive.

Does not own what passes once a step (`sharing`), nor who gives what to whom (`reduction`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shoal_planner.job import ModelSpec
from shoal_planner.levels import Sharding
from shoal_planner.plan import Stage
from shoal_planner.programs import Backward, Forward, InputGradient, Program
from shoal_planner.slices import Portion, num_slices
from shoal_recovery.state import ShardMap, Span, common
from shoal_workers.courier import Courier, UnderWay
from shoal_workers.forms import Blocks, Form, Plain, Source
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.reduction import NO_ROUTES, Routes, by_user, fetch_routes, near_routes
from shoal_workers.scattering import Part, Scattering
from shoal_workers.tags import Purpose, tag

_ByPortion = Mapping[Portion, tuple[Span, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The weights of a portion of a unit are needed, in a forward or in a backward."""

    portion: Portion
    backward: bool


def run_again(stage: Stage, chunks: Sequence[Sequence[int]]) -> frozenset[int]:
    """The units of a stage whose forward runs again in their backward."""
    return frozenset(unit for units in chunks for unit in units if stage.recompute_of(unit - 1) == "full")


class Gate:
    """Lets through one slice of a unit: between `enter` and `leave` its weights are there, and in a backward its
    gradients add up. Slices of a forward come in the order of their numbers, those of a backward in the opposite."""

    def __init__(self, portion: Portion, gathering: _Gathering, scattering: Scattering) -> None:
        self._portion = portion
        self._gathering = gathering
        self._scattering = scattering

    def enter_forward(self) -> None:
        self._gathering.open(self._portion)

    def leave_forward(self) -> None:
        self._gathering.close(self._portion)

    def enter_backward(self) -> None:
        self._gathering.open(self._portion)
        self._scattering.open(self._portion)

    def leave_backward(self) -> None:
        self._scattering.close(self._portion, Part.ALL)
        self._gathering.close(self._portion)


class Circulation:
    """Of one rank. `begin` comes before each attempt at a step and each run of forwards alone, `settle` after the last
    backward of a step. Unless units pass `ahead`, each is waited for where it is needed or made. `made` is told of each
    unit whose gradients a backward has added to; `again` are those that `run_again`. `leave` is called before each,
    and raises when nobody waits for it any more."""

    def __init__(
        self,
        shards: ShardMap,
        model: ModelSpec,
        rank: int,
        live: LiveState,
        courier: Courier,
        memory: DeviceMemory,
        sharding: Sharding,
        *,
        ahead: bool,
        made: Callable[[int], None] = lambda unit: None,
        again: frozenset[int] = frozenset(),
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.blocks = range(1, model.layers + 1)
        self._model = model
        self._slicing = live.state.slicing
        self._made = made
        self._again = again
        self._leave = leave
        self._gathering = _Gathering(shards, model, rank, live, courier, sharding, ahead=ahead)
        self._scattering = Scattering(shards, model, rank, live, courier, memory, sharding, ahead=ahead)

    def begin(self, wanted: tuple[Use, ...]) -> None:
        """What follows uses the weights of units in this order."""
        self._gathering.begin(wanted)
        self._scattering.begin()

    def uses(self, program: Program, chunks: Sequence[Sequence[int]]) -> tuple[Use, ...]:
        """Of the weights of all units of a stage in one step, in order; `chunks` are its units."""
        found: list[Use] = []
        for item in program:
            if isinstance(item, Forward):
                for unit in chunks[item.chunk]:
                    portions = (Portion(unit), *self._slices(unit))
                    found.extend(Use(portion=portion, backward=False) for portion in portions)
            elif isinstance(item, Backward | InputGradient):
                for unit in reversed(chunks[item.chunk]):
                    slices = self._slices(unit)
                    portions = (Portion(unit), *(slices if unit in self._again else ()), *reversed(slices))
                    found.extend(Use(portion=portion, backward=True) for portion in portions)
        return tuple(found)

    def gates(self, unit: int) -> tuple[Gate, ...]:
        """Of the slices of the unit, in the order of its forward; all pass within `weights` and, in a backward,
        `gradients` of the unit, in the order of uses."""
        return tuple(Gate(portion, self._gathering, self._scattering) for portion in self._slices(unit))

    @contextmanager
    def weights(self, unit: int) -> Iterator[None]:
        """Inside it the weights of the unit are there, but for its slices; it is entered in the order of uses."""
        self._leave()
        self._gathering.open(Portion(unit))
        yield
        self._gathering.close(Portion(unit))

    @contextmanager
    def gradients(self, unit: int, part: Part = Part.ALL) -> Iterator[None]:
        """Inside it this part of the unit's gradients may add up, but for its slices; then it goes on to where it
        belongs."""
        self._scattering.open(Portion(unit))
        yield
        self._scattering.close(Portion(unit), part)
        self._made(unit)

    def pass_forward(self, unit: int) -> None:
        """What a forward of the unit does here, for those who only give."""
        with self.weights(unit):
            self._pass_slices(unit)

    def pass_backward(self, unit: int, part: Part) -> None:
        with self.weights(unit), self.gradients(unit, part):
            if unit in self._again:
                self._pass_slices(unit)
            for gate in reversed(self.gates(unit)):
                gate.enter_backward()
                gate.leave_backward()

    def _pass_slices(self, unit: int) -> None:
        for gate in self.gates(unit):
            gate.enter_forward()
            gate.leave_forward()

    def _slices(self, unit: int) -> tuple[Portion, ...]:
        return tuple(Portion(unit, 1 + index) for index in range(num_slices(self._model, unit, self._slicing)))

    def settle(self) -> None:
        """Afterwards all gradients are in their parts."""
        self._scattering.settle()


class _Gathering:
    def __init__(
        self,
        shards: ShardMap,
        model: ModelSpec,
        rank: int,
        live: LiveState,
        courier: Courier,
        sharding: Sharding,
        *,
        ahead: bool,
    ) -> None:
        self._live = live
        self._courier = courier
        state = live.state
        plain = Plain(live.dtype)
        form: Form = plain if sharding.gather == "plain" else Blocks(8, live.dtype, model)
        # Who runs nothing gathers only what its node is to keep.
        self._target = live.whole_weight if state.holds else live.secondary_weight
        own = by_user(live.split_weights(common(state.keeps, state.holds or state.near)), model, state.slicing)
        fetched = _Way(routes=fetch_routes(shards, model, rank), own=own, form=form, source=live.weight)
        self._secondary: _ByPortion = {}
        self._ways = {False: fetched, True: fetched}
        if sharding.secondary:
            self._secondary = by_user(common(state.near, state.holds), model, state.slicing)
            near = near_routes(shards, model, rank)
            self._ways[True] = _Way(routes=near, own=self._secondary, form=plain, source=live.secondary_weight)
        self._shares = sharding.weights != "none"
        self._one_ahead = ahead
        self.begin(())

    def begin(self, wanted: tuple[Use, ...]) -> None:
        self._wanted = wanted
        self._next = 0
        self._ahead: UnderWay | None = None

    def open(self, portion: Portion) -> None:
        if not self._shares:
            return
        use = self._wanted[self._next]
        assert use.portion == portion, (use, portion)
        here = self._ahead or self._start()
        self._fill(use, here)
        self._next += 1
        self._ahead = self._start() if self._one_ahead and self._next < len(self._wanted) else None

    def close(self, portion: Portion) -> None:
        if self._shares:
            self._live.close_weights(portion)

    def _start(self) -> UnderWay:
        """What is needed next."""
        use = self._wanted[self._next]
        way = self._ways[use.backward]
        number = tag(Purpose.FETCH, self._next)
        return self._courier.start(way.routes.get(use.portion, NO_ROUTES), number, way.form, way.source)

    def _fill(self, use: Use, came: UnderWay) -> None:
        """All compute with the same weights: what a rank keeps itself goes through the form of what it sends."""
        way, live = self._ways[use.backward], self._live
        arrivals = [parts for _, parts in self._courier.arrived(came)]
        live.open_weights(use.portion)
        if spans := way.own.get(use.portion):
            arrivals.append(way.form.unpack(way.form.pack(spans, way.source), spans))
        for parts in arrivals:
            for span, part in parts:
                self._target(span).copy_(part)
        self._courier.finish(came)
        if not use.backward:
            for span in self._secondary.get(use.portion, ()):
                live.secondary_weight(span).copy_(live.whole_weight(span))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How weights come together: what is given and taken, what the rank has itself, and how it is sent from where."""

    routes: Routes
    own: _ByPortion
    form: Form
    source: Source
