"""A rank process around the engine: it takes orders from a supervisor, steps on its own, and survives changes of plan.

Nobody sends it a command per step. When the supervisor's connection breaks it goes on stepping and keeps its reports
until somebody asks again. Runs without Ray; the actor only starts it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from typing import Any, assert_never

import structlog
import torch

from shoal_planner.job import parse_job
from shoal_recovery.journal import EvaluationDone
from shoal_workers import messages as m
from shoal_workers.allocator import make_room
from shoal_workers.devices import compute_device, current, num_shown, return_memory
from shoal_workers.epoch_run import EpochRun, WholeState
from shoal_workers.frozen import FrozenWeights
from shoal_workers.lifeline import Lifeline
from shoal_workers.log_output import Output
from shoal_workers.preparing import prepare
from shoal_workers.settings import WorkerSettings
from shoal_workers.slot_maps import SlotMaps
from shoal_workers.timing import time_parts, time_update
from shoal_workers.user_code import users_own
from shoal_workers.watched import report
from shoal_workers.wire import Connection, ConnectionClosed, Server

log = structlog.get_logger()

_KEPT_REPORTS = 4096
_JOIN_S = 2.0


class Rank:
    """Serves until the process ends. One device of one node, for one job."""

    def __init__(self, *, node: str, index: int, settings: WorkerSettings, output: Output | None = None) -> None:
        """What it prints goes to `output` where it has one."""
        self._device = f"{node}:{index}"
        self._node = node
        self._settings = settings
        self._output = output
        self.lifeline = Lifeline(
            cut_off_s=settings.cut_off_s, ends_itself_s=settings.ends_itself_s, orphaned_s=settings.orphaned_s
        )
        self._cuda_devices = _shown(settings)
        self._epoch = 0
        self._run: EpochRun | None = None
        self._whole: WholeState | None = None
        self._frozen: FrozenWeights | None = None  # of the run before
        self._maps = SlotMaps()
        self._reports: deque[m.Reported] = deque(maxlen=_KEPT_REPORTS)
        self._endings: deque[m.Left | m.Trouble] = deque(maxlen=1)
        self._outboxes: list[queue.SimpleQueue[Any]] = []
        self._lock = threading.RLock()
        self._server = Server(settings.bind_host, self._serve, f"rank-{self._device}")
        self.port = self._server.port

    def start(self) -> None:
        self._server.start()

    def _serve(self, connection: Connection) -> None:
        """Whoever is connected hears everything: which of two connections is the newer one cannot be told here."""
        wire, _ = connection.receive()
        watch = m.decode_as(m.Watch, wire)
        outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            self._outboxes.append(outbox)
            stepping = self._run is not None and self._run.alive
            outbox.put(m.Hello(pid=os.getpid(), epoch=self._epoch, stepping=stepping, cuda_devices=self._cuda_devices))
            for report in self._reports:
                # An evaluation of that step comes after its report, so it may have been missed.
                if report.step + isinstance(report, EvaluationDone) > watch.after_step:
                    outbox.put(report)
            for ending in self._endings:
                outbox.put(ending)
        sender = threading.Thread(target=self._send_all, args=(connection, outbox), name="reports", daemon=True)
        sender.start()
        try:
            while True:
                message = m.decode(connection.receive()[0])
                if isinstance(message, m.Heard):
                    self.lifeline.answered(connection, message.at_s, message.epoch)
                else:
                    self._obey(message)
        finally:
            self.lifeline.left(connection)
            with self._lock:
                self._outboxes.remove(outbox)

    def _send_all(self, connection: Connection, outbox: queue.SimpleQueue[Any]) -> None:
        with contextlib.suppress(ConnectionClosed):  # the supervisor is gone; the next one asks for what it missed
            report(connection, outbox, self._settings.heartbeat_s)

    def _obey(self, order: m.Halt | m.Assign | m.Bring | m.StopAfter | m.Measure | m.Prepare | m.MakeRoom) -> None:
        match order:
            case m.Halt():
                self._halt(order.epoch, or_end=order.or_end)
            case m.Assign():
                self._assign(order)
            case m.Bring():
                with self._lock:
                    if self._run is not None and order.epoch == self._epoch:
                        self._run.bring(order)
            case m.StopAfter():
                with self._lock:
                    if self._run is not None and order.epoch == self._epoch:
                        self._run.stop_after(order.step)
            case m.Measure():
                threading.Thread(target=self._measure, args=(order,), name="measure", daemon=True).start()
            case m.Prepare():
                threading.Thread(target=self._prepare, args=(order,), name="prepare", daemon=True).start()
            case m.MakeRoom():
                self._make_room(order)
            case _:
                assert_never(order)

    def _halt(self, epoch: int, *, or_end: bool) -> None:
        with self._lock:
            if epoch <= self._epoch:
                return  # an order of an older epoch, or one that was already obeyed
            self._epoch = epoch
        self._end_run(or_end=or_end)
        with self._lock:
            if epoch != self._epoch:
                return  # overtaken while the run ended: whoever gave the newer order is answered
            whole = self._whole
        step = None if whole is None else whole.step
        self._say(
            m.Halted(
                epoch=epoch,
                step=step,
                layout_epoch=0 if whole is None else whole.epoch,
                layout_rank=0 if whole is None else whole.rank,
            )
        )

    def _end_run(self, *, or_end: bool = False) -> None:
        with self._lock:
            run = self._run
        if run is None:
            return
        run.abandon()
        ended = run.join(_JOIN_S)
        if or_end and not ended:
            log.error("a stalled epoch does not end; the process does", device=self._device, epoch=run.epoch)
            os._exit(1)  # what it stands at may never let go, and its memory is needed
        with self._lock:
            if self._run is not run:
                return  # somebody else ended it meanwhile
            whole = run.whole
            if not ended:
                # It may still write into its own tensors: they are nobody's state any more. What it came from, and has
                # not let go, it does not touch.
                log.warning("an abandoned epoch does not end", device=self._device, epoch=run.epoch)
                self._whole = whole if whole is not None and whole.epoch != run.epoch else None
            else:
                self._whole, self._frozen = whole, run.frozen
                for name in run.left:
                    self._maps.leave(name)
            self._run = None

    def _assign(self, order: m.Assign) -> None:
        with self._lock:
            if order.epoch != self._epoch:
                return  # this assignment was overtaken
            if order.num_threads:
                torch.set_num_threads(order.num_threads)
            if self._output is not None:
                self._output.turn_to(order.epoch, order.rank)
            self._endings.clear()
            # The run has the state of before from here on, so that its memory is free as soon as it is not needed.
            old, self._whole = self._whole, None
            frozen, self._frozen = self._frozen, None
            self._run = EpochRun(
                order,
                node=self._node,
                device=self._device,
                old=old,
                frozen=frozen,
                settings=self._settings,
                lifeline=self.lifeline,
                say=self._say,
                maps=self._maps,
            )
            self._run.start()

    def _measure(self, order: m.Measure) -> None:
        threads = order.num_threads or torch.get_num_threads()
        is_cpu, simulated = order.num_threads is not None, self._settings.simulate_devices
        device = compute_device(self._device, is_cpu=is_cpu, simulated=simulated)
        job, rows = parse_job(order.spec), []
        try:
            with current(device):
                for row in time_parts(job, threads, device, order.degrees):
                    rows.append(row)
                    self._say(m.Progress(epoch=self._epoch))
                self._say(m.Measured(rows=rows, updates_per_s=time_update(job, threads, device)))
        except BaseException as error:
            if (problem := users_own(error, job.model)) is None:
                raise
            self._say(m.Measured(rows=[], updates_per_s=0.0, problem=problem))
        return_memory(device)

    def _prepare(self, order: m.Prepare) -> None:
        with self._lock:
            takes_part = self._run is not None and self._run.alive
        try:
            if not takes_part:  # it has all of it, and generators are in use
                prepare(parse_job(order.spec), self._settings)
        except BaseException as error:  # also of a user's own code
            log.info("not all is ready", device=self._device, why=str(error))
        self._say(m.Prepared())

    def _make_room(self, order: m.MakeRoom) -> None:
        with self._lock:
            epoch, has_none = self._epoch, self._run is None and self._whole is None
        if has_none:  # beside state it would be more than there may be
            arguments = order.num_bytes, lambda: self._epoch == epoch
            threading.Thread(target=make_room, args=arguments, name="room", daemon=True).start()

    def _say(self, message: Any) -> None:
        with self._lock:
            if isinstance(message, m.Reported):
                self._reports.append(message)
            if isinstance(message, m.Left | m.Trouble):
                self._endings.append(message)
            for outbox in self._outboxes:
                outbox.put(message)


def _shown(settings: WorkerSettings) -> int | None:
    shown = num_shown()
    return None if settings.simulate_devices and not shown else shown
