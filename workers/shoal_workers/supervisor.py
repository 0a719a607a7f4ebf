"""The supervisor of one job: observe, decide(), act, record. It recovers the job while the control plane is down, and
ranks step on while it is down itself. Knows nothing of Ray: the cluster is an interface.

One thread calls `run`; `entries_after`, `cancel`, `pause` and `share` may be called from others.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import assert_never

import structlog

from shoal_planner.job import JobSpec, job_to_mapping
from shoal_recovery.decide import ChangePlan, Drain, End, Keep, Member, Observation, Pause, Rules, Save, Wait, decide
from shoal_recovery.evidence import CutOff, may_be_cut_off
from shoal_recovery.journal import AT_REST, Entry, EvaluationDone, JobState, NodeJoined
from shoal_workers import messages as m
from shoal_workers.beginning import Beginning
from shoal_workers.change import Interrupted, retire
from shoal_workers.changer import Changer
from shoal_workers.checkpoint_commits import CheckpointCommits
from shoal_workers.doomed import Doomed
from shoal_workers.epoch_view import EpochView
from shoal_workers.keeper import Keeper, every_agent, read_journals
from shoal_workers.last_step import LastStep
from shoal_workers.measuring import Measuring
from shoal_workers.nodes import Cluster
from shoal_workers.pausing import BY_USER, Pausing
from shoal_workers.pulse import Pulse
from shoal_workers.reaching import Reaching
from shoal_workers.record import JobRecord
from shoal_workers.roster import Closed, Contact, Event, NodeReady, Roster, Said, ask
from shoal_workers.safekeeping import owners
from shoal_workers.save_now import SaveNow
from shoal_workers.settings import WorkerSettings
from shoal_workers.share import Share, ToldShare
from shoal_workers.stalls import Stalls
from shoal_workers.stragglers import Stragglers
from shoal_workers.whole_steps import WholeSteps
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()

_TICK_S = 0.05
_REFRESH_S = 0.25
_ADOPT_WAIT_S = 20.0


class Supervisor:
    """`restarted`: this one takes the place of one that died, whose journal the agents keep; `history` is what the
    control plane has of it. `paused`: the user wants the job to rest. `share`: which nodes it was told to use."""

    def __init__(
        self,
        *,
        job: str,
        spec: JobSpec,
        cluster: Cluster,
        settings: WorkerSettings,
        restarted: bool,
        history: tuple[Entry, ...] = (),
        paused: bool = False,
        share: ToldShare | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._job = job
        self._spec = spec
        self._cluster = cluster
        self._restarted = restarted
        self._history = history
        self._clock = clock
        self._settings = settings
        self._rules = Rules(
            silence_s=settings.silence_s,
            silence_confirmed_s=settings.silence_confirmed_s,
            cut_off_s=settings.cut_off_s,
        )
        self._pulse = Pulse(clock)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        order = m.Prepare(spec=job_to_mapping(spec))
        self._roster = Roster(cluster, job, self._events, clock, self._pulse.awake_s, order=order)
        self._roster.forgive_s = self._rules.out_of_sight_s
        self._cut_off = CutOff(self._rules, clock)
        self._record = JobRecord(Keeper(job, wall_clock), clock)
        self._commits = CheckpointCommits(job, spec, cluster.life(), self._record.append)
        self._beginning = Beginning(spec, cluster, self._record, self._commits)
        self._share = Share(self._record.append, share)
        self._pausing = Pausing(spec, self._record, self._commits, clock, paused)
        self._save_now = SaveNow(job, spec, self._record, clock)
        self._whole_steps = WholeSteps(job, self._record)
        self._last_step = LastStep(spec, self._record, self._commits, clock, settings.last_step_wait_s)
        self._doomed = Doomed(self._record, clock, settings.notice_overdue_s)
        self._stragglers = Stragglers(spec, self._record, clock)
        self._reaching = Reaching(self._roster)
        self._stalls = Stalls(spec, self._record, settings.stalled_s, self._roster.wordless_s)
        self._measuring = Measuring(
            spec,
            self._roster,
            self._record,
            settings,
            overrides=lambda: cluster.snapshot().overrides,
            clock=clock,
            wall_clock=wall_clock,
        )
        self._cancel = threading.Event()
        self._changer = Changer(
            job=job,
            spec=spec,
            cluster=cluster,
            roster=self._roster,
            record=self._record,
            commits=self._commits,
            settings=settings,
            measuring=self._measuring,
            clock=clock,
            listen=self._listen,
            is_cancelled=self._cancel.is_set,
        )
        self._began_s = clock()
        self._adopted: EpochView | None = None
        self._next_refresh_s = clock()
        self._knows_history = threading.Event()
        self.ended = threading.Event()

    # --- from other threads ---

    def entries_after(self, seq: int, wait_s: float) -> tuple[Entry, ...]:
        return self._record.keeper.entries_after(seq, wait_s)

    def last_seq(self) -> int | None:
        """Of the last journal entry that it knows; None while it still looks for what was written before it."""
        return len(self._record.keeper.entries()) if self._knows_history.is_set() else None

    def signs(self) -> dict[str, float]:
        """By node, for how many seconds nothing was heard of it."""
        return self._roster.silences_s()

    def cancel(self) -> None:
        self._cancel.set()

    def pause(self, wanted: bool, code: str = BY_USER[0], why: str = BY_USER[1]) -> bool:
        """Whether it comes in time: a job that rests already stays as it is."""
        self._pausing.want(wanted, code, why)
        return self._record.state not in AT_REST

    def checkpoint(self, number: int) -> None:
        """A user wants the newest step in the store, for the `number`th time."""
        self._save_now.want(number)

    def share(self, told: ToldShare) -> None:
        self._share.tell(told)

    # --- the loop ---

    def run(self) -> None:
        """Until the job is over, or rests."""
        self._pulse.start()
        if self._restarted or self._history:
            self._adopt()
        self._roster.epoch = self._changer.highest_epoch
        self._knows_history.set()
        self._heed_share()
        if self._record.state is JobState.QUEUED:
            self._beginning.fresh()
        elif self._record.state is JobState.PAUSED and not self._restarted:
            self._beginning.again(self._pausing.wanted)
        while self._record.state not in AT_REST and self._commits.lost_to is None:
            self.tick()
        self._wind_up()

    def tick(self) -> None:
        """One round: listen, observe, decide, act."""
        self._listen(_TICK_S)
        self._heed_share()
        self._heed_notices()
        self._save_now.look(self._changer.epoch, self._roster.agents)
        self._whole_steps.look(self._changer.epoch, self._roster.agents)
        seen = self._observe()
        is_cut_off = may_be_cut_off(seen.sight, self._rules)
        if self._cut_off.ends(is_cut_off):
            self._roster.sees_again()
            seen = self._observe()
        patience_s = self._rules.out_of_sight_s if is_cut_off else self._rules.silence_s
        if dropped := self._roster.drop(self._vital(), self._clock(), patience_s):
            self._record.present -= dropped
            seen = self._observe()
        decision = decide(seen, self._rules)
        try:
            match decision:
                case Keep():
                    pass
                case ChangePlan():
                    self._changer.change(decision)
                    self._expect_checkpoints()
                case Drain():
                    joining = seen.ready - seen.going if decision.cause == "node_joined" else frozenset[str]()
                    self._changer.drain(decision, joining)
                case Save():
                    self._save(decision)
                case Pause():
                    self._record.enter(JobState.PAUSED, decision.code, decision.reason)
                case Wait():
                    self._record.enter(JobState.WAITING, "waiting", decision.reason)
                case End():
                    self._record.enter(decision.state, decision.code, decision.reason)
                case _:
                    assert_never(decision)
        except Interrupted as error:
            log.info("change of plan interrupted", job=self._job, why=str(error))

    def _save(self, decision: Save) -> None:
        """Raises Interrupted."""
        if decision.code == "storing_last_step":
            self._last_step.saves(self._changer.epoch)
        else:
            self._record.say(decision.code, decision.reason)
        step = None
        try:
            step = self._changer.save()
        finally:
            if decision.code == "rescuing":
                self._changer.prospects.rescue.saves(step)
        if decision.code == "pausing":
            self._pausing.saves(step)

    def _adopt(self) -> None:
        """Reads what the supervisor before this one wrote, and takes its epoch over as it is.

        What is said meanwhile waits to be heard: it is about an epoch that is not known yet, and nothing may be
        written into a journal that was not read yet.
        """
        deadline_s = self._clock() + _ADOPT_WAIT_S
        entries = read_journals(self._job, every_agent(self._cluster, _ADOPT_WAIT_S), ask, self._history)
        self._share.adopt(entries)
        self._record.adopt(entries)
        if (kept := self._share.nodes) is not None:
            known = self._record.snapshots.get(self._record.epoch)
            self._roster.only = kept.union(node.id for node in known.nodes) if known is not None else kept
        self._roster.refresh()
        while self._clock() < deadline_s and not self._all_there():
            time.sleep(_TICK_S)
            self._roster.refresh()
        self._commits.adopt(self._record.checkpoints, self._record.store_failed)
        self._changer.adopt(elsewhere=self._record.life not in (None, self._cluster.life()))
        self._adopted = self._changer.epoch
        self._expect_checkpoints()
        self._began_s = self._clock()
        if self._record.state not in (JobState.QUEUED, *AT_REST):
            self._beginning.enter_cluster()
        if self._record.state is JobState.DRAINING:  # the order may have died with the one who gave it
            self._changer.drain(Drain(cause="node_joined", reason="Draining again."))

    def _heed_share(self) -> None:
        """Nodes that belong to other jobs are left first, and then forgotten."""
        self._share.hear()
        epoch, kept = self._changer.epoch, self._share.nodes
        self._roster.keep_to(None if kept is None else kept | self._vital())
        stepped = not self._record.plans if epoch is None else epoch.last_step > epoch.step
        left = self._share.settle(self._vital(), elsewhere=stepped)
        if left is not None:
            gone = self._record.keep_to(left)
            threading.Thread(target=self._clear, args=(gone,), name="clear", daemon=True).start()

    def _heed_notices(self) -> None:
        """Of a node that is to go away, and was left, no rank stays: whoever ends it may wait for them. What its agent
        holds stays, and so does the node itself where the plan in its place does not hold."""
        there = self._roster.there(self._clock(), self._settings.silence_s)
        self._doomed.settle(there)
        self._record.present -= self._roster.going - there
        epoch, going = self._changer.epoch, frozenset[str]()
        if epoch is not None and self._record.state is JobState.RUNNING and epoch.last_step > epoch.step:
            going = frozenset(node for node, _ in self._doomed.told()) - self._vital()
        if left := self._roster.leave(going):
            arguments = (self._job, left)
            threading.Thread(target=self._cluster.end_ranks, args=arguments, name="leave", daemon=True).start()

    def _clear(self, nodes: frozenset[str]) -> None:
        """Of processes and snapshots of this job."""
        self._cluster.end_ranks(self._job, nodes)
        for agent in self._agents():
            if agent.node in nodes:
                retire(self._job, (agent,), None, self._settings.reply_timeout_s)

    def _all_there(self) -> bool:
        """Of what an epoch under way here needs; a node that comes to it may take its time."""
        awaited = expected = self._roster.expected
        if self._record.life == self._cluster.life() and self._record.state is JobState.RUNNING:
            awaited = (expected & self._changer.recorded()) or expected
        return bool(awaited) and awaited <= self._roster.ready()

    def _wind_up(self) -> None:
        self._record.keeper.flush(5.0)
        self._cluster.end_ranks(self._job)
        kept_elsewhere = self._record.newest_step in {0, *self._record.checkpoints}
        if self._record.state is not JobState.FAILED or kept_elsewhere:  # else nobody could have it any more
            self._retire_all()
        self._commits.close(over=self._record.state in (JobState.SUCCEEDED, JobState.CANCELLED))
        self._roster.close()
        self._pulse.stop()
        self._record.keeper.close()
        self.ended.set()

    def _retire_all(self) -> None:
        for agent in self._agents():
            try:
                ask(agent.address, m.Retire(job=self._job, before_epoch=None), 5.0)
            except ConnectionClosed:
                log.info("agent not told of the end", node=agent.node)

    def _agents(self) -> tuple[Contact, ...]:
        """Those that answer."""
        return self._roster.living_agents(self._clock(), self._settings.silence_confirmed_s)

    # --- listening ---

    def _listen(self, timeout_s: float) -> None:
        """Takes everything that was said, waiting for the first of it; looks at the cluster now and then."""
        if self._clock() >= self._next_refresh_s:
            self._roster.refresh()
            self._record.keeper.keep_on(agent.address for agent in self._roster.agents(self._roster.ready()))
            self._next_refresh_s = self._clock() + _REFRESH_S
        try:
            self._hear(self._events.get(timeout=timeout_s))
            while True:
                self._hear(self._events.get_nowait())
        except queue.Empty:
            pass

    def _hear(self, event: Event) -> None:
        match event:
            case Said(contact, message):
                self._hear_message(contact, message)
            case Closed():
                pass  # the contact itself shows it when it is observed
            case NodeReady(seen):
                if seen.node.id not in self._record.present and self._share.allows(seen.node.id):
                    node = seen.node
                    self._record.append(NodeJoined(node=node.id, device=node.device, devices=node.devices))
            case _:
                assert_never(event)

    def _hear_message(self, contact: Contact, message: object) -> None:
        match message:
            case m.Halted():
                self._changer.answers[contact] = message
            case m.Measured() if message.problem:
                self._record.enter(JobState.FAILED, "user_code_failed", f"{contact.device}: {message.problem}")
            case m.Measured():
                self._measuring.heard(contact, message)
            case m.Ready() | m.Left() | m.Trouble():
                if self._changer.epoch is not None:
                    self._changer.epoch.hear(contact.device, message, self._clock())
                    if self._changer.epoch.ended is not None:  # perhaps without a step
                        self._changer.stepped(message.epoch)
            case m.Lacking():
                if self._changer.supply is not None:
                    self._changer.supply.hear(contact, message)
            case m.Progress() | m.Prepared():
                pass  # that it was said is all: the contact knows when
            case m.Stepped():
                self._stepped(contact, message)
            case EvaluationDone():
                self._evaluated(message)
            case m.Uploaded():
                self._commits.uploaded(message)
            case m.UploadDelayed():
                self._commits.fails(message.step, message.problem)
            case m.RoomShort():
                self._record.room_short(contact.node, message.num_bytes, message.room_bytes, on_disk=message.on_disk)
            case m.Noticed() | m.Withdrawn():
                self._doomed.hear(contact.node, message)
            case m.Hello():
                self._greeted(contact, message)
            case _:
                log.warning("unexpected message", contact=contact.name, message=str(message))

    def _greeted(self, contact: Contact, message: m.Hello) -> None:
        self._changer.highest_epoch = max(self._changer.highest_epoch, message.epoch)
        epoch = self._changer.epoch
        steps = self._record.state in (JobState.RUNNING, JobState.DRAINING)
        if epoch is not None and steps and contact.device in epoch.plan.devices() and message.epoch != epoch.number:
            # It died and was started anew while nobody watched; a rank that is alone has no peer who would say so. Or
            # somebody began a change of plan that was never written down, and its epoch is not ours to watch.
            problem = f"its process was started anew and knows nothing of epoch {epoch.number}"
            if message.epoch > epoch.number:
                problem = f"it has left epoch {epoch.number} for epoch {message.epoch}, of which nothing is written"
            epoch.hear(contact.device, m.Trouble(epoch=epoch.number, problem=problem, fatal=False), self._clock())

    def _stepped(self, contact: Contact, message: m.Stepped) -> None:
        epoch = self._changer.epoch
        if epoch is not None:
            self._stragglers.heard(epoch, contact.device, message)
            epoch.compare(contact.device, message, self._commits.marks.hear_files(message.files), self._clock())
        self._commits.marks.hear(message.step, message.marks)
        if epoch is None or message.epoch != epoch.number or message.step <= epoch.last_step:
            return
        epoch.last_step, epoch.stepped_s = message.step, self._clock()
        self._roster.after_step = message.step
        if message.step > self._record.newest_step:  # else an agent has told of it
            self._record.stepped(message)
        checked = epoch.timed(message)
        if checked is not None and epoch.number not in self._record.checked_epochs:
            self._record.append(checked)
        self._commits.safe(message.step - 1)  # every rank voted, so every rank knew the step before to be safe
        self._changer.stepped(message.epoch)

    def _evaluated(self, message: EvaluationDone) -> None:
        """All ranks say the same, and those of an epoch that begins there say it again: the first word counts."""
        epoch = self._changer.epoch
        if epoch is None or message.epoch != epoch.number or message.step in self._record.evaluated_steps:
            return
        self._record.append(message)

    # --- observing ---

    def _observe(self) -> Observation:
        now_s, epoch, ready = self._clock(), self._changer.epoch, self._roster.ready()
        left_out = self._changer.left_out()  # after who is ready: those have said what they see
        ready = ready.difference(left_out)  # not -=, which leaves no frozenset
        given_up = self._share.given_up(ready | self._vital())
        doomed = tuple(sorted({**dict(given_up), **dict(self._doomed.told())}.items()))
        going = frozenset(node for node, _ in doomed)
        repaced = self._stragglers.repaced(epoch, ready - going)
        leave_fits = self._changer.prospects.leave_fits(epoch, ready, going)
        self._changer.prospects.expect(epoch, ready - going, self._roster.coming().difference(left_out) - going)
        agents = frozenset(agent.node for agent in self._agents())
        return Observation(
            state=self._record.state,
            cancel_wanted=self._cancel.is_set(),
            members=self._roster.members(now_s) + self._never_reached(now_s),
            vital=self._vital(),
            ready=ready,
            expected=self._roster.expected.difference(left_out),
            left_out=tuple(left_out.items()),
            away=frozenset(self._record.had) - self._roster.expected,
            tried=self._changer.tried,
            agents=agents,
            tried_agents=self._changer.tried_agents,
            in_state_s=now_s - self._record.state_since_s,
            troubles=() if epoch is None else epoch.troubles_seen(now_s),
            apart=self._reaching.apart(epoch),
            all_at_fault=epoch is not None and epoch.all_at_fault,
            ended=self._last_step.ended(epoch),
            last_step=self._last_step.seen(epoch),
            last_step_told=self._last_step.told,
            join_gain=self._changer.prospects.join_gain(epoch, ready - going, repaced=bool(repaced)),
            repaced=repaced,
            doomed=doomed,
            given_up=frozenset(node for node, _ in given_up),
            leave_fits=leave_fits,
            rescue=self._changer.prospects.rescue.wanted(epoch, going, leave_fits),
            interrupted=self._changer.interrupted,
            since_attempt_s=now_s - self._changer.attempt_ended_s,
            stalled_s=self._stalls.seen(epoch),
            witnesses=self._roster.witnesses(now_s, self._rules.silence_confirmed_s),
            computing=frozenset() if epoch is None else epoch.computing,
            since_step_s=math.inf if epoch is None else now_s - epoch.stepped_s,
            begun=bool(self._record.plans),
            ended_ranks=tuple(node for node in self._record.ended_ranks.values() if node in agents),
            own_code=self._spec.model.module is not None,
            pause=self._pausing.seen(epoch),
        )

    def _vital(self) -> frozenset[str]:
        return frozenset() if self._changer.epoch is None else self._changer.epoch.vital

    def _never_reached(self, now_s: float) -> tuple[Member, ...]:
        """Nodes of an adopted epoch that this supervisor could not reach in a generous time. Where it has reached no
        rank, which it could stop the epoch by, they may step on somewhere until they give up waiting for it."""
        epoch = self._changer.epoch
        if epoch is None or self._adopted is not epoch or self._changer.interrupted:
            return ()
        orphaned_s = self._settings.orphaned_s + self._settings.silence_s
        if now_s - self._began_s < (_ADOPT_WAIT_S if self._roster.ranks(epoch.computing) else orphaned_s):
            return ()
        missing = self._vital() - {contact.node for contact in self._roster.contacts()}
        return tuple(Member(node=node, name=f"node {node}", connected=False, silent_s=0.0) for node in sorted(missing))

    def _expect_checkpoints(self) -> None:
        epoch = self._changer.epoch
        if epoch is not None and self._spec.checkpoint.uri is not None:
            self._commits.expect(epoch.number, epoch.step, owners(epoch.number, epoch.plan, self._spec.model))
