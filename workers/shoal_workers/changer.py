"""Carries out changes of plan for a supervisor: claims an epoch, halts ranks, plans, assigns, waits until they step.

Owns the epoch under way and what is measured of a change. `change` may be interrupted by the next loss at any point;
the supervisor then observes and decides again, and what was measured so far goes on into the next attempt.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from functools import partial

import structlog

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_planner.search import plan as search_plan
from shoal_recovery.decide import ChangePlan, Drain
from shoal_recovery.errors import StateLost, StoreError, StoreUnreachable
from shoal_recovery.journal import AT_REST, JobState, NodeLost
from shoal_recovery.placement import network_bytes_per_parameter, place_copies, told
from shoal_recovery.protection import Protection
from shoal_recovery.shard_map import shard_map
from shoal_workers import messages as m
from shoal_workers.change import (
    EpochBehind,
    Found,
    Interrupted,
    assignments,
    copies_of,
    give,
    highest_epoch,
    make_ready,
    retire,
    rooms,
    take_stock,
    vital_nodes,
)
from shoal_workers.checkpoint_commits import CheckpointCommits
from shoal_workers.epoch_view import EpochView
from shoal_workers.left_out import LeftOut, sentence
from shoal_workers.measuring import Measuring
from shoal_workers.nodes import Cluster
from shoal_workers.pending import PendingChange
from shoal_workers.prospects import Prospects
from shoal_workers.record import JobRecord, plan_adopted
from shoal_workers.roster import Contact, Roster
from shoal_workers.saving import Saving
from shoal_workers.settings import WorkerSettings
from shoal_workers.supply import Supply

log = structlog.get_logger()

_PLAN_LIMIT_S = 5.0
_WAIT_TICK_S = 0.005
_STORE_NEEDED, _STORE_SAID_S = "store_needed", 5.0
_EPOCHS_OF_A_LIFE = 1000  # of a cluster: more changes of plan while nobody hears of it are not to be expected


class Changer:
    def __init__(
        self,
        *,
        job: str,
        spec: JobSpec,
        cluster: Cluster,
        roster: Roster,
        record: JobRecord,
        commits: CheckpointCommits,
        settings: WorkerSettings,
        measuring: Measuring,
        clock: Callable[[], float],
        listen: Callable[[float], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._job = job
        self._spec = spec
        self._cluster = cluster
        self._roster = roster
        self._record = record
        self._commits = commits
        self._settings = settings
        self._clock = clock
        self._listen = listen
        self._is_cancelled = is_cancelled
        self._measuring = measuring
        self._left_out: LeftOut | None = None
        self._pending: PendingChange | None = None
        self._saving = Saving(job, spec, record, commits, settings.reply_timeout_s)
        self.prospects = Prospects(
            spec, record, measuring, self._snapshot, partial(make_ready, job, roster, settings.reply_timeout_s)
        )
        self.supply: Supply | None = None
        self.answers: dict[Contact, m.Halted] = {}
        self.epoch: EpochView | None = None
        self.highest_epoch = 0
        self._claims = False
        self.tried: frozenset[str] = frozenset()
        self.tried_agents: frozenset[str] | None = None
        self.interrupted = 0
        self.attempt_ended_s = clock()

    def adopt(self, *, elsewhere: bool = False) -> None:
        """Takes over the epoch that the record says is under way; nothing is sent to anybody. Where the job rests, it
        is over. Where it was under way `elsewhere`, it may still be, and others be claimed there: so the next one here
        is far away from them, or both would write objects of the same names."""
        number = self.highest_epoch = self._record.epoch
        if self._record.state is JobState.PAUSED:
            return
        if elsewhere:
            self.highest_epoch = (number // _EPOCHS_OF_A_LIFE + 1) * _EPOCHS_OF_A_LIFE - 1
        elif number:
            plan, snapshot = self._record.plans[number], self._record.snapshots[number]
            self.epoch = EpochView.begun(number, plan, snapshot, self._record.starts[number], self.recorded())
            # Of this epoch alone: what an earlier one did beyond its beginning is done again, and written again.
            self.epoch.last_step = self._record.newest_step

    def recorded(self) -> frozenset[str]:
        """Nodes that the newest epoch of the record needs; none before the first."""
        if not self._record.epoch:
            return frozenset()
        plan, snapshot = self._record.plans[self._record.epoch], self._record.snapshots[self._record.epoch]
        return vital_nodes(plan, copies_of(plan, snapshot, self._spec.model))

    def left_out(self) -> dict[str, str]:
        """Nodes that are not used although they may answer, and why."""
        if self._left_out is None:
            self._left_out = LeftOut(self._figures.overrides)
        ranks = self._roster.ranks(self._roster.expected)
        return self._left_out.reasons(self._roster.nodes, ranks, self._clock())

    def drain(self, decision: Drain, joining: frozenset[str] = frozenset()) -> None:
        """Tells every rank to stop after a step that nobody has begun to vote for yet. Where the next plan is to be for
        all these nodes (`joining`), those that come make room for it until then."""
        assert self.epoch is not None
        self._record.enter(JobState.DRAINING, decision.cause, decision.reason)
        for contact in self._roster.ranks(self.epoch.vital):
            contact.send(m.StopAfter(epoch=self.epoch.number, step=self.epoch.last_step + 1))
        if joining:
            snapshot = self._snapshot(joining)
            needed = rooms(self.prospects.foreseen(self.epoch, snapshot), snapshot)
            for contact in self._roster.ranks(joining - self.epoch.vital):
                if contact.device in needed:
                    contact.send(m.MakeRoom(num_bytes=needed[contact.device]))

    def stepped(self, epoch: int) -> None:
        """A step of this epoch is done, or none was left to do: a change that led to it is over, and older snapshots
        are not needed. Nothing happens before all ranks have told what the change took."""
        if self.epoch is None or not self.epoch.all_ready:
            return
        if self.epoch.last_step > self.epoch.step + 1:
            self.prospects.look_ahead(self.epoch, self._roster.ready().difference(self.left_out()))
        if self._pending is None or self._pending.epoch != epoch:
            return
        self._record.append(self._pending.done(self._clock()))
        self._pending = None
        arguments = (self._job, self._agents(frozenset()), epoch, self._settings.reply_timeout_s)
        threading.Thread(target=retire, args=arguments, name=f"retire-{epoch}", daemon=True).start()

    def save(self) -> int | None:
        """What agents hold of the newest whole step goes to the object store: which one. Raises Interrupted."""
        needed = frozenset() if self.epoch is None else self.epoch.vital
        agents, patience_s = self._agents(needed), self._settings.inventory_timeout_s
        found = take_stock(self._job, self._spec, {}, agents, needed, self._record.history(), patience_s)
        return self._bring(found, agents)

    def _bring(self, found: Found, agents: tuple[Contact, ...]) -> int | None:
        step = self._saving.bring(found, agents)
        self._record.unheard(found.reports, step or 0)
        return step

    def change(self, decision: ChangePlan) -> None:
        """Raises Interrupted."""
        try:
            self._change(decision)
            self.interrupted = 0
        except Interrupted as error:
            self.interrupted += 1
            if isinstance(error, EpochBehind):
                self.highest_epoch = max(self.highest_epoch, error.known)
            for contact in error.gone:
                contact.connected = False
                contact.connection.close()
            raise
        finally:
            self.attempt_ended_s = self._clock()

    # --- the phases ---

    def _change(self, decision: ChangePlan) -> None:
        pending = self._begin(decision)
        if not decision.use:
            self._no_plan(decision.use, "no node is left that can be used" if decision.at_fault else "no node answers")
            if decision.at_fault:  # what they hold can be had as long as they are there
                self.save()
            return
        number = self._claim()
        halted = self._halt(number, decision.use | decision.doomed, or_end=pending.cause == "stalled")
        pending.halted(self._record.done_step)
        snapshot = self._snapshot(decision.use)
        agents = self._agents(decision.use)
        limit_s, history = self._settings.inventory_timeout_s, self._record.history()
        asked = partial(take_stock, self._job, self._spec, halted, agents, history=history, timeout_s=limit_s)
        stock = partial(asked, gone=lambda agent: self._roster.is_gone(agent, self._settings.silence_s))
        # Where a source has failed already, all of them are looked through before any is chosen.
        found = stock(decision.use, verified=bool(pending.faults))
        pending.answered = {a.node for a in agents if not self._roster.is_gone(a, self._settings.silence_s)}
        try:
            self._measure(snapshot)
            plan, snapshot = self._plan_without(decision.doomed, snapshot)
        except (NoPlanFits, InvalidField) as error:
            self._no_plan(decision.use | decision.doomed, str(error))
            # While the job waits, nodes may go on vanishing.
            self._bring(stock(frozenset(), verified=True), agents)
            return
        self._assign(number, plan, snapshot, found, pending, agents)

    def _claim(self) -> int:
        """An epoch that nobody had, not even before the head of the cluster lost its memory."""
        if not self._claims:
            agents = self._agents(frozenset())
            known = highest_epoch(self._job, agents, self._settings.reply_timeout_s)
            self.highest_epoch = max(self.highest_epoch, known)
            self._claims = True
        self.highest_epoch = self._roster.epoch = self._cluster.claim_epoch(self._job, self.highest_epoch + 1)
        return self.highest_epoch

    def _agents(self, use: frozenset[str]) -> tuple[Contact, ...]:
        """Those of these nodes, and all others that live: they may hold what nobody else does."""
        living = self._roster.living_agents(self._clock(), self._settings.silence_confirmed_s)
        return self._roster.agents(use) + tuple(agent for agent in living if agent.node not in use)

    def _begin(self, decision: ChangePlan) -> PendingChange:
        now_s = self._clock()
        heard_s = [contact.last_heard_s for contact in self._roster.contacts([node for node, _ in decision.lost])]
        blow_s = min(heard_s, default=now_s)
        if self._pending is None:
            done_step = self._record.done_step
            drained = self.epoch is not None and self.epoch.ended is not None
            since, protection = 0 if self.epoch is None else self.epoch.step, Protection.of(self._spec)
            self._pending = PendingChange(
                cause=decision.cause,
                reason=decision.reason,
                blow_s=blow_s,
                noticed_s=now_s,
                done_step=done_step,
                safe_step=done_step if drained else protection.newest(max(0, done_step - 1), since),
                since=since,
                protection=protection,
                vital_before=frozenset() if self.epoch is None else self.epoch.vital,
                plan_before=self._record.plan_id,
            )
        else:
            self._pending.goes_on(decision)
        self._pending.nodes_lost |= {node for node, _ in decision.lost}
        self._pending.doomed = decision.doomed
        active = bool(self._record.plans)
        self._record.enter(JobState.RECOVERING if active else JobState.STARTING, decision.cause, decision.reason)
        answering = {agent.node for agent in self._roster.living_agents(now_s, self._settings.silence_s)}
        for node, evidence in decision.lost:
            alone = node in answering and node not in decision.at_fault
            lost = NodeLost(node=node, evidence=evidence, detect_s=now_s - blow_s, ranks_alone=alone)
            self._record.append(lost)
            if node not in decision.at_fault:
                self._roster.forget(node)
            elif self._left_out is not None:  # it is connected and well, only of no use to this job
                until_s = now_s + self._settings.apart_s if decision.for_a_while else math.inf
                self._left_out.blame(self._roster.seen(node), evidence, until_s)
        return self._pending

    def _halt(self, number: int, nodes: frozenset[str], *, or_end: bool) -> dict[Contact, m.Halted]:
        """All ranks of these nodes have left every older epoch."""
        ranks = self._roster.ranks(nodes)
        self.answers.clear()
        for contact in ranks:
            contact.send(m.Halt(epoch=number, or_end=or_end))

        def unanswered() -> list[Contact]:
            answers = self.answers
            return [c for c in ranks if (a := answers.get(c)) is None or a.epoch != number]

        self._await(unanswered, nodes, "to leave its epoch")
        return dict(self.answers)

    def _measure(self, snapshot: ClusterSnapshot) -> None:
        """Before the first plan: one device of every type, one after the other, and then links."""
        if self._record.plans:
            return
        for node in self._measuring.untimed(snapshot.nodes):
            contact = self._measuring.time_layers(node)

            def untimed(contact: Contact = contact, device: str = node.device) -> list[Contact]:
                return [] if self._measuring.is_timed(device) else [contact]

            self._await(untimed, frozenset({node.id}), f"to time a layer on {node.device}")
        self._measuring.survey(snapshot.nodes, thorough=True)
        nodes = frozenset(node.id for node in snapshot.nodes)
        agents = list(self._roster.agents(nodes))
        self._await(lambda: agents if self._measuring.survey_under_way() else [], nodes, "to probe links")

    def _plan_without(self, doomed: frozenset[str], snapshot: ClusterSnapshot) -> tuple[Plan, ClusterSnapshot]:
        """Nodes that are to go away are taken only where nothing fits without them. Raises NoPlanFits, InvalidField."""
        try:
            return self._plan(snapshot), snapshot
        except NoPlanFits as error:
            if not doomed:
                raise
            rest = frozenset(node.id for node in snapshot.nodes)
            whole = self._snapshot(rest | doomed)
            plan = self._plan(whole)
            self.prospects.cannot_leave(
                vital_nodes(plan, copies_of(plan, whole, self._spec.model)) & doomed, rest, str(error)
            )
            return plan, whole

    def _plan(self, snapshot: ClusterSnapshot) -> Plan:
        if (foreseen := self.prospects.foreseen(self.epoch, snapshot)) is not None:
            return foreseen
        previous = None if self.epoch is None else self.epoch.plan
        profile = self._record.profile.on(snapshot.nodes)
        limit_s, outlook = _PLAN_LIMIT_S, self._record.outlook
        return search_plan(self._spec, snapshot, profile, previous=previous, time_limit_s=limit_s, outlook=outlook).plan

    def _no_plan(self, nodes: frozenset[str], constraint: str) -> None:
        self.tried, self.tried_agents = nodes, None
        what = "the nodes at hand" if self._record.state is JobState.STARTING else "what is left"
        left_out = sentence(self.left_out().items())
        reason = f"No plan fits {what}: {constraint}{'.' if left_out else ''}{left_out}"
        self._record.enter(JobState.WAITING, "no_plan_fits", reason)
        self.epoch = None

    def _state_lost(self, nodes: frozenset[str], agents: tuple[Contact, ...], problem: str) -> None:
        """Who is away may come back with the state: as long as there was any, nobody gives it up but the user."""
        reason = f"The state cannot be restored from what is there: {problem}"
        if not self._record.done_step:
            self._record.enter(JobState.FAILED, "state_lost", reason)
            return
        self.tried, self.tried_agents = nodes, frozenset(agent.node for agent in agents)
        self._record.enter(JobState.WAITING, "state_lost", f"{reason}. Waiting for nodes that have it.")
        self.epoch = None

    def _assign(
        self,
        number: int,
        plan: Plan,
        snapshot: ClusterSnapshot,
        found: Found,
        pending: PendingChange,
        agents: tuple[Contact, ...],
    ) -> None:
        shards, before = shard_map(plan, self._spec.model), self._record.history()
        zones = {seen.node.id: seen.node.zone for seen in self._roster.nodes}  # who is gone by now is near to nobody
        nodes = frozenset(node.id for node in snapshot.nodes)
        meanwhile = partial(self._beside_the_store, nodes, pending)
        supply = self.supply = Supply(
            number, self._job, self._spec, shards, zones, found, before, pending.faults, meanwhile
        )
        try:
            restore, step = supply.choose()
        except StoreUnreachable as error:
            self._record.say(_STORE_NEEDED, f"The object store is needed to go on, and cannot be used: {error}")
            raise Interrupted(str(error)) from error
        except (StateLost, StoreError, InvalidField) as error:
            self._state_lost(frozenset(node.id for node in snapshot.nodes), agents, str(error))
            return
        self._commits.begins(number, step)
        if max(self._record.checkpoints, default=0) > max(step, before.stored_step):
            self._commits.never_began(number)
            raise Interrupted(f"a newer step than {step} was stored meanwhile, and older ones may be gone")
        copies = place_copies(shards, snapshot, plan.copies)
        self._record.unheard(found.reports, step)  # by now: what is evaluated already is not evaluated again
        orders = assignments(
            epoch=number,
            job=self._job,
            spec=self._spec,
            plan=plan,
            snapshot=snapshot,
            shards=shards,
            copies=copies,
            restore=restore,
            step=step,
            evaluated=step in self._record.evaluated_steps,
            agents={agent.node: agent.address for agent in agents},
            marks=self._commits.marks.at(step, supply.marks),
            files=self._commits.marks.known_files(supply.files),
        )
        # Written and kept before anybody hears of it: a supervisor that dies now is followed by one that knows.
        self._record.append(plan_adopted(number, plan, step, snapshot, network_bytes_per_parameter(shards, copies)))
        self._record.keeper.wait_kept(1.0)
        self.epoch = epoch = EpochView.begun(number, plan, snapshot, step, vital_nodes(plan, copies))
        self._roster.after_step = step
        self.tried = frozenset()
        pending.adopted(number, step, epoch.vital, plan.plan_id, self._clock())
        contacts = {contact.device: contact for contact in self._roster.ranks(epoch.vital)}
        give(orders, plan, contacts)

        def unready() -> list[Contact]:
            return [contacts[device] for device in epoch.plan.devices() if device not in epoch.ready]

        self._await(unready, epoch.vital, "to restore its state and meet its peers")
        pending.all_ready(epoch.ready, supply.told())
        if restore is None:
            self._pending = None  # a first start is no change in flight
        reason = f"Training from step {step} on. {plan.reason}{told(shards, copies)}{sentence(self.left_out().items())}"
        self._record.enter(JobState.RUNNING, "running", reason)
        if epoch.last_step > epoch.step or epoch.ended is not None:
            self.stepped(number)

    def _await(self, unanswered: Callable[[], list[Contact]], nodes: frozenset[str], what: str) -> None:
        """Listens until nobody is left. Raises Interrupted when one of these nodes is lost, in trouble or stuck."""
        asked_s, limit_s = self._clock(), self._settings.reply_timeout_s
        while missing := unanswered():
            self._listen(_WAIT_TICK_S)
            if self.supply is not None and self.epoch is not None and self.epoch.number == self.highest_epoch:
                self.supply.serve()
            now_s = self._clock()
            if self._record.state in AT_REST:
                raise Interrupted("the job has ended meanwhile")
            if gone := [contact for contact in missing if not contact.connected]:
                raise Interrupted(f"lost {gone[0].name} while it was {what}")
            self._all_there(nodes, f"it was {what}")
            if self.epoch is not None and self.epoch.troubles and self.epoch.number == self.highest_epoch:
                raise Interrupted(f"trouble while ranks were {what}")
            if late := [contact for contact in missing if now_s - max(asked_s, contact.last_word_s) > limit_s]:
                raise Interrupted(f"{late[0].name} said nothing for {limit_s} s when it was {what}", tuple(late))

    def _beside_the_store(self, nodes: frozenset[str], pending: PendingChange, waited_s: float) -> None:
        """Listens while the store is waited for, which may hang. Raises Interrupted when one of these nodes is lost, or
        one is heard that has not said what it holds, and may have what is needed: each once, so that none that comes
        and goes keeps the store from being read. And when the job is to end."""
        self._listen(_WAIT_TICK_S)
        if waited_s > _STORE_SAID_S and self._record.plans:
            problem = f"it has not answered for {_STORE_SAID_S:.0f} s and more"
            self._record.say(_STORE_NEEDED, f"The object store is needed to go on, and cannot be used: {problem}")
        if self._is_cancelled() or self._record.state in AT_REST:
            raise Interrupted("the job is to end")
        self._all_there(nodes, "the object store was waited for")
        for agent in self._roster.living_agents(self._clock(), self._settings.silence_confirmed_s):
            if agent.node not in pending.answered | pending.waited_less:
                pending.waited_less.add(agent.node)
                raise Interrupted(f"{agent.node} is there, and may have what the object store was waited for")

    def _all_there(self, nodes: frozenset[str], when: str) -> None:
        """Raises Interrupted when one of these nodes is lost."""
        for member in self._roster.members(self._clock()):
            if member.node in nodes and (not member.connected or member.silent_s > self._settings.silence_s):
                raise Interrupted(f"lost {member.name} while {when}")

    # --- views ---

    @functools.cached_property
    def _figures(self) -> ClusterSnapshot:
        """Of device types and links: they stay what they are, and to ask the cluster for its nodes takes a while."""
        return self._cluster.snapshot()

    def _snapshot(self, nodes: frozenset[str]) -> ClusterSnapshot:
        known = tuple(self._record.with_its_room(self._roster.seen(node).node) for node in sorted(nodes))
        return dataclasses.replace(self._figures, nodes=known).at_speeds(self._record.speeds)
