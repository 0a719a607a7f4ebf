"""Plays a drill on a ground: waits for each moment, lets the blow fall, mends what must be mended for the job to go on,
and waits until it does. Knows nothing of processes or Ray; whether all went well is judged afterwards.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from faults.drills import Drill, Fault, Kind, Moment
from faults.judging import Blow, Pace

from shoal_planner.job import JobSpec
from shoal_recovery.journal import (
    CheckpointCommitted,
    CheckpointFailed,
    Entry,
    PlanAdopted,
    RecoveryDone,
    StateChanged,
    StepDone,
)

_TICK_S = 0.003
_MOMENT_S = 5.0  # what a drill waits for may not come: then the blow falls all the same
_SETTLE_S = 180.0
_END_S = 300.0
NO_GOAL = "there was nothing to hit"
_CHECKPOINT_S = 15.0  # until one is due, and until it has come to its end
_STEPS_S = 20.0  # for those that a blow lasts
_DISKS = (Kind.DISK_FULL, Kind.DISK_HUNG)
_SPOILT = (Kind.OBJECT_SPOILT, Kind.MANIFEST_SPOILT)
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A blow that fell on these nodes; of those that are `out` nothing can be had until `heal` has ended. `lasts` says
    that the job must go on while it does, for so many `steps` unless they take too long."""

    nodes: tuple[str, ...]
    out: tuple[str, ...]
    heal: Callable[[], None]
    lasts: bool = False
    steps: int = 2


def nothing() -> None:
    """Heals what comes back by itself."""


class Ground(Protocol):
    """What jobs run on. `missing` are kinds that this machine does not allow to bring about, and why."""

    @property
    def missing(self) -> Mapping[Kind, str]: ...

    def begin(self, drill: Drill, job: JobSpec) -> str:
        """Once every node is there. By which name the job keeps its state."""

    def entries(self) -> Sequence[Entry]:
        """The journal, as far as it is known."""

    def paces(self) -> Sequence[Pace]:
        """Of all steps of the job by which nodes are judged, in order; none where that cannot be watched."""

    def whole(self) -> bool:
        """Whether every node is there, with all that runs on it."""

    def strike(self, kind: Kind, pick: int) -> Strike | None:
        """None where there is nothing that it could hit."""

    def writing(self) -> object:
        """Differs as soon as another snapshot is written."""

    def uploading(self) -> bool:
        """Whether a snapshot is on its way to the store."""

    def end(self) -> None:
        """Whatever happened: the job is over, and the nodes are there for the next one."""


