"""Runs one rank's program on tensors, step after step: forward, backward, reduce, vote, update, gather.

Owns the vote and the tag of the live state. A step is done when every rank has voted for it: gradients are summed, and
nothing is written, before the vote; a rank votes only when the state of the step before is safe. Does not own what
ballots say (`ballots`), why an epoch ends (EpochAbandoned simply passes through) nor what happens then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import assert_never

import torch

from shoal_planner.job import JobSpec
from shoal_planner.parameters import chunk_units
from shoal_planner.plan import Plan
from shoal_planner.programs import (
    Backward,
    Forward,
    Gather,
    InputGradient,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
    Vote,
    WeightGradient,
)
from shoal_planner.schedule import programs, sync_order
from shoal_recovery.state import ShardMap
from shoal_workers.ballots import Ballot, Ranges, Verdict, count
from shoal_workers.circulation import Circulation, run_again
from shoal_workers.collective_routes import ways
from shoal_workers.compiling import as_written, compiled
from shoal_workers.courier import STAGING, Courier
from shoal_workers.determinism import deterministic
from shoal_workers.devices import Stopwatch, Wire
from shoal_workers.diagnosis import FirstFault, told
from shoal_workers.early import EarlyReduction
from shoal_workers.errors import StepRefused
from shoal_workers.evaluation import Evaluation, EvaluationReport
from shoal_workers.exchange import Exchange
from shoal_workers.forward_only import ForwardOnly
from shoal_workers.idle import IdleForwards, IdleRun
from shoal_workers.live import GATHERED, LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.model import Builder, Weights
from shoal_workers.optimizer import OwnedAdamW, learning_rate
from shoal_workers.outcome import Finished as Finished
from shoal_workers.outcome import NoSnapshots as NoSnapshots
from shoal_workers.outcome import Outcome as Outcome
from shoal_workers.outcome import SnapshotSink as SnapshotSink
from shoal_workers.outcome import StepReport as StepReport
from shoal_workers.outcome import Stopped as Stopped
from shoal_workers.own_modules import OwnUnits
from shoal_workers.samples import Samples
from shoal_workers.segments import ACTIVATIONS
from shoal_workers.sharing import Sharing
from shoal_workers.stage import PIPELINE, Shape, StageRun, feed
from shoal_workers.tensor_parallel import TensorGroup
from shoal_workers.traffic import Metered, Wait, links

_ONE_ZONE: Mapping[str, str] = {}
_ATTEMPTS = 2  # a step that came out non-finite is tried once more: bits do flip
_MOST_SKIPPED = 10  # in a row; what comes out non-finite that often does not get better by itself


class Engine:
    """One rank of one epoch. `live` is whole (it has a tag) and belongs to `rank` of `shards`, the map of `plan`.

    `clock` counts seconds, from anywhere; `held_out` is what evaluations are on; that of `evaluated_step` is known;
    `zones` are those of nodes. Raises InvalidField where an algorithm of the plan is not for its replicas.
    """

    def __init__(
        self,
        job: JobSpec,
        plan: Plan,
        rank: int,
        shards: ShardMap,
        live: LiveState,
        exchange: Exchange,
        samples: Samples,
        snapshots: SnapshotSink,
        memory: DeviceMemory,
        clock: Callable[[], float],
        held_out: Samples | None = None,
        evaluated_step: int | None = None,
        zones: Mapping[str, str] = _ONE_ZONE,
    ) -> None:
        self._job = job
        self._place = next(place for place in plan.places() if place.rank == rank)
        self._devices = tuple(str(place.device) for place in plan.places())
        self._program = programs(plan, job.model)[rank]
        self._live = live
        self._exchange = exchange = Metered(exchange, links(plan, rank, zones), clock)
        self._snapshots = snapshots
        self._memory = memory
        self._clock = clock
        self._feed = feed(plan, self._place, samples)
        self._max_ranges = max(pipeline.micro_batches for pipeline in plan.pipelines)
        self._wire = Wire(device=live.device, on_device=exchange.on_device)
        self._courier = courier = Courier(exchange, memory, wire=self._wire)
        chunks = chunk_units(plan, self._place.pipeline, self._place.stage)
        again = run_again(plan.pipelines[self._place.pipeline].stages[self._place.stage], chunks)
        ahead = plan.overlap.shards
        self._circulation = Circulation(
            shards,
            job.model,
            rank,
            live,
            courier,
            memory,
            plan.sharding,
            ahead=ahead,
            made=self._made,
            again=again,
            leave=self._leave_if_abandoned,
        )
        self._uses = self._circulation.uses(self._program, chunks)
        self._stage = self._build_stage(plan, chunks)
        self._samples = samples
        self._forward_only = self._build_forward_only()
        found = ways(plan, job.model, shards, rank, zones)
        self._sharing = Sharing(found, sync_order(plan, job.model), live, exchange, courier)
        early, blocks = plan.overlap.gradients, self._circulation.blocks
        reduce, try_reduce = self._sharing.reduce, self._sharing.try_reduce
        self._reduction = EarlyReduction(self._program, chunks, blocks, reduce, try_reduce, ahead=early)
        self._optimizer = OwnedAdamW(job.train, live)
        self._evaluation = Evaluation(
            job.train,
            held_out,
            self._forward_only,
            exchange,
            known_step=evaluated_step,
            counts=self._place.tp_rank == 0,
            clock=clock,
        )
        self._evaluated: Callable[[EvaluationReport], None] | None = None
        self._stopwatch = Stopwatch(live.device, clock)
        self._num_skipped = 0  # in a row
        self._verdict: Verdict | None = None  # of the step under way

    def run(
        self,
        *,
        until_step: int,
        report: Callable[[StepReport], None],
        stop_after: Callable[[], int | None],
        evaluated: Callable[[EvaluationReport], None] | None = None,
    ) -> Outcome:
        """Steps from the one after the live state's to `until_step`, or to the earliest step that `stop_after` names on
        any rank (asked once per step). Raises EpochAbandoned, PeerLost, OutOfDeviceMemory, StepRefused.
        """
        assert self._live.tag is not None, "the live state is torn"
        self._evaluated = evaluated
        _, self._waited_s = self._exchange.take_waited()
        try:
            with deterministic(self._job.train.deterministic):
                return self._run(self._live.tag, until_step, report, stop_after)
        finally:
            for what in (ACTIVATIONS, PIPELINE, STAGING, GATHERED):
                self._memory.release_all(what)

    def _run(
        self, step: int, until_step: int, report: Callable[[StepReport], None], stop_after: Callable[[], int | None]
    ) -> Outcome:
        while step < until_step:
            step += 1
            if self._run_step(step, report, stop_after) <= step < until_step:
                self._protect(step)
                return Stopped(step=step)
        self._protect(step)
        self._evaluate(step)
        return Finished(step=step)

    def _protect(self, step: int) -> None:
        self._snapshots.begin(step, self._live, always=True)
        self._snapshots.wait_safe(step)

    def _evaluate(self, step: int) -> float:
        """If it is due. The seconds that it took."""
        found = self._evaluation.after(step)
        if found is None:
            return 0.0
        if self._evaluated is not None:
            self._evaluated(found)
        return found.duration_s

    def _run_step(self, step: int, report: Callable[[StepReport], None], stop_after: Callable[[], int | None]) -> float:
        """The earliest step after which anyone is to stop. The step before is evaluated while its state is copied."""
        began_s = self._clock()
        with self._exchange.timed(Wait.SAFETY):
            self._snapshots.begin(step - 1, self._live)
        began_s += self._evaluate(step - 1)
        verdict, skipped = self._try(step, stop_after)
        report(
            StepReport(
                step=step,
                loss=verdict.loss,
                grad_norm=verdict.grad_norm,
                lr=learning_rate(self._job.train, step),
                tokens=self._job.train.tokens_per_step,
                duration_s=self._clock() - began_s,
                compute_s=self._stopwatch.take(),
                samples=verdict.samples,
                sent=verdict.sent,
                exposure=verdict.exposure,
                waited_s=self._waited_s,
                moved=self._exchange.take(),
                skipped=skipped,
            )
        )
        return verdict.stop_after

    def _try(self, step: int, stop_after: Callable[[], int | None]) -> tuple[Verdict, str | None]:
        """The verdict, and why the step was skipped if it was. All ranks come to the same verdict, so all try again,
        skip the step or refuse it, or none does."""
        for _ in range(_ATTEMPTS):
            verdict = self._attempt(step, stop_after)
            if not verdict.not_finite and not verdict.num_targets:
                return self._left_alone(step, verdict, "none of its samples has a target: nothing is learnt of it")
            if not verdict.not_finite:
                self._num_skipped = 0
                return verdict, None
        self._num_skipped += 1
        problem = self._diagnosed(step, verdict)
        if self._job.train.on_nan == "fail":
            raise StepRefused(step, problem)
        if self._num_skipped == _MOST_SKIPPED:
            raise StepRefused(step, f"{problem}; it would be the step number {_MOST_SKIPPED} in a row to be skipped")
        return self._left_alone(step, verdict, problem)

    def _left_alone(self, step: int, verdict: Verdict, problem: str) -> tuple[Verdict, str]:
        with self._exchange.commit():
            self._live.tag = step  # the state of the step before, as nothing was written
        return verdict, problem

    def _diagnosed(self, step: int, verdict: Verdict) -> str:
        first, layers = FirstFault(), self._job.model.layers
        self._forward_only.run(step, self._samples, first)
        answers = self._exchange.all_gather(first.answer(self._live, layers))
        return told(answers, verdict.not_finite, self._devices, layers)

    def _attempt(self, step: int, stop_after: Callable[[], int | None]) -> Verdict:
        """Leaves the state as it is if the verdict says that something is not finite, or that nothing was to learn."""
        self._live.zero_gradients()
        self._circulation.begin(self._uses)
        self._sharing.begin()
        self._reduction.begin()
        self._stage.begin(step)
        self._verdict = None
        for instruction in self._program:
            self._leave_if_abandoned()
            if isinstance(instruction, Vote):
                self._verdict = self._vote(step, stop_after)
                if self._verdict.not_finite or not self._verdict.num_targets:
                    return self._verdict
            else:
                self._execute(instruction, step)
        self._sharing.settle()
        with self._exchange.commit():
            self._live.tag = step
        assert self._verdict is not None, "a program without a vote"
        return self._verdict

    def _leave_if_abandoned(self) -> None:
        """Raises EpochAbandoned. A rank that exchanges nothing for a while is not to hold up the next epoch either."""
        with self._exchange.commit():
            pass

    def _execute(self, instruction: Instruction, step: int) -> None:
        match instruction:
            case Forward():
                self._timed(lambda: self._stage.forward(instruction))
            case Backward() | InputGradient():
                self._timed(lambda: self._stage.backward(instruction))
            case WeightGradient():
                self._timed(lambda: self._stage.weight_gradients(instruction))
            case ReceiveActivation() | ReceiveGradient():
                self._stage.receive(instruction)
            case SendActivation() | SendGradient():
                self._stage.send(instruction)
            case Reduce():
                self._stage.end()
                self._circulation.settle()
                self._reduction.reduce(instruction.unit)
            case Update():
                self._timed(lambda: self._update(step))
            case Gather():
                self._sharing.gather(instruction.unit)
            case Vote():
                raise AssertionError("a vote is not executed, it is asked")
            case _:
                assert_never(instruction)

    def _timed(self, work: Callable[[], None]) -> None:
        self._stopwatch.run(work, lambda: self._exchange.waited_but_for_tensors_s)

    def _vote(self, step: int, stop_after: Callable[[], int | None]) -> Verdict:
        """Raises StepRefused on all ranks or on none."""
        self._sharing.settle()
        (loss, num_targets), square = self._own_loss(), self._own_gradient_square()
        with self._exchange.timed(Wait.SAFETY):
            self._snapshots.wait_safe(step - 1)
        stop = stop_after()
        elapsed_s, self._waited_s = self._exchange.take_waited()
        ballot = Ballot(
            step=step,
            epoch=self._exchange.epoch,
            loss=loss,
            num_targets=num_targets,
            grad_square=square,
            stop_after=math.inf if stop is None else float(stop),
            fed=self._fed(step),
            sent=self._exchange.take_sent(),
            elapsed_s=elapsed_s,
            waited_s=self._waited_s,
        )
        ballots = self._exchange.all_gather(ballot.packed(self._max_ranges))
        return count(ballots, step, self._exchange.epoch, self._job.train.tokens_per_step)

    def _own_loss(self) -> tuple[float, int]:
        """And over how many targets. The ranks of a replica all have its loss: one of them counts it."""
        return (self._stage.loss, self._stage.num_targets) if self._place.tp_rank == 0 else (0.0, 0)

    def _own_gradient_square(self) -> float:
        gradients = [self._live.gradient(span) for span in self._live.state.vouches]
        return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0

    def _update(self, step: int) -> None:
        assert self._verdict is not None, "an update before the vote"
        for update in self._optimizer.updates(step, self._verdict.grad_norm, self._verdict.scale):
            with self._exchange.commit():
                self._live.tag = None
                update()

    def _fed(self, step: int) -> Ranges:
        feeds = self._place.stage == 0 and self._place.tp_rank == 0
        return self._feed.fed(step, self._program) if feeds else ()

    def _made(self, unit: int) -> None:
        self._reduction.made(unit)

    def _build_forward_only(self) -> ForwardOnly | IdleForwards:
        wanted = tuple(use for use in self._uses if not use.backward)
        if isinstance(self._stage, IdleRun):
            return IdleForwards(wanted, self._circulation)
        return ForwardOnly(
            self._stage, self._feed, self._program, self._exchange, self._memory, self._circulation, wanted
        )

    def _build_stage(self, plan: Plan, chunks: tuple[tuple[int, ...], ...]) -> StageRun | IdleRun:
        split = plan.schedule == "zero_bubble"
        if self._feed.low == self._feed.high:
            return IdleRun(chunks, self._circulation, split=split)
        job, place, live = self._job, self._place, self._live
        group = TensorGroup(
            rank=place.tp_rank, size=place.tp, reducer=self._exchange, chunks=plan.overlap.tensor_chunks
        )
        slicing, gates = live.state.slicing, self._circulation.gates
        weights = Weights(model=job.model, lookup=live.parameter, group=group, slicing=slicing, gates=gates)
        way, add = compiled if job.train.compile else as_written, (live.add_product, live.add_rows)
        own = None if job.model.module is None else OwnUnits(job.model, job.train.seed, live.device, live.dtype)
        builder = Builder(weights, job.train.seq_len, live.device, *add, split=split, way=way, own=own)
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        units = [[builder.unit(number, stage.recompute_of(number - 1)) for number in numbers] for numbers in chunks]
        shape = Shape(seq_len=job.train.seq_len, hidden=job.model.hidden, dtype=live.dtype, wire=self._wire)
        parts = (units, self._feed, shape, self._program, self._exchange, self._memory, self._circulation)
        return StageRun(*parts, ahead=plan.overlap.stages)
