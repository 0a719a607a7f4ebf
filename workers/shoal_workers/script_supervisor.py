"""The supervisor of a job of kind `ray_train`: observe, decide_script(), act, record. Ray Train trains; this knows
which nodes are there, starts the script, hears what it reports and says what a failure of its workers was.

One thread calls `run`; what the script's processes say comes through `of_script` from others, as do `entries_after`,
`cancel` and `pause`. Knows nothing of Ray: cluster and scripts are interfaces.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, assert_never

import structlog

from shoal_planner.script_spec import ScriptSpec
from shoal_recovery.decide import Rules
from shoal_recovery.decide_script import (
    Await,
    Finish,
    KeepOn,
    Launch,
    NoteLoss,
    ScriptSeen,
    decide_script,
)
from shoal_recovery.evidence import Member, Sight, losses
from shoal_recovery.journal import AT_REST, ClusterEntered, Entry, JobState, NodeJoined, NodeLost, StateChanged
from shoal_recovery.journal_scripts import ScriptStarted
from shoal_workers import messages as m
from shoal_workers.doomed import Doomed
from shoal_workers.keeper import Keeper, every_agent, read_journals
from shoal_workers.nodes import Cluster
from shoal_workers.pausing import BY_USER
from shoal_workers.pulse import Pulse
from shoal_workers.roster import Closed, Event, NodeReady, Roster, Said, ask
from shoal_workers.script_places import ScriptPlaces
from shoal_workers.script_record import ScriptRecord
from shoal_workers.script_reports import ScriptReports
from shoal_workers.script_watch import ScriptWatch
from shoal_workers.scripts import ScriptGone, Scripts
from shoal_workers.settings import WorkerSettings
from shoal_workers.share import Share, ToldShare
from shoal_workers.store_check import try_store

log = structlog.get_logger()

_TICK_S = 0.1
_REFRESH_S = 0.5
_ADOPT_WAIT_S = 20.0


class ScriptSupervisor:
    """As Supervisor: `restarted` takes the place of one that died, `history` is what the control plane has of the job,
    `paused`: the user wants it to rest."""

    def __init__(
        self,
        *,
        job: str,
        spec: ScriptSpec,
        cluster: Cluster,
        scripts: Scripts,
        settings: WorkerSettings,
        restarted: bool,
        history: tuple[Entry, ...] = (),
        paused: bool = False,
        share: ToldShare | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._job, self._spec, self._cluster, self._scripts = job, spec, cluster, scripts
        self._restarted, self._history, self._clock, self._settings = restarted, history, clock, settings
        self._rules = Rules(
            silence_s=settings.silence_s,
            silence_confirmed_s=settings.silence_confirmed_s,
            cut_off_s=settings.cut_off_s,
        )
        self._pulse = Pulse(clock)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._roster = Roster(cluster, job, self._events, clock, self._pulse.awake_s, with_ranks=False)
        self._roster.forgive_s = self._rules.out_of_sight_s
        self._record = ScriptRecord(Keeper(job, wall_clock), clock)
        self._doomed = Doomed(self._record, clock, settings.notice_overdue_s)
        self._lock = threading.RLock()  # the record is read and written by the loop, and by who hears the script
        self._share = Share(self._record.append, share)
        self._places = ScriptPlaces(spec, scripts, self._roster, self._doomed, self._share, clock)
        self._watch = ScriptWatch(scripts, self._record, self._lock)
        self._reports = ScriptReports(
            job, spec, cluster, self._record, self._places, self._lock, clock, settings.silence_confirmed_s
        )
        self._cancel, self._paused, self._why_paused = threading.Event(), paused, BY_USER
        self._script: str | None = None  # the node that it was started on
        self._began_s = self._next_refresh_s = clock()
        self._knows_history = threading.Event()
        self.ended = threading.Event()

    # --- from other threads ---

    def entries_after(self, seq: int, wait_s: float) -> tuple[Entry, ...]:
        return self._record.keeper.entries_after(seq, wait_s)

    def last_seq(self) -> int | None:
        return len(self._record.keeper.entries()) if self._knows_history.is_set() else None

    def signs(self) -> dict[str, float]:
        """By node, for how many seconds nothing was heard of it."""
        return self._roster.silences_s()

    def cancel(self) -> None:
        self._cancel.set()

    def pause(self, wanted: bool, code: str = BY_USER[0], why: str = BY_USER[1]) -> bool:
        self._why_paused = code, why
        self._paused = wanted
        return self._record.state not in AT_REST

    def share(self, told: ToldShare) -> None:
        self._share.tell(told)

    def of_script(self, what: str, *arguments: Any) -> dict[str, Any] | None:
        """What a process of the script says or asks (a method of ScriptReports); None: it is none of this job's now,
        and has to end."""
        self._knows_history.wait()
        answer: dict[str, Any] | None = getattr(self._reports, what)(*arguments)
        return answer

    # --- the loop ---

    def run(self) -> None:
        """Until the job is over, or rests."""
        self._pulse.start()
        if self._restarted or self._history:
            self._adopt()
        self._roster.epoch = self._record.last_epoch
        self._knows_history.set()
        self._heed_share()
        self._begin()
        while self._record.state not in AT_REST:
            self.tick()
        self._wind_up()

    def tick(self) -> None:
        """One round: listen, observe, decide, act."""
        self._listen(_TICK_S)
        self._heed_share()
        with self._lock:
            self._doomed.settle(self._roster.there(self._clock(), self._settings.silence_s))
            self._drop()
            self._watch.take(self._clock())
            decision = decide_script(self._observe())
            match decision:
                case KeepOn():
                    self._runs()
                case Launch():
                    self._launch(decision)
                case NoteLoss():
                    self._lose(decision)
                case Await():
                    self._record.enter(JobState.WAITING, "waiting", decision.reason)
                case Finish():
                    self._finish(decision)
                case _:
                    assert_never(decision)

    def _heed_share(self) -> None:
        """Workers leave other nodes; the script itself, which computes nothing, stays where it is."""
        with self._lock:
            self._share.hear()
            kept, workers = self._share.nodes, frozenset(self._reports.nodes())
            self._roster.keep_to(None if kept is None else kept | self._vital())
            left = self._share.settle(workers, elsewhere=True)
            if left is not None:
                self._record.present &= left | self._vital()

    def _begin(self) -> None:
        state, life = self._record.state, self._cluster.life()
        with self._lock:
            if state is JobState.PAUSED and self._paused and not self._restarted:  # said again: who asks was not told
                again = StateChanged(state=state.value, code="paused_by_user", reason=self._record.reason)
                self._record.append(again)
                return
            if state is JobState.PAUSED and not self._restarted:
                reason = "Resumed: waiting for the nodes of the cluster to answer."
                self._record.enter(JobState.STARTING, "resumed", reason)
            if self._record.life == life or self._record.state in AT_REST:
                return
            if self._record.life is not None:
                self._script = None
                reason = f"Going on with cluster {life.cluster}, from the newest checkpoint."
                self._record.enter(JobState.STARTING, "cluster_lost", reason)
            elif state is JobState.QUEUED:
                reason = "Waiting for the nodes of the cluster to answer."
                self._record.enter(JobState.STARTING, "starting", reason)
            self._record.append(ClusterEntered(cluster=life.cluster, incarnation=life.incarnation))
            self._check_store()

    def _check_store(self) -> None:
        uri = self._spec.checkpoint.uri
        tried = try_store(uri)
        if tried.refused is not None or tried.problem is not None:
            reason = f"checkpoint.uri = {uri!r}: cannot be written from the cluster: {tried.refused or tried.problem}"
            self._record.enter(JobState.FAILED, "store_refused", reason)

    def _adopt(self) -> None:
        """Reads what the supervisor before this one wrote; a script that runs goes on."""
        deadline_s = self._clock() + _ADOPT_WAIT_S
        entries = read_journals(self._job, every_agent(self._cluster, _ADOPT_WAIT_S), ask, self._history)
        self._share.adopt(entries)
        self._record.adopt(entries)
        self._roster.only = None if self._share.nodes is None else self._share.nodes | self._vital()
        self._roster.refresh()
        while self._clock() < deadline_s and not self._all_there():
            time.sleep(_TICK_S)
            self._roster.refresh()
        resting = self._record.state in (JobState.QUEUED, *AT_REST)
        if self._record.attempt and not resting and self._record.life == self._cluster.life():
            self._script = self._record.seat
            self._watch.start(self._record.attempt, self._record.num_lines)

    def _all_there(self) -> bool:
        return bool(self._roster.expected) and self._roster.expected <= self._roster.ready()

    def _wind_up(self) -> None:
        self._watch.stop()
        self._record.keeper.flush(5.0)
        self._roster.close()
        self._pulse.stop()
        self._record.keeper.close()
        self.ended.set()

    # --- observing ---

    def _observe(self) -> ScriptSeen:
        record = self._record
        return ScriptSeen(
            state=record.state,
            places=self._places.all(),
            expected=self._places.expected(),
            min_workers=self._spec.workers.min,
            in_state_s=self._clock() - record.state_since_s,
            cancel_wanted=self._cancel.is_set(),
            pause_wanted=self._paused,
            why_paused=self._why_paused,
            gone=tuple(sorted(self._gone().items())),
            script=self._script,
            launches=record.attempt,
            ended=None if self._script is None else self._watch.ended,
            steps=record.steps_since_launch,
        )

    def _vital(self) -> frozenset[str]:
        """Nodes of the script and its workers that are not known to be lost."""
        nodes = set(self._reports.nodes())
        if self._script is not None and self._script in self._roster.expected | self._record.present:
            nodes.add(self._script)
        return frozenset(nodes - self._reports.lost)

    def _gone(self) -> dict[str, str]:
        now_s, vital = self._clock(), self._vital()
        members = self._roster.members(now_s)
        if now_s - self._began_s > _ADOPT_WAIT_S:
            reached = {member.node for member in members}
            never = (Member(node=node, name=f"node {node}", connected=False, silent_s=0.0) for node in vital - reached)
            members += tuple(never)
        sight = Sight(
            members=members,
            witnesses=self._roster.witnesses(now_s, self._rules.silence_confirmed_s),
            vital=vital,
            computing=frozenset(),
            troubled=frozenset(),
            since_step_s=math.inf,
        )
        return losses(sight, self._rules)

    def _drop(self) -> None:
        dropped = self._roster.drop(self._vital(), self._clock(), self._rules.silence_s)
        self._record.present -= dropped

    # --- acting ---

    def _launch(self, decision: Launch) -> None:
        record, attempt = self._record, self._record.attempt + 1
        if record.state is JobState.WAITING:
            record.enter(JobState.RECOVERING, "nodes_joined", decision.reason)
        raylet = self._places.incarnation(decision.node)
        if raylet is None:
            return
        self._reports.begin()
        record.append(ScriptStarted(attempt=attempt, node=decision.node, reason=decision.reason))
        self._script = decision.node
        program = self._spec.script
        order = {
            "path": program.path,
            "entrypoint": program.entrypoint,
            "secrets": program.secrets,
            "trainer": {
                "job": self._job,
                "attempt": attempt,
                "storage": self._spec.checkpoint.uri,
                "keep": self._spec.checkpoint.keep,
                "min_workers": self._spec.workers.min,
                "max_workers": self._spec.workers.max,
                "resources": self._places.per_worker(),
            },
        }
        try:
            self._scripts.start(attempt, raylet, program, order)
        except ScriptGone as error:
            self._watch.never(attempt, error)
        else:
            self._watch.start(attempt, 0)

    def _runs(self) -> None:
        """Once the script's process answers; where workers were lost, once they train again (ScriptReports)."""
        fresh = self._record.state is JobState.STARTING
        again = self._record.state is JobState.RECOVERING and not self._reports.waits_for_workers
        if self._script is not None and self._watch.answered and (fresh or again):
            self._record.enter(JobState.RUNNING, "script_running", f"The script runs on {self._script}.")

    def _lose(self, decision: NoteLoss) -> None:
        longest_s = 0.0
        for node, evidence in decision.nodes:
            heard = (each.silent_s for each in self._roster.members(self._clock()) if each.node == node)
            silent_s = max(heard, default=0.0)
            longest_s = max(longest_s, silent_s)
            self._record.append(NodeLost(node=node, evidence=evidence, detect_s=silent_s))
            self._roster.forget(node)
        self._reports.lose(frozenset(node for node, _ in decision.nodes), decision.reason, longest_s)
        self._record.enter(JobState.RECOVERING, "node_lost", decision.reason)
        if decision.script:
            self._watch.stop()
            self._script = None
            threading.Thread(target=self._end_script, args=(False,), name="end-script", daemon=True).start()

    def _finish(self, decision: Finish) -> None:
        if decision.state is JobState.FAILED:
            self._reports.failed(self._watch.failed, self._script or "")
        self._watch.stop()
        self._end_script(True)
        reason = decision.reason
        if decision.state is JobState.FAILED:
            reason = self._reports.why_failed() or reason
        self._record.enter(decision.state, decision.code, reason)

    def _end_script(self, gently: bool) -> None:
        try:
            self._scripts.end(gently)
        except Exception as error:  # whatever it is, the job must not hang on it; its process ends with its cluster
            log.warning("script not ended", job=self._job, error=str(error))

    # --- listening ---

    def _listen(self, timeout_s: float) -> None:
        if self._clock() >= self._next_refresh_s:
            self._roster.refresh()
            self._places.refresh()
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
            case Said(contact, m.Noticed() | m.Withdrawn() as message):
                with self._lock:
                    self._doomed.hear(contact.node, message)
            case NodeReady(seen):
                with self._lock:
                    if seen.node.id not in self._record.present:
                        node = seen.node
                        self._record.append(NodeJoined(node=node.id, device=node.device, devices=node.devices))
            case Said() | Closed():
                pass  # what else agents say is about snapshots, and a closed contact itself shows it
            case _:
                assert_never(event)
