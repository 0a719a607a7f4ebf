"""One rank's life in one epoch: build the state, bring it from where it is, meet the peers, step until the end.

Runs in a thread of its own, so that orders are heard meanwhile. Owns everything that belongs to the epoch; whatever it
leaves behind is told in `whole` and by the messages it says.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import structlog

from shoal_planner.job import JobSpec, parse_job
from shoal_planner.plan import Plan, parse_plan
from shoal_recovery.journal import EvaluationDone
from shoal_recovery.protection import Protection
from shoal_recovery.shard_map import is_replicated, shard_map
from shoal_recovery.state import RankState, ShardMap, Transfer
from shoal_recovery.store import open_store
from shoal_workers import devices
from shoal_workers import messages as m
from shoal_workers.allocator import after_a_loss, make_room, return_memory
from shoal_workers.beside import beside
from shoal_workers.data import samples_of
from shoal_workers.endings import ending_of
from shoal_workers.engine import Engine, Finished, StepReport
from shoal_workers.errors import EpochAbandoned
from shoal_workers.evaluation import EvaluationReport
from shoal_workers.exchange import Exchange, GlooExchange, SoloExchange
from shoal_workers.fetching import Brought, Failed, Fetcher, FetchFailed, Sources
from shoal_workers.first_values import first_values
from shoal_workers.frozen import FrozenWeights
from shoal_workers.greeting import epoch_pass_from
from shoal_workers.lending import coming
from shoal_workers.lifeline import Lifeline
from shoal_workers.live import LiveState
from shoal_workers.measure import compile_block
from shoal_workers.memory import DeviceMemory
from shoal_workers.node_exchange import nodes_of, open_exchange
from shoal_workers.parts import in_parts
from shoal_workers.preparing import open_samples
from shoal_workers.rendezvous import AgentStore, Gate
from shoal_workers.rows import Row, transfer_rows, transfers_from_rows
from shoal_workers.samples import Samples
from shoal_workers.settings import WorkerSettings
from shoal_workers.shortage import shortage
from shoal_workers.slot_maps import SlotMaps
from shoal_workers.slots import slots_of
from shoal_workers.snapshots import AgentSnapshots
from shoal_workers.tensor_parallel import tp_groups
from shoal_workers.wire import connect

log = structlog.get_logger()

_LEAST_WAIT_S = 1e-4  # to ask an exchange that has nothing to do takes less
_PATIENCE_STEPS = 10  # a peer may be busy for that many steps before it is given up
_HAND_OVER_S = 0.5  # at most the next epoch waits so long for what this one leaves with its agent


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeState:
    """Live state that is whole at `step`, laid out as `rank` of `epoch`."""

    live: LiveState
    step: int
    epoch: int
    rank: int


class EpochRun:
    def __init__(
        self,
        order: m.Assign,
        *,
        node: str,
        device: str,
        old: WholeState | None,
        frozen: FrozenWeights | None,
        settings: WorkerSettings,
        lifeline: Lifeline,
        say: Callable[[Any], None],
        maps: SlotMaps,
    ) -> None:
        self.epoch = order.epoch
        self.live: LiveState | None = None
        self._restored = False
        self._marks: Callable[[int], list[Row]] = lambda step: []  # that are new after it
        self._files: list[Row] = []
        self._order = order
        self._pass = epoch_pass_from(order.job, order.epoch, order.token)
        self._node = node
        self._device = device
        self._memory = DeviceMemory(device, order.memory_limit_bytes, order.host_limit_bytes)
        self._computes_on = devices.CPU
        self._old = old if old is not None and old.step == order.step else None
        self._frozen = frozen  # of before
        self._settings = settings
        self._lifeline = lifeline
        self._say = say
        self._maps = maps
        self._snapshots: AgentSnapshots | None = None
        self._stop_step: int | None = None
        self._more: queue.SimpleQueue[tuple[Transfer, ...]] = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._closers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"epoch-{order.epoch}", daemon=True)
        self._handing = threading.Thread(target=self._hand_over, name=f"hand-over-{order.epoch}", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def whole(self) -> WholeState | None:
        """To be asked when the run has ended. Until its own state is whole, what it came from is left as it is; that
        is None if it is of another step than the one the epoch began at, for then nobody wants it any more."""
        if self.live is not None and self.live.tag is not None:
            return WholeState(live=self.live, step=self.live.tag, epoch=self.epoch, rank=self._order.rank)
        return None if self._restored else self._old

    @property
    def frozen(self) -> FrozenWeights | None:
        """To be asked when the run has ended: weights that are the same in every step."""
        return self._frozen if self.live is None else self.live.frozen

    @property
    def left(self) -> tuple[str, ...]:
        """To be asked when the run has ended: the snapshots that it wrote and that nothing of it writes any more."""
        busy = self._snapshots is None or self._handing.is_alive() or not self._snapshots.at_rest
        return () if busy or self._snapshots is None else self._snapshots.names

    def start(self) -> None:
        self._thread.start()

    def stop_after(self, step: int) -> None:
        self._stop_step = step

    def bring(self, order: m.Bring) -> None:
        """What was told to be lacking comes from there."""
        self._more.put(transfers_from_rows(self._order.rank, order.transfers))

    def abandon(self) -> None:
        """Wakes every wait of the run; it ends soon after."""
        self._abandoned.set()
        with self._lock:
            closers = list(self._closers)
        for close in closers:
            close()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the run, and for what it leaves with its agent, as long as that is quick. Whether it has
        ended: only then others may have its state."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._handing.join(_HAND_OVER_S)
        if self._snapshots is not None:
            self._snapshots.let_go()
        return True

    def _run(self) -> None:
        self._try()
        self._handing.start()

    def _hand_over(self) -> None:
        """What was done and not yet safe would else be of use to this process alone."""
        if self._snapshots is None or self.live is None:
            return
        with devices.current(self._computes_on):
            problem = self._snapshots.hand_over(self.live, self._agent(), self._pass)
        if problem:
            log.info("live state not left with the agent", device=self._device, epoch=self.epoch, problem=problem)

    def _agent(self) -> tuple[str, int]:
        host, port = self._order.agents[self._node]
        return host, port

    def _try(self) -> None:
        try:
            is_cpu, simulated = self._order.num_threads is not None, self._settings.simulate_devices
            self._computes_on = devices.compute_device(self._device, is_cpu=is_cpu, simulated=simulated)
            with devices.current(self._computes_on):
                self._live_through()
        except BaseException as error:
            ending = ending_of(error, parse_job(self._order.spec).model, self._shortage)
            if ending is not None and not self._abandoned.is_set():
                log.warning("epoch ended", device=self._device, epoch=self.epoch, why=ending.problem.partition("\n")[0])
                if ending.fatal or ending.local:  # nothing that a peer did: where it was is worth knowing
                    traceback.print_exception(error)
                self._say(m.Trouble(epoch=self.epoch, **dataclasses.asdict(ending)))

    def _shortage(self, error: BaseException) -> str:
        plan = parse_plan(self._order.plan)
        return shortage(error, self._memory, plan, self._order.rank, self._order.plan.get("predicted", {}))

    def _live_through(self) -> None:
        began_s = time.monotonic()
        job, plan = parse_job(self._order.spec), parse_plan(self._order.plan)
        if job.train.compile:
            self._compile(job, plan)
        meeting = beside(lambda: self._meet(plan), self._computes_on)
        shards = shard_map(plan, job.model)
        state = shards.ranks[self._order.rank]
        opening = beside(lambda: self._open_snapshots(job, state), self._computes_on)
        live = self._build(job, shards)
        self.live = live
        self._progress()
        brought = self._bring_state(job, live)
        restored_s = time.monotonic()
        self._progress()
        snapshots, (exchange, gate) = opening.result(), meeting.result()
        self._restored = True
        self._old = self._frozen = None  # only now may the state of before go
        rebuilt_s = time.monotonic()
        self._say(
            m.Ready(
                epoch=self.epoch,
                step=self._order.step,
                restore_s=restored_s - began_s,
                rebuild_s=rebuilt_s - restored_s,
                num_bytes=dict(brought.num_bytes),
                source_s=dict(brought.source_s),
                shards=brought.largest_shards(),
                num_shards=len(brought.shards),
            )
        )
        samples, held_out = self._samples(job)
        if gate is not None:
            gate.pass_with_all("whole")
        engine = Engine(
            job=job,
            plan=plan,
            rank=self._order.rank,
            shards=shards,
            live=live,
            exchange=exchange,
            samples=samples,
            held_out=held_out,
            evaluated_step=self._order.step if self._order.evaluated else None,
            snapshots=snapshots,
            memory=self._memory,
            clock=time.monotonic,
            zones=self._order.zones,
        )
        outcome = engine.run(
            until_step=job.train.steps,
            report=self._report,
            stop_after=lambda: self._stop_step,
            evaluated=self._report_evaluation,
        )
        self._say(m.Left(epoch=self.epoch, step=outcome.step, finished=isinstance(outcome, Finished)))

    def _samples(self, job: JobSpec) -> tuple[Samples, Samples | None]:
        """Raises DataError where they are others than the job began with; InvalidField where none would begin."""
        opened = open_samples(job, self._settings)
        if differs := opened.differs(self._order.files):
            samples_of.cache_clear()  # they may be as they were when this node is tried again
            raise differs
        opened.training.learn(self._order.marks)
        batch = job.train.global_batch
        self._files = opened.files
        self._marks = lambda step: opened.training.marks(lambda slot: step * batch + slot)
        return opened.training, opened.evaluation

    def _build(self, job: JobSpec, shards: ShardMap) -> LiveState:
        """What survives of the state of before is used where it lies."""
        if self._abandoned.is_set():  # it may be lent to the epoch after this one by now
            raise EpochAbandoned(f"epoch {self.epoch} was abandoned before it had memory")
        state, lent = shards.ranks[self._order.rank], None
        if self._old is not None and self._order.transfers is not None:
            lent = self._old.live.lend(coming(transfers_from_rows(self._order.rank, self._order.transfers)))
        precision = job.train.precision
        return LiveState.build(
            job.model,
            state,
            precision,
            self._memory,
            device=self._computes_on,
            lent=lent,
            frozen_before=self._frozen,
        )

    def _compile(self, job: JobSpec, plan: Plan) -> None:
        """Before any peer waits for this rank, which meanwhile says that it gets on."""
        place = next(place for place in plan.places() if place.rank == self._order.rank)
        low, high = plan.pipelines[place.pipeline].stages[place.stage].sample_range(place.replica)
        if low != high:
            self._patiently(lambda: compile_block(job, place.tp, high - low, self._computes_on))

    def _patiently(self, work: Callable[[], None]) -> None:
        """What no peer waits for and may take long."""
        with ThreadPoolExecutor(max_workers=1) as pool:
            done = pool.submit(work)
            while not wait([done], timeout=self._settings.reply_timeout_s / 4).done:
                self._progress()
            done.result()

    def _go_on(self) -> None:
        if self._abandoned.is_set():
            raise EpochAbandoned(f"epoch {self.epoch} was abandoned before it began")

    def _bring_state(self, job: JobSpec, live: LiveState) -> Brought:
        brought = Brought()
        if self._order.transfers is None:
            self._patiently(lambda: live.initialise(first_values(job), self._go_on))
            return brought
        self._patiently(lambda: live.frozen.fill(lambda: first_values(job), self._go_on))
        assert job.checkpoint.uri is not None or all(row[5] != "store" for row in self._order.transfers)
        fetcher = Fetcher(
            Sources(
                job=self._order.job,
                step=self._order.step,
                old=None if self._old is None else self._old.live,
                agents={node: (host, port) for node, (host, port) in self._order.agents.items()},
                open_store=lambda: open_store(str(job.checkpoint.uri)),
                shown=self._pass,
            ),
            self._progress,
        )
        self._on_abandon(fetcher.abandon)
        self._on_abandon(lambda: self._more.put(()))
        transfers = transfers_from_rows(self._order.rank, self._order.transfers)
        wanted = tuple(transfer for transfer in transfers if not transfer.is_derived)
        while wanted:
            for part in in_parts(wanted):
                brought.add(fetcher.bring(live, part))
                self._progress()
            wanted = self._instead(brought.failed)
            brought.failed.clear()
        brought.add(fetcher.bring(live, (transfer for transfer in transfers if transfer.is_derived)))
        live.tag = self._order.step
        return brought

    def _instead(self, failed: Sequence[Failed]) -> tuple[Transfer, ...]:
        """Where else to get what failed, from whoever planned it. Raises FetchFailed, EpochAbandoned."""
        if not failed:
            return ()
        rows = [[*transfer_rows((one.transfer,)), one.problem, one.silent] for one in failed]
        self._say(m.Lacking(epoch=self.epoch, rows=rows))
        try:
            found = self._more.get(timeout=self._settings.reply_timeout_s)
        except queue.Empty:
            raise FetchFailed("supervisor", f"did not say where else to get {len(failed)} transfers") from None
        if self._abandoned.is_set():
            raise EpochAbandoned(f"epoch {self.epoch} was abandoned while its state was brought")
        return found

    def _progress(self) -> None:
        self._say(m.Progress(epoch=self.epoch))

    def _open_snapshots(self, job: JobSpec, state: RankState) -> AgentSnapshots:
        connection = connect(self._agent(), shown=self._pass)
        self._on_abandon(connection.close)  # before the first question: an agent that is stopped does not answer
        wanted = slots_of(self._order, state, job, self._maps.left)
        is_due = Protection.of(job).is_due
        snapshots = AgentSnapshots(connection, wanted, self._computes_on, self._maps, self._lifeline, is_due)
        self._snapshots = snapshots
        self._on_abandon(snapshots.abandon)
        return snapshots

    def _meet(self, plan: Plan) -> tuple[Exchange, Gate | None]:
        nodes = nodes_of(plan)
        if len(nodes) == 1:
            alone = SoloExchange(self.epoch)
            self._on_abandon(alone.abandon)
            return alone, None
        host, port = self._order.rendezvous
        patience_s = self._settings.group_timeout_s
        if plan.prediction is not None:
            patience_s = max(patience_s, _PATIENCE_STEPS * plan.prediction.step_s)
        store, prefix = AgentStore((host, port), self._settings.group_timeout_s, self._pass), self._pass.scope
        self._on_abandon(store.close)
        gate = Gate(store, f"{prefix}/gate", self._order.rank, len(nodes))
        gate.pass_with_all("begun")
        exchange = open_exchange(
            store,
            prefix,
            self._order.rank,
            nodes,
            tp_groups(plan),
            patience_s,
            epoch=self.epoch,
            host=self._agent()[0],
            device=self._computes_on if self._order.accelerated else None,
        )
        self._on_abandon(exchange.abandon)
        exchange.connect()
        return exchange, gate

    def _on_abandon(self, close: Callable[[], None]) -> None:
        with self._lock:
            self._closers.append(close)
        if self._abandoned.is_set():
            close()
            raise EpochAbandoned(f"epoch {self.epoch} was abandoned before it began")

    def _report_evaluation(self, report: EvaluationReport) -> None:
        done = EvaluationDone(
            epoch=self.epoch, step=report.step, loss=report.loss, tokens=report.tokens, duration_s=report.duration_s
        )
        assert self._snapshots is not None
        self._snapshots.done(done)
        self._say(done)

    def _forget(self) -> None:
        """And makes ready for the next state, where that will lie in memory of the process."""
        GlooExchange.forget()
        devices.return_memory(self._computes_on)
        if self._computes_on.type != "cpu":
            return_memory()
            return
        plan = parse_plan(self._order.plan)
        num_nodes = len({device.node for device in plan.devices()})
        next_bytes = after_a_loss(self._memory.used_bytes, self._memory.limit_bytes, num_nodes)
        return_memory(next_bytes)
        if not is_replicated(plan):  # else nobody takes over anything that a lost one had
            make_room(next_bytes)

    def _report(self, report: StepReport) -> None:
        if report.step == self._order.step + 1:
            # What older epochs left takes a while to go, so it goes when the recovery is over.
            threading.Thread(target=self._forget, name="forget", daemon=True).start()
        waited = report.exposure.waited_s.items()
        stepped = m.Stepped(
            epoch=self.epoch,
            step=report.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            tokens=report.tokens,
            duration_s=report.duration_s,
            samples=[list(samples) for samples in report.samples],
            moved=[[link.value, count] for link, count in report.sent.items() if count],
            exposed=[report.exposure.mean_share, report.exposure.most_share],
            waited=[[wait.value, *both] for wait, both in waited if both[1] >= _LEAST_WAIT_S],
            stalled_s=report.exposure.stalled_s,
            computed_s=report.compute_s,
            skipped=report.skipped,
            marks=self._marks(report.step),
            files=self._files if report.step == self._order.step + 1 else [],
        )
        assert self._snapshots is not None
        self._snapshots.done(stepped)
        self._say(stepped)