class Stuck(Exception):
    """The job did not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """`left_out` are kinds that did not happen, and why; `kept_as` is what the job is called in its store."""

    kept_as: str
    entries: tuple[Entry, ...]
    paces: tuple[Pace, ...]
    blows: tuple[Blow, ...]
    left_out: tuple[tuple[str, str], ...]
    stuck: str | None


def play(ground: Ground, drill: Drill, job: JobSpec) -> Played:
    playing = _Playing(ground, drill)
    stuck = None
    kept_as = ground.begin(drill, job)
    try:
        for fault in drill.faults:
            if playing.ended():
                break
            playing.one(fault)
        playing.to_the_end()
        if not playing.blows:
            raise Stuck("the job ended before anything had failed")
    except Stuck as error:
        stuck = str(error)
    except Exception:  # of the ground: this drill's result, like all that fell before
        stuck = traceback.format_exc()
    finally:
        entries, paces = tuple(ground.entries()), tuple(ground.paces())
        ground.end()
    return Played(
        kept_as=kept_as,
        entries=entries,
        paces=paces,
        blows=tuple(playing.blows),
        left_out=tuple(playing.left_out),
        stuck=stuck,
    )


class _Playing:
    def __init__(self, ground: Ground, drill: Drill) -> None:
        self._ground = ground
        self._drill = drill
        self._pause = threading.Event()
        self.blows: list[Blow] = []
        self.left_out: list[tuple[str, str]] = []

    def one(self, fault: Fault) -> None:
        if fault.kind in self._ground.missing:
            self._leave_out(fault, self._ground.missing[fault.kind])
            return
        self._settle()
        if fault.kind in (Kind.HALF, *_SPOILT):  # then there may be nothing else to go on from
            self._until(lambda: self._committed() >= 1 + (fault.kind in _SPOILT), "stores checkpoints")
        if self.ended():
            return
        came, opened = self._moment(fault)
        self._pause.wait(fault.delay_s)
        struck = self._strike(fault.kind, fault.moment if came else Moment.STEP, fault.pick)
        if struck is None:
            self._leave_out(fault, NO_GOAL)
        else:
            self._live_through(fault, *struck)
        if opened is not None:
            self._heal(*opened)
        self._goes_on("after it was mended")

    def to_the_end(self) -> None:
        if not self._wait(self.ended, _END_S):
            raise Stuck(f"the job did not end in {_END_S:.0f} s")

    # --- moments ---

    def _settle(self) -> None:
        """Every node is there, and the job steps."""
        self._until(lambda: self._state() == "running" and self._step() >= 3, "runs")
        self._until(self._ground.whole, "has all nodes again")
        self._goes_on("with all nodes")

    def _moment(self, fault: Fault) -> tuple[bool, tuple[int, Strike] | None]:
        """Returns at that moment, with the first blow of two; or when it did not come, which is told."""
        opened = None
        match fault.moment:
            case Moment.STEP:
                step = self._step()
                came = self._wait(lambda: self._step() > step, _MOMENT_S)
            case Moment.SNAPSHOT:
                before = self._ground.writing()
                came = self._wait(lambda: self._ground.writing() != before, _MOMENT_S)
            case Moment.UPLOAD:
                came = self._wait(self._ground.uploading, _CHECKPOINT_S)
            case Moment.RECOVERY:
                opened = self._strike(Kind.RANK, Moment.STEP, fault.pick + 1)
                came = self._wait(lambda: self._state() != "running", _MOMENT_S)
            case Moment.DRAIN:
                opened = self._strike(Kind.NOTICE, Moment.STEP, fault.pick + 1)
                came = self._wait(lambda: self._state() != "running", _MOMENT_S)
            case Moment.REDUCED:
                opened = self._strike(Kind.NODE, Moment.STEP, fault.pick + 1)
                came = self._wait(self._recovers(), _MOMENT_S)
        return came, opened

    # --- blows ---

    def _strike(self, kind: Kind, moment: Moment, pick: int) -> tuple[int, Strike] | None:
        step, at_s = self._step(), time.time()
        strike = self._ground.strike(kind, pick)
        if strike is None:
            return None
        self.blows.append(
            Blow(
                kind=kind,
                moment=moment,
                nodes=strike.nodes,
                out=strike.out,
                step=step,
                at_s=at_s,
                healed_at_s=float("inf"),
            )
        )
        return len(self.blows) - 1, strike

    def _live_through(self, fault: Fault, index: int, strike: Strike) -> None:
        tried = self._tried()
        if strike.lasts:
            stepped = self._done(strike.steps)
            self._goes_on(f"beside {fault.kind}")
            self._wait(lambda: stepped() or self.ended(), _STEPS_S)
        if fault.kind in _DISKS:
            self._wait(lambda: self._tried() > tried or self.ended(), _CHECKPOINT_S)
        self._pause.wait(fault.hold_s)
        self._heal(index, strike)

    def _heal(self, index: int, strike: Strike) -> None:
        strike.heal()
        blow = self.blows[index]
        self.blows[index] = Blow(
            kind=blow.kind,
            moment=blow.moment,
            nodes=blow.nodes,
            out=blow.out,
            step=blow.step,
            at_s=blow.at_s,
            healed_at_s=time.time(),
        )

    def _leave_out(self, fault: Fault, why: str) -> None:
        self.left_out.append((fault.kind, why))

    # --- watching ---

    def _recovers(self) -> Callable[[], bool]:
        """Whether, after now, the job has changed its plan and steps again."""
        known = len(self._ground.entries())
        return lambda: any(isinstance(entry.event, RecoveryDone) for entry in self._ground.entries()[known:])

    def _goes_on(self, when: str) -> None:
        """Two more steps, both done from now on; or none is left."""
        self._until(self._done(2), f"steps {when}")

    def _done(self, steps: int) -> Callable[[], bool]:
        """Whether the newest plan has done so many from now on; or none is left."""
        known = len(self._ground.entries())

        def stepped() -> bool:
            done = 0
            for event in (entry.event for entry in self._ground.entries()[known:]):  # what comes before a plan is told
                done = 0 if isinstance(event, PlanAdopted) else done + isinstance(event, StepDone)
            return done >= steps or self._step() == self._drill.train.steps  # its last checkpoint may wait

        return stepped

    def _until(self, check: Callable[[], object], what: str) -> None:
        if not self._wait(lambda: check() or self.ended(), _SETTLE_S):
            raise Stuck(f"not in {_SETTLE_S:.0f} s: the job {what}")

    def _wait(self, check: Callable[[], object], limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while not check():
            if time.monotonic() > deadline_s:
                return False
            self._pause.wait(_TICK_S)
        return True

    def ended(self) -> bool:
        return self._state() in ENDED

    def _state(self) -> str:
        events = (entry.event for entry in reversed(self._ground.entries()))
        return next((event.state for event in events if isinstance(event, StateChanged)), "queued")

    def _step(self) -> int:
        events = (entry.event for entry in reversed(self._ground.entries()))
        return next((event.step for event in events if isinstance(event, StepDone)), 0)

    def _tried(self) -> int:
        """Checkpoints that came to an end, good or bad."""
        ends = (CheckpointCommitted, CheckpointFailed)
        return sum(isinstance(entry.event, ends) for entry in self._ground.entries())

    def _committed(self) -> int:
        return sum(isinstance(entry.event, CheckpointCommitted) for entry in self._ground.entries())
