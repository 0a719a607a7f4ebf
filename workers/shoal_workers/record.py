"""The history of one job as its supervisor keeps it: state, plans, steps. Everything in it comes from the journal, so a
restarted supervisor that reads the journal knows what the one before it knew.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable

import structlog

from shoal_planner.cluster import ClusterSnapshot, Node, snapshot_from_mapping, snapshot_to_mapping
from shoal_planner.moving import UNKNOWN, Outlook
from shoal_planner.plan import Plan, parse_plan, plan_to_mapping
from shoal_planner.pools import Sighting, seen_pools
from shoal_planner.profile import Profile, joined, profile_from_mapping
from shoal_recovery.journal import (
    TRANSITIONS,
    CheckpointAsked,
    CheckpointCommitted,
    ClusterEntered,
    Entry,
    EvaluationDone,
    Event,
    FiguresMeasured,
    JobState,
    NodeJoined,
    NodeLost,
    NodeNoticed,
    NodeRecovered,
    NodeSlowed,
    NodeStays,
    NoticeEnded,
    PlanAdopted,
    PredictionChecked,
    RecoveryDone,
    RoomShort,
    StateChanged,
    StepDone,
    StepSkipped,
    StoreFailed,
    StoreRecovered,
)
from shoal_recovery.tenure import Life
from shoal_workers import messages as m
from shoal_workers.change import History
from shoal_workers.keeper import Keeper

log = structlog.get_logger()

_RECENT_STEPS = 50


class JobRecord:
    def __init__(self, keeper: Keeper, clock: Callable[[], float]) -> None:
        self.keeper = keeper
        self._clock = clock
        self.state = JobState.QUEUED
        self.state_since_s = clock()
        self.reason = ""
        self.life: Life | None = None  # of the cluster that has the job
        self.done_step = 0
        self.plans: dict[int, Plan] = {}
        self.snapshots: dict[int, ClusterSnapshot] = {}
        self.starts: dict[int, int] = {}
        self.last_steps: dict[int, int] = {}
        self.recent_steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)  # how long they took
        self.checkpoints: set[int] = set()
        self.store_failed: StoreFailed | None = None
        self.asked: CheckpointAsked | None = None  # the newest wish of a user
        self.rooms: dict[str, RoomShort] = {}
        # By epoch, of those since a step was last done that never was before: one whose ranks ended and nothing else.
        self.ended_ranks: dict[int, str] = {}
        self._furthest_step = 0
        self.evaluated_steps: set[int] = set()
        self.present: set[str] = set()
        self.had: set[str] = set()  # every node of this cluster that a plan was made with
        self.notices: dict[tuple[str, str], NodeNoticed] = {}  # that are not over, by node and source
        self.staying: set[str] = set()  # of their nodes, those without which no plan fits
        self.slow: dict[str, NodeSlowed] = {}  # nodes that are stragglers
        self.times_slowed: Counter[str] = Counter()
        self.profile = Profile()
        self.checked_epochs: set[int] = set()
        self._outlook = UNKNOWN  # what changes of plan have taken so far
        self._sightings: list[Sighting] = []  # of nodes that came or were lost, each once
        self._there: dict[str, Node] = {}
        self._newest_s = 0.0  # when the last entry was written; wall clocks may be set back, this is not

    def adopt(self, entries: Iterable[Entry]) -> None:
        entries = tuple(entries)
        self.keeper.adopt(entries)
        for entry in entries:
            self._note(entry)

    def append(self, event: Event) -> None:
        self._note(self.keeper.append(event))

    def room_short(self, node: str, num_bytes: int, room_bytes: int, *, on_disk: bool) -> None:
        """What agents tell whoever watches them anew is written once, and that something lies on disk changes nothing
        where something else had no room there."""
        short = RoomShort(node=node, num_bytes=num_bytes, on_disk=on_disk, room_bytes=room_bytes)
        before = self.rooms.get(node)
        if before is None or (before != short and not on_disk):
            self.append(short)

    def with_its_room(self, node: Node) -> Node:
        """With no more host memory than snapshots were found to have there, where they did not fit once."""
        short = self.rooms.get(node.id)
        if short is None or short.on_disk or node.host_memory_bytes <= short.room_bytes:
            return node
        return dataclasses.replace(node, host_memory_bytes=short.room_bytes)

    @property
    def speeds(self) -> dict[str, float]:
        """Of stragglers: the share of what they should compute."""
        return {node: 1 / slowed.slowdown for node, slowed in self.slow.items()}

    def keep_to(self, nodes: frozenset[str]) -> frozenset[str]:
        """Others are nothing to the job any more: which ones it had."""
        gone = frozenset((self.present | self.had) - nodes)
        self.present &= nodes
        self.had &= nodes
        return gone

    def stepped(self, said: m.Stepped) -> None:
        done = step_done(said)  # first: what cannot be read is not written down by half
        if said.skipped is not None:
            self.append(StepSkipped(epoch=said.epoch, step=said.step, problem=said.skipped))
        self.append(done)

    def unheard(self, reports: Iterable[m.Reported], step: int) -> None:
        """State was found of a later step than anybody had reported: so were its `reports`, of the steps up to this
        one and of evaluations after them."""
        for one in sorted(reports, key=lambda said: (said.step, isinstance(said, EvaluationDone))):
            if one.epoch != self.epoch or one.step > step:
                continue
            try:
                if isinstance(one, EvaluationDone):
                    if one.step not in self.evaluated_steps:
                        self.append(one)
                elif one.step > self.newest_step:
                    self.stepped(one)
            except (TypeError, ValueError, IndexError) as error:  # a rank, which runs code of users, wrote it
                log.warning("report of a step cannot be read", step=one.step, error=str(error))

    def enter(self, state: JobState, code: str, reason: str) -> None:
        """Nothing is written when the job is in that state for that reason already."""
        if state is self.state:
            return
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.append(StateChanged(state=state.value, code=code, reason=reason))

    def say(self, code: str, reason: str) -> None:
        """The job is in the same state, for another reason; nothing is written when that is known."""
        if reason != self.reason:
            self.append(StateChanged(state=self.state.value, code=code, reason=reason))

    def history(self) -> History:
        return History(
            plans=dict(self.plans),
            starts=dict(self.starts),
            done_step=self.done_step,
            stored_step=max(self.checkpoints, default=0),
        )

    @property
    def epoch(self) -> int:
        """The newest one that was adopted; 0 before the first."""
        return max(self.plans, default=0)

    @property
    def newest_step(self) -> int:
        """The last step that is done in the history that counts."""
        return self.last_steps.get(self.epoch, self.starts.get(self.epoch, 0))

    @property
    def plan_id(self) -> str:
        """Of that epoch's plan; empty before the first."""
        return self.plans[self.epoch].plan_id if self.plans else ""

    @property
    def outlook(self) -> Outlook:
        """What changes of plan have taken, and how often nodes were lost, since the job began."""
        return dataclasses.replace(self._outlook, pools=seen_pools(self._sightings, self._newest_s))

    def _note(self, entry: Entry) -> None:
        event, self._newest_s = entry.event, max(self._newest_s, entry.at_s)
        match event:
            case StateChanged():
                self._enter(JobState(event.state), event.reason)
            case ClusterEntered():
                self.had.clear()
                self.life = Life(cluster=event.cluster, incarnation=event.incarnation)
            case PlanAdopted():
                self.plans[event.epoch] = parse_plan(event.plan)
                snapshot = snapshot_from_mapping(event.snapshot)
                self.snapshots[event.epoch] = snapshot
                self.had.update(node.id for node in snapshot.nodes)
                for node in snapshot.nodes:
                    if node.id not in self._there:
                        self._there[node.id] = node
                        self._sightings.append(Sighting(at_s=self._newest_s, node=node, there=True))
                self.starts[event.epoch] = event.step
                self.done_step = event.step  # what was done beyond it is void, and no later change can lose it again
                self.checkpoints = {step for step in self.checkpoints if step <= event.step}
            case StepDone():
                if event.step > self._furthest_step:
                    self._furthest_step = event.step
                    self.ended_ranks.clear()
                self.done_step = max(self.done_step, event.step)
                self.last_steps[event.epoch] = max(self.last_steps.get(event.epoch, 0), event.step)
                self.recent_steps_s.append(event.duration_s)
            case NodeJoined():
                self.present.add(event.node)
                self.slow.pop(event.node, None)
            case NodeSlowed():
                self.slow[event.node] = event
                self.times_slowed[event.node] += 1
            case NodeRecovered():
                self.slow.pop(event.node, None)
            case NodeLost():
                if event.ranks_alone:
                    self.ended_ranks.setdefault(self.epoch, event.node)
                self.present.discard(event.node)
                self._gone(event.node)
            case NodeNoticed():
                self.notices[event.node, event.source] = event
            case NodeStays():
                self.staying.add(event.node)
            case NoticeEnded():
                self.notices.pop((event.node, event.source), None)
                self.staying.discard(event.node)
                if event.outcome == "gone":
                    self._gone(event.node)
            case EvaluationDone():
                self.evaluated_steps.add(event.step)
            case CheckpointCommitted():
                self.checkpoints.add(event.step)
            case CheckpointAsked():
                self.asked = event
            case StoreFailed():
                self.store_failed = event
            case RoomShort():
                self.rooms[event.node] = event
            case StoreRecovered():
                self.store_failed = None
            case FiguresMeasured():
                self.profile = joined(self.profile, profile_from_mapping(event.profile))
            case PredictionChecked():
                self.checked_epochs.add(event.epoch)
            case RecoveryDone():
                beside_s = event.total_s - event.detect_s - event.restore_s
                self._outlook = Outlook(restart_s=max(0.0, beside_s))
            case _:
                pass

    def _enter(self, state: JobState, reason: str) -> None:
        self.reason = reason
        if state is not self.state:
            self.state, self.state_since_s = state, self._clock()
        if state is JobState.PAUSED:  # its nodes are nothing to it any more
            self.had.clear()
            self.present.clear()
            self.notices.clear()
            self.staying.clear()
            self.slow.clear()

    def _gone(self, node: str) -> None:
        self.rooms.pop(node, None)
        self.slow.pop(node, None)
        lost = self._there.pop(node, None)
        if lost is not None:
            self._sightings.append(Sighting(at_s=self._newest_s, node=lost, there=False))


def plan_adopted(
    epoch: int, plan: Plan, step: int, snapshot: ClusterSnapshot, network_bytes_per_parameter: float = 0.0
) -> PlanAdopted:
    return PlanAdopted(
        epoch=epoch,
        plan_id=plan.plan_id,
        step=step,
        reason=plan.reason,
        plan=plan_to_mapping(plan),
        snapshot=snapshot_to_mapping(snapshot),
        network_bytes_per_parameter=network_bytes_per_parameter,
    )


def step_done(said: m.Stepped) -> StepDone:
    return StepDone(
        epoch=said.epoch,
        step=said.step,
        loss=said.loss,
        grad_norm=said.grad_norm,
        lr=said.lr,
        tokens=said.tokens,
        duration_s=said.duration_s,
        samples=tuple((first, last) for first, last in said.samples),
        moved_bytes=tuple((link, count) for link, count in said.moved),
        exposed=(said.exposed[0], said.exposed[1]),
        waited_s=tuple((kind, mean_s, most_s) for kind, mean_s, most_s in said.waited),
        stalled_s=said.stalled_s,
        skipped=said.skipped is not None,
    )
