"""A real Supervisor in a thread, over a ProcessCluster, and what its journal says."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from process_cluster import SETTINGS, ProcessCluster
from waiting import eventually

from shoal_planner.job import CheckpointSpec, DataSpec, JobSpec, LimitsSpec, ModelSpec, TrainSpec
from shoal_planner.plan import parse_plan
from shoal_recovery.journal import Entry, Event, JobState, PlanAdopted, RecoveryDone, StateChanged, StepDone
from shoal_workers.settings import WorkerSettings
from shoal_workers.share import ToldShare
from shoal_workers.solo import run_solo
from shoal_workers.supervisor import Supervisor

E = TypeVar("E", bound=Event)
WAIT_S = 90.0


def tiny_job(uri: str, *, steps: int, min_devices: int = 1, checkpoint: CheckpointSpec | None = None) -> JobSpec:
    return JobSpec(
        name="tiny",
        model=ModelSpec(layers=4, hidden=32, heads=2, ffn=64, vocab=256),
        data=DataSpec(uri=uri),
        train=TrainSpec(global_batch=4, seq_len=16, steps=steps, warmup_steps=5),
        limits=LimitsSpec(min_devices=min_devices),
        checkpoint=checkpoint or CheckpointSpec(),
    )


class _Vanished(Exception):
    pass


class MortalSupervisor(Supervisor):
    """One that a test can end as SIGKILL would: in the middle, without telling anybody."""

    dead = False

    def _listen(self, timeout_s: float) -> None:
        if self.dead:
            raise _Vanished
        super()._listen(timeout_s)

    def let_go(self) -> None:
        """What the end of a process does to its connections: nothing that a thread of it still does is heard of."""
        self._roster.close()
        self._record.keeper.close()
        self._commits.close()


class Supervised:
    """A supervisor that runs."""

    def __init__(
        self,
        cluster: ProcessCluster,
        job: str,
        spec: JobSpec,
        *,
        restarted: bool = False,
        history: tuple[Entry, ...] = (),
        settings: WorkerSettings = SETTINGS,
        share: ToldShare | None = None,
        prepare: Callable[[Supervisor], None] = lambda supervisor: None,
    ) -> None:
        """`prepare` is called before it begins."""
        self.job = job
        self.spec = spec
        self.supervisor = MortalSupervisor(
            job=job,
            spec=spec,
            cluster=cluster,
            settings=settings,
            restarted=restarted,
            history=history,
            share=share,
        )
        prepare(self.supervisor)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"supervisor-{job}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except _Vanished:
            self.supervisor.let_go()
        except BaseException as error:
            self.error = error
            raise

    def vanish(self) -> None:
        self.supervisor.dead = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def events(self, kind: type[E]) -> list[E]:
        assert self.error is None, self.error
        entries = self.supervisor.entries_after(0, 0.0)
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
        return [entry.event for entry in entries if isinstance(entry.event, kind)]

    def events_before(self, event: Event) -> list[Event]:
        entries = self.supervisor.entries_after(0, 0.0)
        return list(itertools.takewhile(lambda other: other != event, (entry.event for entry in entries)))

    @property
    def state(self) -> JobState:
        return JobState(self.events(StateChanged)[-1].state) if self.events(StateChanged) else JobState.QUEUED

    @property
    def code(self) -> str:
        return self.events(StateChanged)[-1].code

    @property
    def reason(self) -> str:
        return self.events(StateChanged)[-1].reason

    @property
    def step(self) -> int:
        return max((done.step for done in self.events(StepDone)), default=0)

    @property
    def epoch(self) -> PlanAdopted:
        return self.events(PlanAdopted)[-1]

    def devices(self) -> frozenset[str]:
        """The nodes that the newest plan computes on."""
        return frozenset(device.node for device in parse_plan(self.epoch.plan).devices())

    def eventually(self, check: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        def check_alive() -> object:
            if self.error is not None:  # else every wait for it would take all of its time
                raise RuntimeError(f"the supervisor of {self.job} died") from self.error
            return check()

        try:
            eventually(check_alive, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from error

    def reaches(self, step: int) -> None:
        self.eventually(lambda: self.step >= step or self.state in (JobState.FAILED, JobState.CANCELLED))
        assert self.step >= step, self.story()

    def steps_on(self, num: int = 3) -> None:
        self.reaches(self.step + num)

    def becomes(self, state: JobState) -> None:
        self.eventually(lambda: self.state is state)

    def recovers(self, known: int = 0) -> RecoveryDone:
        """Waits for one more change of plan than `known` ones."""
        self.eventually(lambda: len(self.events(RecoveryDone)) > known)
        return self.events(RecoveryDone)[known]

    def ends(self) -> JobState:
        self.eventually(self.supervisor.ended.is_set, 2 * WAIT_S)
        self._thread.join(WAIT_S)
        return self.state

    def succeeds(self) -> None:
        assert self.ends() is JobState.SUCCEEDED, self.story()

    def losses(self) -> dict[int, float]:
        """Of the sequence of steps that counts: a step that was done again counts as it came out last."""
        return {done.step: done.loss for done in self.events(StepDone)}

    def samples(self) -> list[tuple[int, int]]:
        """What was fed in the sequence that counts, in order."""
        last = {done.step: done.samples for done in self.events(StepDone)}
        return [span for step in sorted(last) for span in last[step]]

    def story(self) -> str:
        entries = self.supervisor.entries_after(0, 0.0)
        lines = (f"{entry.at_s % 1000:8.3f} {_line(entry.event)}" for entry in entries)
        return "\n".join(line[:300] for line in lines)


def _line(event: Event) -> str:
    if isinstance(event, PlanAdopted):
        devices = [
            f"{replica['node']}:{replica['devices']}"
            for pipeline in event.plan["pipelines"]
            for stage in pipeline["stages"]
            for replica in stage["replicas"]
        ]
        return f"plan_adopted epoch {event.epoch} step {event.step}: {devices}"
    if isinstance(event, StepDone):
        return f"step_done {event.epoch}/{event.step}"
    return f"{event.kind} {dataclasses.asdict(event)}"


@contextlib.contextmanager
def supervised(
    cluster: ProcessCluster,
    job: str,
    spec: JobSpec,
    *,
    history: tuple[Entry, ...] = (),
    settings: WorkerSettings = SETTINGS,
    share: ToldShare | None = None,
) -> Iterator[Supervised]:
    """Ends the job, and its processes, whatever happens."""
    running = Supervised(cluster, job, spec, history=history, settings=settings, share=share)
    try:
        yield running
    finally:
        running.supervisor.cancel()
        if not running.supervisor.dead:
            running.supervisor.ended.wait(20.0)
        cluster.end_ranks(job)


def assert_same_training(running: Supervised, spec: JobSpec) -> None:
    """The loss curve of one undisturbed process, and every sample fed once, in order."""
    steps = spec.train.steps
    losses = running.losses()
    assert sorted(losses) == list(range(1, steps + 1))
    reference = run_solo(spec, steps).losses
    worst = max(abs(losses[step] - expected) / expected for step, expected in enumerate(reference, start=1))
    assert worst < 1e-4, worst
    fed = running.samples()
    assert fed[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(fed)), fed
    assert fed[-1][1] == steps * spec.train.global_batch
